"""A GPU that nobody makes, in one file of one's own, goes through every verb that prices anything.

The Z100 is half an H100: each of its rates is half and each of its latencies twice the H100's. So whatever runs on it
takes exactly twice the time (halves and doubles are exact), however many formulas lie between.
"""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
from test_from_trace import true_group, truth, written

from lagom_overlap.cli import main
from lagom_overlap.cost import load_profile
from lagom_overlap.cost.nccl.fitted_links import link_of
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware import load_gpu, load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.spec import ClusterTable
from lagom_overlap.jobfile.step import job_step, stated_cluster
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate

HALVED = ("gemm_flops", "hbm_bytes_per_s", "stream_bytes_per_s", "reduction_bytes_per_s", "attention_flops")
HALVED += ("chunk_flops", "forward_flops", "backward_flops", "bytes_per_s", "channel_bytes_per_s", "tile_flops")
DOUBLED = ("touch_s", "launch_s", "split_s")


def half_of(name: str) -> str:
    """The package's file of a GPU with half of its rates and twice its latencies, called Z100."""
    text = (resources.files("lagom_overlap.gpus") / f"{name}.toml").read_text(encoding="utf-8")

    def changed(line: re.Match[str]) -> str:
        factor = 0.5 if line[1] in HALVED else 2.0 if line[1] in DOUBLED else 1.0
        values = line[2].split("#")[0]
        if factor == 1.0:
            return line[0]
        return f"{line[1]} = " + re.sub(r"[\d.]+(?:e[+-]?\d+)?", lambda number: repr(factor * float(number[0])), values)

    text = re.sub(r"^(\w+) += (.*)$", changed, text, flags=re.MULTILINE)
    return text.replace('"H100-SXM5-80GB"', '"Z100-SXM5-80GB"').replace('names = ["H100"]', 'names = ["Z100"]')


@pytest.fixture
def gpu_file(tmp_path: Path) -> str:
    """The GPU alone, for the nodes and wires of a preset."""
    path = tmp_path / "z100.toml"
    path.write_text(half_of("h100"))
    return str(path)


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    """The GPU with its node: a preset in one file."""
    node = (resources.files("lagom_overlap.clusters") / "h100_dgx.toml").read_text(encoding="utf-8")
    path = tmp_path / "z100_dgx.toml"
    path.write_text(node.replace('gpu = "h100"', "") + half_of("h100").replace('names = ["Z100"]', ""))
    return str(path)


def step_s(**cluster: object) -> float:
    """A step on one GPU, replayed as a CUDA graph: no host and no wire, which are not the GPU's."""
    raw = {
        "job": {"name": "one"},
        "model": {"name": "phi-2", "seq_len": 1024},
        "cluster": cluster,
        "parallel": {"data": 1, "framework": "megatron", "cuda_graph": True},
    }
    return run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml")))).iteration_s


def test_half_a_gpu_takes_twice_as_long(gpu_file: str, cluster_file: str) -> None:
    twice_s = 2 * step_s(preset="h100_dgx")
    assert step_s(preset="h100_dgx", gpu=gpu_file) == pytest.approx(twice_s, rel=1e-12)
    assert step_s(preset=cluster_file) == pytest.approx(twice_s, rel=1e-12)


