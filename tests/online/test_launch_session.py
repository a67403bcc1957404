"""`lagom run` under torchrun with real FSDP2 and DDP on gloo: watched and tuned; the numbers never change."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked_python import QUICK_PYTHON, quick, run_ranks
from ports import free_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import contextlib, os, sys, time, torch, torch.distributed as dist
from torch.profiler import profile, schedule
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
kind, num_steps, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
while os.open(os.devnull, os.O_RDWR) < 3:  # else PyTorch's C++ writes its warnings into the socket that became fd 2
    pass
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(544, 544) for _ in range(3)))
if kind == "ddp":
    model = DistributedDataParallel(model)
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiles = profile(schedule=schedule(wait=3, warmup=1, active=2, repeat=1)) if "PROFILES" in os.environ else None
with profiles or contextlib.nullcontext():
    for step in range(num_steps):
        loss = model(torch.ones(4, 544) * (dist.get_rank() + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())
        if profiles is not None:
            profiles.step()
        if step == int(os.environ.get("FORKS_AT", -1)):
            child = os.fork()
            if child == 0:
                with torch.no_grad():
                    torch.nn.Linear(2, 2)(torch.ones(1, 2))
                sys.exit(0)  # by the interpreter's way out, with all that was registered for it
            assert os.waitpid(child, 0)[1] == 0
            assert len(list(DataLoader(range(4), num_workers=1, multiprocessing_context="fork"))) == 4
        if step == int(os.environ.get("DISABLED_AT", -1)) and dist.get_rank() == 1:
            os.environ["LAGOM_DISABLE"] = "1"
dist.destroy_process_group()
time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
sys.exit(code)
"""


LAUNCH = """
import os, subprocess, sys
port, command = sys.argv[1], sys.argv[2:]
world = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
ranks = [subprocess.Popen(command, env=world | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
"""Starts the ranks where nothing of torchrun's is asked for, which itself imports PyTorch."""

ABORTED = "terminate called without an active exception"
"""A thread of PyTorch's own was still there at a process's exit: seen in a job without us, so it says nothing of us."""


def run(folder, *arguments, kind="fsdp", steps=12, code=0, by_torchrun=False, **more):
    """(exit code, the printed losses, stderr); by torchrun Python itself starts, else ranks are forked."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "launch.py").write_text(LAUNCH)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    launcher = [sys.executable, *(torchrun if by_torchrun else ["launch.py", str(free_port()), QUICK_PYTHON])]
    job = [*launcher, "train.py", kind, str(steps), str(code)]
    lagom = [sys.executable, "-m", "lagom_overlap", "run", *arguments, "--"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL"))}
    result = subprocess.run(
        lagom + job,
        cwd=folder,
        env=own | {"OMP_NUM_THREADS": "1"} | ({} if by_torchrun else quick()) | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ABORTED not in result.stderr, result.stderr  # pyproject.toml has such a test run again
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The lines that rank 0 prints in the first steps without us."""
    lines = {}
    for kind, steps in (("ddp", 12), ("fsdp", 30)):
        folder = tmp_path_factory.mktemp(kind)
        (folder / "train.py").write_text(TRAIN)
        printed, _ = run_ranks("train.py", [kind, str(steps), "0"], 2, cwd=folder)
        lines[kind] = re.findall(r"^\d+ \S+\n", printed, re.MULTILINE)
        assert len(lines[kind]) == steps
    return lambda kind, steps: "".join(lines[kind][:steps])


def events(folder, rank):
    return [json.loads(line) for line in (folder / f"events.{rank}.jsonl").read_text().splitlines()]


