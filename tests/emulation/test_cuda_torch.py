"""Stock PyTorch, CUDA build, under `lagom emulate`; `make test-cuda` sets up an environment that has it."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from lagom_overlap.cost.operators import load_operators
from lagom_overlap.cost.operators.operator_times import OperatorTimes
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.profile_log import read_profile
from lagom_overlap.nccl_plugin.record_log import Flag, read_record
from lagom_overlap.workload import Gemm, MemoryBound
from ports import free_port

ROOT = Path(__file__).parents[2]

MATMUL = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD([a], lr=0.1)
for _ in range(4):
    x = a
    for _ in range(20):
        x = x @ b
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
"""

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)))
model.cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2048, 1024, device="cuda")
for _ in range(250):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

PYTHON = os.environ.get("LAGOM_CUDA_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LAGOM_CUDA_PYTHON names no Python with PyTorch's CUDA build")


def emulation(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "lagom_overlap", "emulate", "--cluster", "h100_dgx", "--json", *options, "--", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        check=False,
    )


def emulate(*command: str, options: tuple[str, ...] = ()) -> dict[str, object]:
    done = emulation(*command, options=options)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def torchrun(num_ranks: int, *words: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), *words)


def release() -> tuple[int, ...]:
    told = [PYTHON, "-c", "import torch; print(torch.__version__)"]
    words = subprocess.run(told, capture_output=True, text=True, check=True)
    return tuple(int(word) for word in words.stdout.split(".")[:2])


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
def test_convolutions_transforms_and_triton_kernels_have_their_price_and_leave_others_theirs() -> None:
    done = emulation(PYTHON, str(Path(__file__).parent / "cuda_prices_job.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(re.search(r"^FOUND (.*)$", done.stderr, re.MULTILINE)[1])
    assert found["is exact"]
    for name in ("attention", "update"):  # a convolution lies between
        assert found[f"{name} behind"] == pytest.approx(found[f"{name} before"], rel=1e-6)
    # From the chip's peaks (3.35 TB/s, 989 Tflop/s) to 2.5 times as long and a launch: no launch for each image.
    for name, seconds in {
        "convolution": 2 * 32 * 64 * 64 * 9 * 56**2 / 989e12,
        "transform": 4096 * (4096 * 4 + 2049 * 8) / 3.35e12,
        "copy": 2**30 / 3.35e12,
        "product with its flops": 2 * 8192**3 / 989e12,
    }.items():
        assert seconds < found[name] / 1e3 < 2.5 * seconds + 10e-6, name
    assert found["product"] / 1e3 > 3 * 2 * 8192**2 / 3.35e12
    notes = " ".join(json.loads(done.stdout)["notes"])
    assert "10 launches of Triton kernels were priced by the bytes of their arguments alone" in notes
    assert "copy (5), product (5)" in notes


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("nothing", 0, "initialized"),
        ("loop", 2, r"cuda_waits_job.py:\d+ has read 10000 truth values that nobody computed"),
        ("svd", 1, "lagom emulate: aten::_linalg_svd needs cuSOLVER, which is not emulated"),
        (
            "sparse",
            1,
            "lagom emulate: aten::_to_sparse needs sparse tensors on a GPU .cuSPARSE., which is not emulated",
        ),
    ],
)
def test_what_waits_for_values_ends_and_what_is_not_emulated_is_named(what: str, code: int, line: str) -> None:
    done = emulation(PYTHON, str(Path(__file__).parent / "cuda_waits_job.py"), what)
    assert done.returncode == code, done.stderr[-4000:]
    assert "initialized" in done.stderr
    assert re.search(line, done.stderr), done.stderr[-2000:]


SYMMETRIC = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as memory
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
group = dist.group.WORLD.group_name
x = memory.empty(16 << 20, dtype=torch.bfloat16, device="cuda")
memory.rendezvous(x, group)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)
end.record()
end.synchronize()
if dist.get_rank() == 0:
    sys.stderr.write(f"TOOK {begin.elapsed_time(end)}\\n")
