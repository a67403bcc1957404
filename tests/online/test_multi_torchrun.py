"""Our commands under torchrun on two machines: tune, compare and run; one folder, and an end on every machine."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gloo_job import SRC
from hosts import DEVICE, Network, ipv4, networks
from test_launch_session import TRAIN

from forked_python import ForkedPython, quick, run_ranks

__all__ = ["networks"]
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 500
JOB = """
[job]
name = "two-machines"
backend = "gloo"
ranks = {ranks}
[[group]]
name = "block"
block = {{ seq_len = 16, hidden = 64, heads = 1, ffn = 64, repeat = 1 }}
[[group.comm]]
name = "gather"
kind = "all_gather"
bytes = "2 MiB"
[tune]
pairs = 6
budget = {{ measurements = 4, seconds = 300 }}
space = {{ num_channels = [1, 2], chunk_bytes = ["512 KiB"] }}
"""


def torchrun(master: str) -> list[list[str]]:
    """How each of two machines starts its two ranks, which are forked (`quick`)."""
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    where = ["--master-addr", master, "--master-port", "29400"]
    return [[*common, "--node-rank", str(number), *where] for number in range(2)]


def start(network: Network, folder: Path, commands: list[list[str]], **environment: str) -> list[Any]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL", "GLOO"))}
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": SRC, **quick()}
    started = []
    for number, command in enumerate(commands):
        with (folder / f"node{number}.out").open("w") as out, (folder / f"node{number}.err").open("w") as error:
            how = {"env": own | more | environment, "stdout": out, "stderr": error}
            started.append(network.start(number, command, **how))
    return started


def start_ranks(network: Network, folder: Path, master: str, arguments: list[str]) -> list[Any]:
    """`lagom` on two ranks of each of two machines, with what torchrun would tell them; each writes a file of its own.

    torchrun itself and its ranks each import PyTorch, which takes ten times as long as the rest.
    """
    (folder / "lagom.py").write_text("import sys\nfrom lagom_overlap.cli.main import main\nsys.exit(main())\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL", "GLOO"))}
    world = {"MASTER_ADDR": master, "MASTER_PORT": "29400", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    world |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": SRC}
    started = []
    for rank in range(4):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        with (folder / f"node.{rank}.out").open("w") as out, (folder / f"node.{rank}.err").open("w") as error:
            machine = network.machines[rank // 2].holder.pid
            how = {"env": own | world | place, "stdout": out, "stderr": error, "machine": machine}
            started.append(ForkedPython(folder / "lagom.py", arguments, cwd=folder, **how))
    return started


def finish(started: list[Any]) -> list[int]:
    return [process.wait(LIMIT_S) for process in started]


def words(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("node*")))


def test_tune_measures_two_machines_whose_own_names_are_loopback_addresses(tmp_path: Path, networks: Any) -> None:
    """As Debian installs them; nobody says which interface to use."""
    (tmp_path / "job.toml").write_text(JOB.format(ranks=4))
    lagom = ["-m", "lagom_overlap", "tune", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]
    commands = [[*how, *lagom] for how in torchrun("node0")]
    network = networks(2, own_is_loopback=True)
    assert finish(start(network, tmp_path, commands)) == [0, 0], words(tmp_path)
    assert json.loads((tmp_path / "run" / "run.json").read_text())
    assert "4 ranks" in (tmp_path / "run" / "measurements.jsonl").read_text()
    assert (tmp_path / "node1.out").read_text() == ""
    assert "rank 0 on node0, which writes the run folder there" in (tmp_path / "node1.err").read_text()


def test_compare_runs_its_tuners_on_two_machines_whose_names_do_not_resolve(tmp_path: Path, networks: Any) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(ranks=4))
    lagom = ["compare", str(tmp_path / "job.toml"), "--tuners", "default,fixed_max", "--json"]
    assert finish(start_ranks(networks(2, resolves=False), tmp_path, ipv4(0), lagom)) == [0] * 4, words(tmp_path)
    assert json.loads((tmp_path / "node.0.out").read_text())
    assert all((tmp_path / f"node.{rank}.out").read_text() == "" for rank in (1, 2, 3))


def test_a_slip_on_rank_0_ends_the_command_on_every_machine(tmp_path: Path, networks: Any) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(ranks=2))
    lagom = ["-m", "lagom_overlap", "tune", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]
    codes = finish(start(networks(2), tmp_path, [[*how, *lagom] for how in torchrun(ipv4(0))]))
    assert 0 not in codes, words(tmp_path)  # its launcher ends the ranks that wait for rank 0
    assert "started 4 ranks" in (tmp_path / "node0.err").read_text()
    assert not (tmp_path / "run").exists()


def test_a_job_on_two_machines_is_tuned_without_another_number(tmp_path: Path, networks: Any) -> None:
    """Than on four ranks of one machine without us."""
    (tmp_path / "train.py").write_text(TRAIN)
    arguments, out = ["fsdp", "12", "0"], tmp_path / "tuned"
    printed, *_ = run_ranks(tmp_path / "train.py", arguments, 4, cwd=tmp_path)
    lagom = [sys.executable, "-m", "lagom_overlap", "run", "--online", "--out", str(out), "--"]
    tuned = [[*lagom, *how, str(tmp_path / "train.py"), *arguments] for how in torchrun(ipv4(0))]
    assert finish(start(networks(2), tmp_path, tuned, GLOO_SOCKET_IFNAME=DEVICE)) == [0, 0], words(tmp_path)
    losses = re.findall(r"^\d+ \S+$", printed, re.MULTILINE)
    assert (tmp_path / "node0.out").read_text().splitlines() == losses
    assert len(losses) == 12
    for number in range(2):
        assert f"files in {out}" in (tmp_path / f"node{number}.err").read_text()
    assert all((out / f"events.{rank}.jsonl").is_file() for rank in range(4))
