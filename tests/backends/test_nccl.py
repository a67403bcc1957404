"""`lagom tune --backend nccl`: everything but CUDA itself, with ranks over gloo and the plug-in under a fake NCCL."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from c_build import build_libraries

from forked_python import ForkedPython
from lagom_overlap.backends.nccl import RankPlace, read_launched
from lagom_overlap.cli import main
from lagom_overlap.errors import BackendError
from ports import free_port

torch = pytest.importorskip("torch")
from lagom_overlap.backends.nccl import backend as nccl_backend  # noqa: E402  it needs torch

SCRIPT = Path(__file__).with_name("nccl_on_host.py")
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
JOB = """
[job]
name = "overlap"
backend = "nccl"
[[group]]
name = "block"
op = [{ name = "mm", gemm = [96, 96, 96] }, { name = "add", memory = "64 KiB" }]
comm = [
    { name = "ag", kind = "all_gather", bytes = "2 MiB" },
    { name = "rs", kind = "reduce_scatter", bytes = "2 MiB", starts_after = 1 },
    { name = "ar", kind = "all_reduce", bytes = "1 MiB", communicator = "tp" },
    { name = "a2a", kind = "all_to_all", bytes = "1 MiB", starts_after = 2 },
]
[tune]
pairs = 3
seed = 1
tuner = "autoccl"
budget = { measurements = 12 }
"""


def launch(tmp_path_factory, folder, *, job=JOB, release="2.30", world=2, out="run", **more):
    """Starts every rank as torchrun would; (exit codes, stdout of rank 0, stderr of all)."""
    plugin, fake = build_libraries(tmp_path_factory)
    (folder / "job.toml").write_text(job)
    port = free_port()
    arguments = list(map(str, [plugin, fake, release, "tune", "job.toml", "--json", "--out", out]))
    base = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL"))}
    base |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank in range(world):
        with (folder / f"{rank}.out").open("w") as written, (folder / f"{rank}.err").open("w") as error:
            env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more
            started.append(ForkedPython(SCRIPT, arguments, cwd=folder, env=env, stdout=written, stderr=error))
    codes = [process.wait() for process in started]
    errors = [(folder / f"{rank}.err").read_text() for rank in range(world)]
    return codes, (folder / "0.out").read_text(), "".join(errors)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_launched_benchmark_saves_a_bundle_that_replays(tmp_path_factory, tmp_path, monkeypatch, capsys):
    codes, out, error = launch(tmp_path_factory, tmp_path, MEETINGS=str(tmp_path / "met"))
    assert codes == [0, 0], error
    result = json.loads(out)
    assert result["backend"] == "nccl"
    met = [int((tmp_path / f"met{rank}").read_text()) for rank in range(2)]
    assert met[0] == met[1] > 2 * result["num_measurements"]  # before each run; two more make the communicators
    assert result["num_measurements"] >= 5
    assert set(result["best"]["comm_s"]) == {"ag", "rs", "ar", "a2a"}
    lines = (tmp_path / "run" / "measurements.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    spaces = header["groups"]["block"]["spaces"]
    assert len(spaces[3]["subspaces"]) == 1  # an all-to-all never reaches a tuner
    assert {s["algorithm"] for s in spaces[2]["subspaces"]} == {None, "ring", "tree"}  # as this NCCL offers
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    replay = ["tune", "job.toml", "--backend", "recorded", "--bundle", "run", "--json", "--out", "replayed"]
    assert main(replay) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["num_measurements"] >= 1
    assert any("one overlap at a time" in note for note in replayed["notes"])


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_table_that_one_rank_cannot_take_fails_one_measurement_and_no_rank_switches(tmp_path_factory, tmp_path, rank):
    codes, out, error = launch(tmp_path_factory, tmp_path, REFUSING_RANK=rank, REFUSED="2")
    assert codes == [0, 0], error
    assert json.loads(out)["num_measurements"] >= 5
    lines = (tmp_path / "run" / "measurements.jsonl").read_text().splitlines()
    (failed,) = [line for line in lines if "refused the table" in line or "could not take its table" in line]
    assert "failure" in failed


def test_a_ranks_own_files_are_private_and_on_its_machine(tmp_path, monkeypatch):
    """The current folder may be one that gives files to another user (root-squashed NFS)."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr(nccl_backend, "NcclSession", lambda device, files, **more: made.append(files))
    monkeypatch.setattr(nccl_backend, "installed_library", lambda: tmp_path / "lib.so")
    nccl_backend._session(None, RankPlace(rank=1, num_ranks=2, local_rank=1), 1.0)
    (files,) = made
    assert files.record.parent.parent == local
    assert files.record.parent.stat().st_mode & 0o777 == 0o700
    assert files.variables()["LAGOM_TABLE"] == ""  # tables come in memory


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_nccl_does_not_ask_for_is_refused_on_all_ranks_in_one_line(tmp_path_factory, tmp_path):
    job = JOB + 'space = { chunk_bytes = ["64 KiB"] }\n'
    codes, _, error = launch(tmp_path_factory, tmp_path, job=job, release="2.28")
    assert codes[0] == 2
    assert "asks no tuner for the chunk" in error


def test_without_cuda_it_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "job.toml"]) == 2
    error = capsys.readouterr().err
    assert "the nccl backend needs CUDA" in error
    assert error.count("\n") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["tune", "job.toml"]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
    assert not list(tmp_path.glob("lagom-runs*"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER}, (3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "5", **MASTER}, (5, 16, 5)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),  # a batch script of sbatch
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **MASTER}, (1, 2, 0)),
    ],
)
def test_the_place_of_a_rank_is_told_by_its_launcher(environment, expected):
    found = read_launched(environment)
    assert found == (
        None if expected is None else RankPlace(rank=expected[0], num_ranks=expected[1], local_rank=expected[2])
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", **MASTER}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, "rank 2 of 2"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "MASTER_ADDR and MASTER_PORT is not set"),
    ],
)
def test_a_launchers_mistake_is_named(environment, words):
    with pytest.raises(BackendError, match=words):
        read_launched(environment)