dist.destroy_process_group()
"""


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
def test_an_all_reduce_on_symmetric_memory_takes_the_wires_time(tmp_path: Path) -> None:
    """32 MiB in two shots over two GPUs: half of it comes and half goes again, at 360 GB/s; a NVLink has 450."""
    (tmp_path / "job.py").write_text(SYMMETRIC)
    done = emulation(*torchrun(2, str(tmp_path / "job.py")))
    assert done.returncode == 0, done.stderr[-4000:]
    took_ms = float(re.search(r"^TOOK (.*)$", done.stderr, re.MULTILINE)[1])
    assert (32 << 20) / 450e9 < took_ms / 1e3 < (32 << 20) / 300e9


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("uses_its_own_engine", [True, False])
def test_the_engines_of_pytorch_2_15_are_told_apart_with_their_devices_siblings_and_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_its_own_engine: bool
) -> None:
    """Its own engine binds each rank to a GPU, splits the world, and makes broadcasts of a gather into a list."""
    if release() < (2, 15):
        pytest.skip("PyTorch 2.15 brought its own engine")
    monkeypatch.setenv("SEEN", str(tmp_path))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", str(int(uses_its_own_engine)))
    emulate(*torchrun(4, str(Path(__file__).with_name("engine_job.py"))))
    for rank in range(4):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["engine"].split()[0] == ("ProcessGroupNCCL2" if uses_its_own_engine else "ProcessGroupNCCL")
        assert (seen["device"], seen["current"]) == (f"cuda:{rank}", 0)
        assert ["all_gather", 16 << 20, 4] in seen["recorded"]
        assert ["all_reduce", 4 << 20, 2] in seen["recorded"]
        if not uses_its_own_engine:
            assert (seen["sibling"], seen["used"]) == ("", [f"cuda:{rank}"])
        else:
            assert "would split the communicator of all ranks" in seen["sibling"]
            assert seen["calls"] == [["broadcast", 4 << 20]] * 4


@pytest.mark.cuda_torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("uses_its_own_engine", [True, False])
def test_ddp_overlaps_under_our_hook_and_as_released_only_with_the_engine_before_2_15s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_its_own_engine: bool
) -> None:
    """What `frameworks/*.toml` has of PyTorch 2.15 is what this PyTorch does."""
    if release() < (2, 15):
        pytest.skip("PyTorch 2.15 brought its own engine")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", str(int(uses_its_own_engine)))
    shares = {}
    for how in ("released", "hooked"):
        step = emulate(*torchrun(2, str(Path(__file__).with_name("ddp_job.py")), how))["last_step"]
        shares[how] = step["exposed_comm_s"] / step["comm_s"]
    assert shares["released"] == pytest.approx(1.0) if uses_its_own_engine else shares["released"] < 0.3
    assert shares["hooked"] < 0.3  # the last bucket of eight, which nothing can hide


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("rendezvous", [(), ("--rdzv-backend", "c10d", "--rdzv-endpoint")], ids=["static", "c10d"])
def test_torchrun_of_two_hosts_pays_the_network(tmp_path: Path, rendezvous: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("range(250)", "range(4)"))
    endpoint = f"localhost:{free_port()}"
    meeting = (*rendezvous, endpoint) if rendezvous else ()
    two, one = (
        emulate(*torchrun(4 // nodes, "--nnodes", str(nodes), *rest, str(script)))
        for nodes, rest in ((2, meeting), (1, ()))
    )
    assert [(found["num_hosts"], found["num_ranks"], found["num_steps"]) for found in (two, one)] == [
        (2, 4, 3),
        (1, 4, 3),
    ]
    # Two of a host's eight GPUs have a quarter of its cards, and more on NVLink.
    assert two["last_step"]["comm_s"] > 2 * one["last_step"]["comm_s"]


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tensor", "ddp", "bound"])
def test_a_job_on_one_of_two_symmetric_hosts_takes_as_long_as_on_both(tmp_path: Path, layout: str) -> None:
    """`bound` splits its groups from the world's communicator, `ddp` compares and broadcasts its parameters."""
    found, seen = [], []
    for options in ((), ("--symmetric",)):
        path = tmp_path / f"seen{len(found)}.json"
        job = str(Path(__file__).with_name("symmetric_job.py")), layout, str(path)
        found.append(emulate(*torchrun(2, *job), options=("--ranks", "4", "--nodes", "2", *options)))
        seen.append(json.loads(path.read_text()))
    both, one = found
    assert [(result["num_ranks"], result["num_started"], result["num_steps"]) for result in found] == [
        (4, 4, 3),
        (4, 2, 3),
    ]
    assert one["step_s"] == pytest.approx(both["step_s"], rel=0.005)
    assert one["last_step"]["exposed_comm_s"] == pytest.approx(both["last_step"]["exposed_comm_s"], rel=0.005)
    assert one["memory_bytes"] == both["memory_bytes"]
    assert seen[0]["names"] == ["on 0", "on 1", "on 2", "on 3"]
    assert seen[1]["names"] == ["on 0", "on 1", "on 0", "on 1"]  # what ranks say is that of those who stand for them
    assert {key: value for key, value in seen[1].items() if key != "names"} == {
        key: value for key, value in seen[0].items() if key != "names"
    }


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("layout", "message"), [("gloo", "a gloo group connects ranks that are not started"), ("pipeline", "which is not")]
)
def test_what_needs_ranks_that_are_not_started_ends_the_job_by_name(tmp_path: Path, layout: str, message: str) -> None:
    job = str(Path(__file__).with_name("symmetric_job.py")), layout, str(tmp_path / "seen")
    done = emulation(*torchrun(2, *job), options=("--ranks", "4", "--symmetric", "--nodes", "2"))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.rstrip().splitlines()[-1]


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
def test_products_take_what_the_model_says(tmp_path: Path) -> None:
    from lagom_overlap.cost import ContentionModel, load_profile
    from lagom_overlap.cost.operators import load_operators
    from lagom_overlap.hardware import load_preset
    from lagom_overlap.workload import Gemm

    script = tmp_path / "matmul.py"
    script.write_text(MATMUL)
    found = emulate(PYTHON, str(script))
    cluster = load_preset("h100_dgx")
    operators = load_operators(cluster.gpu).in_training()
    model = ContentionModel(cluster, load_profile("plausible"), operators=operators)
    product_s = model.kernel_seconds(model.kernel(Gemm(4096, 4096, 4096)))
    assert (found["num_ranks"], found["num_steps"]) == (1, 3)
    # Forward and the gradient of one factor: two products a layer; the sum and the update are small.
    assert found["step_s"] == pytest.approx(40 * product_s, rel=0.05)


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2_trains_on_emulated_gpus(num_ranks: int) -> None:
    example = str(ROOT / "examples" / "train_gpt_fsdp2.py")
    size = ("--steps", "4", "--width", "512", "--layers", "2", "--length", "512")
    found = emulate(*torchrun(num_ranks, example, "--device", "cuda", "--no-tune", *size))
    step = found["last_step"]
    assert (found["num_ranks"], found["num_steps"], found["refusals"]) == (num_ranks, 3, [])
    assert isinstance(step, dict)
    assert 0 < step["exposed_comm_s"] <= step["comm_s"]
    assert step["compute_s"] > 0
    assert {row["source"] for row in found["priced"]} >= {"shape", "framework", "configuration"}


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
def test_a_running_job_is_tuned_to_a_verdict(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAIN)
    lagom_run = (PYTHON, "-m", "lagom_overlap", "run", "--online", "--out", str(folder), "--")
    found = emulate(*lagom_run, *torchrun(2, str(script)))
    states = [json.loads(line) for line in (folder / "events.0.jsonl").read_text().splitlines()]
    tried = [each["reason"] for each in states if each.get("state") == "search"]
    assert found["num_ranks"] == 2
    assert len(tried) > 3
    assert any(each.get("state") == "verdict" for each in states)
    assert [each for each in states if each.get("state") in ("watch", "done")]
    for rank in (0, 1):  # nine collectives a step; had the two profilers disagreed, those of two steps would be there
        profile = read_profile(folder / f"profile.{rank}.bin")
        assert len([call for call in profile.collectives if call.is_complete]) >= 9 * 5