def test_observing_changes_no_number_nor_exit_code_and_says_what_could_be_reached(tmp_path, losses, capsys):
    """The chain's first two links: its traces are analysed, and what comes next is said by each."""
    code, watched, error = run(tmp_path, "--observe", "--out", "seen", kind="ddp", code=7, by_torchrun=True)
    assert code == 1  # torchrun's own word for a rank that failed
    assert "exitcode  : 7" in error
    assert watched == losses("ddp", 12)
    said = [line for line in error.splitlines() if line.startswith("lagom: ")]
    assert re.search(r"gloo: [0-9.]+ ms of collectives per step \(3 steps sampled\)", said[0])
    assert sum("channels" in line and "100.0 %" in line for line in said) == 1
    assert "sitecustomize" not in error
    found, _, next_line = ending(error)
    assert "settings reach 100 % of it" in found
    assert "lagom run --online -- " in next_line
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / "seen" / "traces" / f"rank{rank}.json.gz").read_bytes()))
        assert any(
            "all_reduce" in event.get("name", "") or "allreduce" in event.get("name", "")
            for event in trace["traceEvents"]
        )
        found = events(tmp_path / "seen", rank)
        assert [found[0]["event"], found[-1]["event"]] == ["begin", "end"]
        assert found[-1]["steps"] == 12
        assert {event["kind"] for event in found if event["event"] == "communication"} == {"all_reduce"}
        assert "lagom_reachable_ratio" in (tmp_path / "seen" / f"metrics.{rank}.prom").read_text()
    from lagom_overlap.cli import main  # not before a rank of another test was forked

    capsys.readouterr()
    assert main(["analyze", str(tmp_path / "seen" / "traces"), "--json"]) == 0
    analysed = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in analysed["ranks"]] == [0, 1]
    assert all(0 < row["comm_s"] <= row["span_s"] for row in analysed["ranks"])
    reduces = [row for row in analysed["collectives"] if row["kind"] == "all_reduce"]
    assert {row["communicator"] for row in reduces} == {"default_pg"}
    assert sum(row["count"] for row in reduces) % 2 == 0
    # Where the machine made ranks late more than anything else, that is what to mend.
    assert analysed["next_line"].startswith(("lagom run --online -- ", "lagom docs howto/no_gain  # ranks wait"))
    assert main(["tune", "--from-trace", str(tmp_path / "seen" / "traces")]) == 2
    assert "the contention model is of GPUs" in capsys.readouterr().err


def test_tuning_without_a_line_of_code_keeps_every_loss_and_saves_what_it_found(tmp_path, losses):
    code, tuned, error = run(tmp_path, "--online", "--out", "tuned", steps=30, by_torchrun=True)
    assert code == 0, error
    assert tuned == losses("fsdp", 30)
    states = [event["state"] for event in events(tmp_path / "tuned", 0) if event["event"] == "state"]
    assert list(dict.fromkeys(states))[:2] == ["record", "search"]
    if {"watch", "done"} & set(states):
        saved = json.loads((tmp_path / "tuned" / "settings.json").read_text())
        assert saved["format"] == "lagom-online"
        assert saved["world_size"] == 2


def test_an_unmodified_job_is_searched_by_the_papers_tuner_that_was_asked_for(tmp_path, losses):
    code, tuned, error = run(tmp_path, "--online", "--tuner", "lagom", "--out", "tuned", steps=30)
    assert code == 0, error
    assert tuned == losses("fsdp", 30)
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "journal.0.jsonl").read_text().splitlines()[1:]]
    searched = [row for row in rows if row["kind"] == "search"]
    assert any("all collectives at minimal resources" in reason for row in searched for reason in reasons(row))


def reasons(row):
    return [group["reason"] for group in row["groups"].values() if group.get("reason")]


def test_a_rank_that_is_disabled_alone_takes_all_ranks_off_at_one_step(tmp_path, losses):
    code, tuned, error = run(tmp_path, "--online", "--out", "tuned", steps=30, DISABLED_AT="9")
    assert code == 0, error
    assert tuned == losses("fsdp", 30)
    for rank in range(2):
        states = [event for event in events(tmp_path / "tuned", rank) if event["event"] == "state"]
        assert "rank 1: LAGOM_DISABLE is set" in states[-1]["reason"]
        assert states[-1]["state"] == "off"


@pytest.mark.parametrize("way", ["--observe", "--online"])
def test_a_child_that_the_job_forks_ends_without_a_word_of_ours(tmp_path, losses, way):
    buffers = {"PYTHONUNBUFFERED": "1"}  # else a child prints once more what its parent had not printed yet
    code, watched, error = run(tmp_path, way, "--out", "seen", steps=16, FORKS_AT="6", **buffers)
    assert code == 0, error
    assert watched == losses("fsdp", 16)
    for rank in range(2):
        found = events(tmp_path / "seen", rank)
        assert [event["event"] for event in found].count("end") == 1
        assert found[-1]["steps"] == 16
        assert "off" not in {event.get("state") for event in found[:-2]}, found


