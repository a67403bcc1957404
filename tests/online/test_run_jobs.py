"""A run folder is one job's: other jobs of the run have files of their own, and spawned ranks their own numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagom_overlap.errors import OutputError
from lagom_overlap.export.run_variables import FIRST_WORLD_VARIABLE
from lagom_overlap.online.events import rank_of
from lagom_overlap.online.run_jobs import Meeting, meeting_of, note_rank, settle
from ports import free_port

OUTER = {"MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ({}, OUTER, ("29500", 1, 2)),
        ({"backend": "gloo", "rank": -1, "world_size": -1}, OUTER, ("29500", 1, 2)),
        ({"rank": 3, "world_size": 4}, {"MASTER_PORT": "1234"}, ("1234", 3, 4)),
        ({"init_method": "tcp://10.1.1.20:23456", "rank": 0, "world_size": 8}, OUTER, ("23456", 0, 8)),
        ({"init_method": "tcp://[::1]:23456?rank=5&world_size=8"}, OUTER, ("23456", 5, 8)),
        ({"init_method": "file:///mnt/nfs/meet", "rank": 2, "world_size": 4}, OUTER, ("/mnt/nfs/meet", 2, 4)),
        ({"init_method": "env://?rank=6"}, OUTER, ("29500", 6, 2)),
        ({}, {}, ("", None, None)),
    ],
)
def test_where_ranks_meet_is_read_as_pytorch_reads_it(arguments, environment, expected):
    found = meeting_of(arguments, environment)
    assert (found.place, found.rank, found.world_size) == expected


def test_a_store_that_the_job_made_itself_says_where_its_ranks_meet(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    port = free_port()
    tcp = dist.PrefixStore("a", dist.PrefixStore("b", dist.TCPStore("127.0.0.1", port, 1, is_master=True)))
    assert meeting_of({"store": tcp, "rank": 1, "world_size": 2}, OUTER) == Meeting(
        place=str(port), rank=1, world_size=2
    )
    file = dist.FileStore(str(tmp_path / "meet"), 1)
    assert meeting_of({"store": file, "rank": 0, "world_size": 1}, OUTER).place == str(tmp_path / "meet")
    assert meeting_of({"store": dist.HashStore(), "rank": 0, "world_size": 1}, OUTER).rank == 0


def joined(folder: Path, place: str, *, world: int = 2, rank: int = 0, **more: str) -> dict[str, str]:
    """The environment of a rank that has joined a job."""
    environment = {
        "LAGOM_RUN_FOLDER": str(folder),
        "LAGOM_RUN_ID": "one",
        "LAGOM_RECORD": str(folder / "record.%r.bin"),
        "LAGOM_PROFILE": str(folder.parent / "local" / "profile.%r.bin"),
    } | more
    settle(Meeting(place=place, rank=rank, world_size=world), environment)
    return environment


@pytest.fixture
def folder(tmp_path):
    for name in ("run", "local"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path / "run"


def test_the_first_job_has_the_folder_and_others_have_all_of_their_files_below_it(folder):
    for rank in range(2):
        first = joined(folder, "29500", rank=rank)
        assert first["LAGOM_RUN_FOLDER"] == str(folder)
        assert FIRST_WORLD_VARIABLE not in first
    for rank in range(4):  # more than the first job has, so that some find no file of that name
        second = joined(folder, "29511", rank=rank, world=4)
        assert second["LAGOM_RUN_FOLDER"] == str(folder / "nested-1")
        assert second["LAGOM_RECORD"] == str(folder / "nested-1" / "record.%r.bin")
        assert second["LAGOM_PROFILE"] == str(folder.parent / "local" / "nested-1" / "profile.%r.bin")
        assert second[FIRST_WORLD_VARIABLE] == "2"
    assert joined(folder, "29522")["LAGOM_RUN_FOLDER"] == str(folder / "nested-2")
    assert joined(folder, "29500")["LAGOM_RUN_FOLDER"] == str(folder)
    assert (folder / "nested-1").stat().st_mode & 0o777 == 0o700


def of_an_ended_process(claim: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"process_id": gone.pid}))


def test_a_restart_goes_on_in_the_files_and_the_next_torchrun_at_the_same_port_does_not(folder):
    def torchrun(logs: str, attempt: int, rank: int) -> str:
        error = f"/tmp/torchelastic_x/{logs}/attempt_{attempt}/{rank}/error.json"
        return joined(folder, "29500", rank=rank, TORCHELASTIC_ERROR_FILE=error)["LAGOM_RUN_FOLDER"]

    assert torchrun("none_a", 0, 0) == str(folder)
    assert torchrun("none_c", 0, 1) == str(folder), "at once: another torchrun of one job, on this host"
    of_an_ended_process(folder / ".job.0")
    assert {torchrun("none_a", 1, rank) for rank in (0, 1)} == {str(folder)}
    assert {torchrun("none_b", 0, rank) for rank in (0, 1)} == {str(folder / "nested-1")}


def test_a_requeued_job_takes_over_the_folder_that_its_tasks_share(folder):
    joined(folder, "29500")
    of_an_ended_process(folder / ".job.0")
    assert joined(folder, "31000")["LAGOM_RUN_FOLDER"] == str(folder / "nested-1"), "of the same run: another job"
    assert joined(folder, "31001", LAGOM_RUN_ID="two")["LAGOM_RUN_FOLDER"] == str(folder)
    assert joined(folder, "31001", LAGOM_RUN_ID="three")["LAGOM_RUN_FOLDER"] == str(folder), "a task of another node"


def test_a_job_that_gets_no_folder_of_its_own_names_no_file_of_the_first_one(folder, tmp_path):
    joined(folder, "29500")
    (folder / "nested-1").symlink_to(tmp_path)
    environment = {
        "LAGOM_RUN_FOLDER": str(folder),
        "LAGOM_RECORD": str(folder / "record.%r.bin"),
        "LAGOM_TABLE": str(folder / "lagom_table.bin"),
    }
    with pytest.raises(OutputError, match="symbolic link"):
        settle(Meeting(place="1", rank=0, world_size=2), environment)
    assert not environment["LAGOM_RECORD"]
    assert not environment["LAGOM_TABLE"]


def test_a_rank_that_was_told_its_number_in_an_argument_is_that_one_and_its_children_are_not():
    environment = {"RANK": "0"}
    note_rank(3, environment)
    assert rank_of(environment) == 3
    assert environment["LAGOM_RANK"] == f"{os.getpid()}:3"
    assert rank_of(environment | {"LAGOM_RANK": f"{os.getpid() + 1}:3", "RANK": "2"}) == 2
    untouched = {"RANK": "2"}
    note_rank(2, untouched)
    assert untouched == {"RANK": "2"}


TRAIN = """
import os, subprocess, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, world, port, nested=()):
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        model(torch.ones(2, 600)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6 and rank == 0 and nested:
            subprocess.run(nested, check=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    port, inner, world = sys.argv[1:4]
    nested = (sys.executable, __file__, inner, "0", "3") if inner != "0" else ()
    mp.spawn(train, (int(world), port, nested), nprocs=int(world))
"""


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.torch
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_spawned_ranks_and_a_job_that_one_of_them_starts_have_files_of_their_own(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL"))}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "lagom_overlap", "run", "--online", "--out", "run", "--"),
            *(sys.executable, "train.py", str(free_port()), str(free_port()), "2"),
        ],
        cwd=tmp_path,
        env=own | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "runs without us" not in result.stderr
    for folder, world in ((tmp_path / "run", 2), (tmp_path / "run" / "nested-1", 3)):
        assert sorted(path.name for path in folder.glob("events.*")) == [f"events.{r}.jsonl" for r in range(world)]
        for rank in range(world):
            found = events(folder / f"events.{rank}.jsonl")
            assert {event["rank"] for event in found} == {rank}
            assert [e["world_size"] for e in found if e["event"] == "begin"] == [world], "one job in a file"
            assert found[-1]["event"] == "end"
            assert f'rank="{rank}"' in (folder / f"metrics.{rank}.prom").read_text()
        journals = [path.name for path in folder.glob("journal.*")]
        assert journals in ([], ["journal.0.jsonl"])
    (line,) = [line for line in result.stderr.splitlines() if "not the first job" in line]
    assert line.endswith(str(tmp_path / "run" / "nested-1"))