def typed(line: str, folder: Path) -> str:
    """What a line for a shell says on stdout and stderr, with the commands of the environment under test."""
    path = os.pathsep.join((str(Path(PYTHON).parent), os.environ["PATH"]))
    shell = ["sh", "-c", line]
    done = subprocess.run(
        shell, capture_output=True, text=True, cwd=folder, env=os.environ | {"PATH": path}, timeout=900, check=False
    )
    assert done.returncode == 0, (line, done.stderr[-4000:])
    return done.stdout + done.stderr


def next_line(said: str) -> str:
    """The line to type next, without what stands behind it in words."""
    (line,) = re.findall(r"^(?:lagom: )?next: (.*?)(?:  +\(.*\)|  # .*)?$", said, re.MULTILINE | re.IGNORECASE)
    return line


@pytest.mark.cuda_torch
@pytest.mark.timeout(3000)
def test_each_line_of_the_chain_leads_to_the_next_and_to_a_proof_that_says_emulated(tmp_path: Path) -> None:
    """Watch, analyze, tune by the trace, export, prove, compare: docs/guides/emulated_chain.md."""
    emulate = "lagom emulate --cluster a40_nvlink --"
    job = f"torchrun --nproc-per-node 2 {Path(__file__).with_name('chain_job.py')}"
    seen = typed(f"{emulate} lagom run --observe --out seen -- {job}", tmp_path)
    assert "result: on emulated GPUs: " in seen
    assert next_line(seen) == f"{emulate} lagom run --online -- {job}"
    analysed = typed("lagom analyze seen/traces", tmp_path)
    assert "emulated GPUs, nothing was measured" in " ".join(analysed.split())
    tuned = typed(f"{next_line(analysed)} --out tuned", tmp_path)
    assert f"Next: lagom emulate ... -- lagom run --prove tuned -- {job}" in " ".join(tuned.split())
    exported = typed("lagom export tuned --format plugin", tmp_path)
    assert next_line(exported) == "lagom emulate ... -- lagom run --config tuned/lagom_table.bin -- COMMAND"
    proven = typed(f"{emulate} lagom run --prove tuned/lagom_table.bin --out proof -- {job}", tmp_path)
    assert "result: on emulated GPUs: adopt: " in proven
    assert next_line(proven).startswith(f"{emulate} lagom run --config ")
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert proof["machine"]["emulated_by"] == emulate
    # The same cost model prices both, so what is predicted of the step is what it gains, but for what a trace hides.
    predicted = json.loads((tmp_path / "tuned" / "run.json").read_text())["result"]["predicted"]
    gain = 1 - proof["configured_s"][0] / proof["default_s"][0]
    assert gain == pytest.approx(predicted["saving_s"] / predicted["step_s"], abs=0.005)
    compared = typed("lagom diff seen proof/01-configured", tmp_path)
    assert "result: on emulated GPUs: " in compared


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("lacking_rank", [-1, 1])
def test_a_table_of_lagom_run_is_in_force_on_all_ranks_or_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking_rank: int
) -> None:
    """A rank that ran NCCL's choice where the other runs the table's would hang it on a GPU."""
    call = {"description": "nccl on 1 node", "num_ranks": 2, "creation_order": 0, "kind": "all_reduce"}
    config = dict.fromkeys(("algorithm", "protocol", "transport", "num_threads", "chunk_bytes")) | {"num_channels": 3}
    saved = {
        "format": "lagom-online",
        "version": 3,
        "world_size": 2,
        "route": "plugin",
        "is_adopted": True,
        "settings": [{"site": {"call": call | {"num_bytes": 16 << 20}, "occurrence": 0}, "config": config}],
        "cycles": [
            {name: call[name] for name in ("description", "num_ranks", "creation_order")}
            | {"calls": [["all_reduce", 16 << 20]]}
        ],
        "engine": "ProcessGroupNCCL of torch {}.{}".format(*release()),
        "verdict": "",
        "date": "",
    }
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    monkeypatch.setenv("LACKING_RANK", str(lacking_rank))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    monkeypatch.setenv("LAGOM_RECORD", str(tmp_path / "record.%r.bin"))
    job = torchrun(2, str(Path(__file__).with_name("config_job.py")))
    run = (
        PYTHON,
        "-m",
        "lagom_overlap",
        "run",
        "--config",
        str(tmp_path / "saved.json"),
        "--out",
        str(tmp_path / "out"),
    )
    command = [PYTHON, "-m", "lagom_overlap", "emulate", "--cluster", "h100_dgx", "--", *run, "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        asked = [d for d in read_record(tmp_path / f"record.{rank}.bin").decisions if d.num_bytes == 16 << 20]
        matched = [Flag.MATCHED in decision.flags for decision in asked]
        assert matched == [lacking_rank < 0] * 3
    refused = "--config is not applied: rank 1: cannot read the table /nowhere/table.bin"
    assert (refused in done.stderr) == (lacking_rank >= 0)


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
def test_the_self_test_asks_and_reads_back_and_says_that_emulated_kernels_compute_nothing(tmp_path: Path) -> None:
    """The whole way over ctypes, CUDA events, PyTorch's profiler, NCCL's log and the plug-in's record."""
    folder = tmp_path / "out"
    words = ("selftest", "--nccl", "--gpus", "2", "--minutes", "0.5", "--out", str(folder), "--json")
    done = subprocess.run(
        [
            PYTHON,
            "-m",
            "lagom_overlap",
            "emulate",
            "--cluster",
            "h100_dgx",
            "--",
            PYTHON,
            "-m",
            "lagom_overlap",
            *words,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        timeout=900,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    found = json.loads((folder / "selftest.json").read_text())
    asked = {json.dumps([row[what] for what in ("kind", "num_bytes", "asked")]) for row in found["rows"]}
    assert len(found["rows"]) == len(asked) > 4
    for row in found["rows"]:  # as many as the machine came to
        way = {knob: value for knob, value in row["asked"].items() if knob in ("algorithm", "protocol")}
        assert way.items() <= row["ran"].items()
        assert row["time_s"] > 0
    assert {row["outcome"] for row in found["rows"]} >= {"wrong"}
    assert found["map_path"] is None
    assert not (tmp_path / "cache").exists()
    assert "WRONG RESULTS" in done.stderr


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
def test_a_plan_runs_on_cudas_streams_and_hides_its_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, streams and liveness; kernels compute nothing here, so values are compared on the CPU (engines/fx)."""
    monkeypatch.setenv("FOUND", str(tmp_path / "found.json"))
    emulate(*torchrun(2, str(ROOT / "tests/emulation/cuda_plan_job.py")))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["planned"] < found["as_written"]


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
def test_small_values_are_those_of_the_cpu_and_large_ones_are_refused_where_they_decide() -> None:
    """Sorting, counting, masks, indexing, AdamW with a rate on the GPU; routing by a large product."""
    found = emulate(PYTHON, str(ROOT / "tests/emulation/cuda_values_job.py"))
    assert (found["exit_code"], found["refusals"]) == (0, [])


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
def test_checkpoints_are_saved_with_their_copies_times_and_say_that_they_hold_zeros(tmp_path: Path) -> None:
    """torch.save, DCP at once and in the background; what the job itself asserts is in its file."""
    found = emulate(*torchrun(1, str(ROOT / "tests/emulation/cuda_saving_job.py"), str(tmp_path)))
    assert (found["exit_code"], found["refusals"]) == (0, [])
    assert sum("checkpoints" in note for note in found["notes"]) == 1


@pytest.mark.cuda_torch
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_are_chosen_by_values_and_stages_tell_each_other_shapes(num_ranks: int) -> None:
    """The job itself asserts that what a rank sends to an expert is what the expert's rank receives."""
    found = emulate(*torchrun(num_ranks, str(ROOT / "tests/emulation/cuda_routing_job.py")))
    assert (found["exit_code"], found["refusals"]) == (0, [])


@pytest.mark.cuda_torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("per_edge", [False, True])
def test_deferred_receives_of_interleaved_stages_are_a_deadlock_on_one_communicator(
    monkeypatch: pytest.MonkeyPatch, per_edge: bool
) -> None:
    """PyTorch 2.15 orders receives and sends of each two ranks; three ranks send in a circle all the same."""
    if release() < (2, 15):
        pytest.skip("needs PyTorch 2.15: defer_pp_recv")
    monkeypatch.setenv("TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P", str(int(per_edge)))
    done = emulation(*torchrun(3, str(ROOT / "tests/emulation/deferred_job.py")))
    found = json.loads(done.stdout)
    if per_edge:
        assert (found["exit_code"], found["refusals"]) == (0, [])
        return
    assert found["exit_code"] != 0
    assert found["refusals"] == [
        "deadlock, none comes to its next call: rank 0 sends 2.1 MB to rank 1, rank 1 sends 2.1 MB to rank 2, "
        "rank 2 sends 2.1 MB to rank 0"
    ]


@pytest.mark.cuda_torch
@pytest.mark.timeout(600)
def test_a_rank_that_fails_ends_by_its_own_error_though_a_watchdog_still_asks() -> None:
    """PyTorch 2.15's watchdog ended one in three by SIGSEGV: it took the device's farewell for an error."""
    for _ in range(3):
        done = emulation(*torchrun(2, str(ROOT / "tests/emulation/failing_job.py")))
        assert done.returncode == 1
        assert "ValueError: the job's own error" in done.stderr
        assert not re.search(r"SIGSEGV|SIGABRT|watchdog detected", done.stderr), done.stderr[-4000:]


COMPILED = """
import torch

scale = torch.ones((), device="cuda")
left, right = (torch.empty(64 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(2))
many, few = torch.empty(8192, 8192, device="cuda", dtype=torch.float8_e4m3fn), torch.ones(1, device="cuda")
added = torch.compile(lambda x, y: (x + y).relu())
for _ in range(2):
    added(left, right)
torch.cuda.synchronize()
begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
begin.record()
added(left, right)
between.record()
torch._scaled_mm(many, many.t(), few, few, out_dtype=torch.bfloat16)
end.record()
torch.cuda.synchronize()
print("SAW", begin.elapsed_time(between), between.elapsed_time(end), flush=True)
"""


@pytest.mark.cuda_torch
@pytest.mark.timeout(300)
def test_a_compiled_kernel_takes_its_bytes_and_an_fp8_product_its_format(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    done = emulation(PYTHON, str(script))
    assert done.returncode == 0, done.stderr[-4000:]
    saw = re.search(r"SAW (\S+) (\S+)", done.stdout + done.stderr)
    assert saw is not None
    gpu = load_preset("h100_dgx").gpu
    times = OperatorTimes(gpu, load_operators(gpu))
    assert float(saw[1]) / 1e3 == pytest.approx(times.seconds(MemoryBound(3 * 2 * (64 << 20))), rel=0.05)
    # An H100 multiplies FP8 twice as fast as bf16, of which whole steps keep a share.
    fp8, bf16 = (times.seconds(Gemm(8192, 8192, 8192, width, result_bytes=2)) for width in (1, 2))
    assert fp8 < float(saw[2]) / 1e3 < min(bf16, 1.3 * fp8)