def test_its_tables_reach_those_who_read_them(gpu_file: str) -> None:
    ours, whole = load_preset("h100_dgx", gpu=gpu_file), load_preset("h100_dgx")
    plausible = load_profile("plausible")
    assert plausible.for_gpu(ours.gpu).channel_bytes_per_s == plausible.for_gpu(whole.gpu).channel_bytes_per_s / 2
    assert topology_of(ours, 8) == topology_of(whole, 8)
    halves = load_preset("h100_dgx", gpu=gpu_file, gpus_per_node=4)
    link = link_of(halves, 4)  # half of the measured link contradicts the preset's wire by more than a measurement may
    assert link is not None
    assert link.bytes_per_s == halves.intra.bytes_per_s
    slower = load_preset("a100_dgx", gpu=gpu_file)
    link = link_of(slower, 4)
    assert link is not None
    assert link.bytes_per_s == 344.2e9 / 2


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["simulate", "tune", "plan"])
def test_a_job_on_it_goes_through(tmp_path: Path, gpu_file: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[job]\nname = "z"\n[model]\nname = "llama-3.2-1b"\nseq_len = 1024\n'
        f'[cluster]\npreset = "h100_dgx"\ngpu = "{gpu_file}"\n[parallel]\nfsdp = 8\n'
        '[tune]\ntuner = "fixed_min"\npairs = 3\n[plan]\nplanner = "program_order"\n'
    )
    assert main([verb, str(job), "--json", "--out", str(tmp_path / verb)]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "z"


@pytest.mark.slow
def test_a_trace_of_it_is_analysed(tmp_path: Path, cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(
        tmp_path / "rank0.json.gz",
        truth(),
        true_group(truth()),
        deviceProperties=[{"id": 0, "name": "NVIDIA Z100", "numSms": 132}],
    )

    def what_ifs(*flags: str) -> list[object]:
        assert main(["analyze", str(trace), "--json", *flags]) == 0
        found: list[object] = json.loads(capsys.readouterr().out)["what_ifs"]
        return found

    assert what_ifs() == []  # no preset has the GPU
    assert what_ifs("--cluster", cluster_file)


@pytest.mark.parametrize(
    ("line", "becomes", "words"),
    [
        ("names = ", "name = ", "unknown key 'name' (did you mean 'names'?); allowed: gpu, names"),
        ("num_sms = 132", "num_smz = 132", "unknown key 'gpu.num_smz'"),
        ("touch_s = 4e-06", "touch_s = 0", "touch_s is 0.0, must be positive and finite"),
        ("nvjet = true", "nvjet = 3", "contention.nvjet is 3, must be true or false"),
        ('cpu_vendor = "intel"', 'cpu_vendor = "arm"', "nccl.cpu_vendor is 'arm', must be"),
        ("num_ranks = 2", "num_ranks = 1", "nccl.links: num_ranks is 1, must be at least 2"),
    ],
)
def test_what_is_wrong_in_its_file_is_said_before_anything_runs(
    tmp_path: Path, line: str, becomes: str, words: str
) -> None:
    text, path = half_of("h100"), tmp_path / "z100.toml"
    assert re.search(f"^{re.escape(line)}", text, re.MULTILINE), line
    path.write_text(re.sub(f"^{re.escape(line)}", becomes, text, count=1, flags=re.MULTILINE))
    with pytest.raises(JobError) as error:
        stated_cluster(ClusterTable(preset="h100_dgx", gpu=str(path)))
    assert words in str(error.value)
    assert "z100.toml" in str(error.value) or words.startswith(("touch_s", "nccl.links"))


def test_an_unknown_gpu_names_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown gpu 'a41' \(did you mean 'a40'\?\)"):
        load_gpu("a41")


def test_an_edited_file_is_another_gpu(gpu_file: str) -> None:
    before = load_gpu(gpu_file)
    Path(gpu_file).write_text(half_of("h100").replace("nvjet = true", "nvjet = false"))
    assert load_gpu(gpu_file) != before
    assert load_profile("plausible").for_gpu(before).nvjet
    assert not load_profile("plausible").for_gpu(load_gpu(gpu_file)).nvjet


def test_a_preset_s_gpu_is_a_name_away() -> None:
    raw = {"job": {"name": "n"}, "model": {"name": "phi-2", "seq_len": 1024}, "parallel": {"data": 1}}
    step = job_step(parse_job({**raw, "cluster": {"preset": "h100_dgx", "gpu": "a100"}}, "job.toml"))
    assert step is not None
    assert (step.cluster.gpu, step.operators.name) == (load_gpu("a100"), "A100")