@pytest.mark.parametrize(("stderr", "python"), [("2>/dev/full", QUICK_PYTHON), (">&- 2>&-", sys.executable)])
def test_a_stderr_that_cannot_be_written_costs_the_job_nothing(tmp_path, stderr, python):
    (tmp_path / "train.py").write_text(TRAIN)
    lagom = f"{sys.executable} -m lagom_overlap run --observe --out seen --"
    # One rank, started as a launcher would: torchrun itself does not live without a stderr.
    command = f"exec {lagom} {python} train.py ddp 8 7 {stderr}"
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world |= {"OMP_NUM_THREADS": "1", **quick()}
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL", "PYTHONUNB"))}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=own | world, timeout=200, check=False)
    assert done.returncode == 7
    assert events(tmp_path / "seen", 0)[-1]["steps"] == 8


def test_observing_leaves_the_profiling_to_a_job_that_profiles_itself(tmp_path):
    """Its profiler warms up during our samples; two of them would end the job."""
    code, watched, error = run(tmp_path, "--observe", "--out", "seen", kind="ddp", PROFILES="1")
    assert code == 0, error
    assert watched.count("\n") == 12
    assert "the job has a profiler of its own" in error


def site(kind, occurrence):
    call = {"description": "default_pg", "num_ranks": 2, "creation_order": 0, "kind": kind, "num_bytes": LAYER_BYTES}
    return {
        "site": {"call": call, "occurrence": occurrence},
        "config": {"num_channels": 2, "chunk_bytes": LAYER_BYTES // 2},
    }


LAYER_BYTES = 4 * (544 * 544 + 544)
GATHERS, SCATTERS = 6, 3
"""Three layers, gathered in forward and again in backward."""


def ending(error):
    """The three lines that a run ends with."""
    lines = [line for line in error.splitlines() if line.startswith("lagom: ")][-3:]
    assert [line.split()[1] for line in lines] == ["result:", "why:", "next:"], error
    return lines


@pytest.mark.timeout(480)
def test_the_chain_from_saved_settings_over_their_proof_to_a_run_that_starts_with_them(tmp_path, losses, capsys):
    """Each run prints the next one's line, and no loss changes; how a chain begins is the test of observing."""
    from lagom_overlap.cli import main  # not before a rank of another test was forked

    rows = [site("all_gather", place) for place in range(GATHERS)]
    rows += [site("reduce_scatter", place) for place in range(SCATTERS)]
    gather, scatter = ["all_gather", LAYER_BYTES], ["reduce_scatter", LAYER_BYTES]
    cycle = {"description": "default_pg", "num_ranks": 2, "creation_order": 0}
    cycle["calls"] = [*[gather] * 5, scatter, gather, scatter, scatter]
    saved = {
        "format": "lagom-online",
        "version": 3,
        "world_size": 2,
        "route": "gloo",
        "is_adopted": True,
        "settings": rows,
        "cycles": [cycle],
        "engine": f"ProcessGroupGloo of torch {'.'.join(torch_version())}",
        "verdict": "by hand",
        "date": "",
    }
    (tmp_path / "lagom.json").write_text(json.dumps(saved))

    code, printed, error = run(tmp_path, "--prove", "lagom.json", "--out", "proof", steps=14)
    assert (code, printed) == (0, losses("fsdp", 14)), error
    assert "check" in error
    _, why, next_line = ending(error)
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    # Fourteen steps are too few for a decision, unless the settings are so slow that they go at once.
    assert proof["decision"] in ("undecided", "reject")
    assert proof["machine"]["cores"]
    assert "<html" in (tmp_path / "proof" / "report.html").read_text()
    if proof["decision"] == "undecided":
        assert "more steps were needed" in why
        assert "lagom run --prove" in next_line

    code, printed, error = run(tmp_path, "--config", "lagom.json", "--out", "held", steps=10)
    assert (code, printed) == (0, losses("fsdp", 10)), error
    found, _, next_line = ending(error)
    assert f"{GATHERS + SCATTERS} call sites are set" in found
    assert "lagom run --prove" in next_line

    assert main(["diff", str(tmp_path / "proof"), str(tmp_path / "held"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert {"request.mode"} <= {row["name"] for row in compared["settings"]}


def test_a_job_that_goes_on_without_its_model_and_its_process_groups_keeps_neither_it_nor_a_thread_of_ours(tmp_path):
    for words in run_ranks(Path(__file__).parent / "destroyed_rank.py", [], 2, cwd=tmp_path):
        assert "['lagom-clock', 'lagom-presence', 'lagom-store'] [True, True, True] []\n" in words


def torch_version():
    import torch

    return torch.__version__.split("+")[0].split(".")[:2]
