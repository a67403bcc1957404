"""What the README and the examples promise is true of this checkout."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.jobfile.job import Job, limits_of
from lagom_overlap.jobfile.reading import parse_job, read_job
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate

ROOT = Path(__file__).parent.parent
TUNE_EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.toml") if "[tune]" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", TUNE_EXAMPLES, ids=lambda path: path.name)
def test_every_example_job_is_accepted(path: Path):
    spec = read_job(path)
    assert Job(spec).groups
    limits_of(spec.tune.space)


def test_the_job_in_the_readme_is_accepted():
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        assert Job(parse_job(tomllib.loads(block), "README.md")).groups


def test_the_simulated_example_tunes_the_papers_two_patterns(tmp_path: Path, capsys):
    example = ROOT / "examples" / "phi2_fsdp_a40.toml"
    code = main(["tune", str(example), "--backend", "simulated", "--out", str(tmp_path / "run"), "--json"])
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"]["adopted"] is True
    assert result["best"]["makespan_s"] < result["default"]["makespan_s"]
    tuned = [config for group in result["configs"].values() for config in group.values()]
    assert min(config["num_channels"] for config in tuned) < 8  # NCCL's default in the paper


@pytest.mark.gloo
@pytest.mark.slow
def test_the_gloo_example_runs_end_to_end_on_smaller_sizes(tmp_path: Path, capsys):
    text = (ROOT / "examples" / "gpt_fsdp_gloo.toml").read_text(encoding="utf-8")
    small = text.replace('"32 MiB"', '"4 MiB"').replace("repeat = 4", "repeat = 1").replace("pairs = 13", "pairs = 3")
    small = re.sub(r"chunk_bytes = \[.*?\]", 'chunk_bytes = ["512 KiB", "2 MiB"]', small)
    small = small.replace("measurements = 40", "measurements = 8").replace("repeats = 3", "repeats = 1")
    job = tmp_path / "job.toml"
    job.write_text(small, encoding="utf-8")
    assert main(["tune", str(job), "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"]["over_default"]["num_pairs"] == 3
    assert "engine_default" in result["verdict"]["over_baselines"]
    assert result["configs"]["block"]["all_gather"]["algorithm"] is None
    events = json.loads((tmp_path / "run" / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"all_gather", "reduce_scatter"} <= {event["name"] for event in events}


def test_every_verb_has_a_help_page(capsys):
    for verb in ("tune", "compare", "doctor"):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        assert verb in capsys.readouterr().out


def test_the_readme_shows_the_example_and_what_simulate_answers_of_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = read_job(ROOT / "examples" / "llama3_8b_fsdp2_h100.toml")
    shown, *_ = (block for block in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL) if "[model]" in block)
    assert parse_job(tomllib.loads(shown), "README.md") == example
    best = run_simulate(SimulateRequest(job=Job(example))).what_ifs[0]
    assert best.change.startswith("parameters kept after forward")
    share, low, high = (100 * gain_s * best.share / best.gain_s for gain_s in (best.gain_s, best.low_s, best.high_s))
    said = f"keep parameters after forward, {share:+.1f} % ({low:+.1f} to {high:+.1f} by the model's own error)"
    assert said in readme


FREED = """
import gc, sys, weakref
sys.path.insert(0, sys.argv[1])
import torch
from torch import distributed as dist
from train_moe_dual_batch import Flight
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen = []
for _ in range(3):
    flight = Flight()
    seen.append(weakref.ref(flight))
    tokens = torch.ones(4, 4, requires_grad=True)
    flight.arrive(flight.send(tokens)).sum().backward()
    assert torch.equal(tokens.grad, torch.ones(4, 4))
    del flight, tokens
gc.collect()
print(sum(ref() is not None for ref in seen))
"""


@pytest.mark.torch
@pytest.mark.gloo
def test_the_example_with_experts_frees_what_it_sent():
    """It kept every step's tokens: a work held its tensor, and that its graph."""
    command = [sys.executable, "-c", FREED, str(ROOT / "examples")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
