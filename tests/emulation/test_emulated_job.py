"""A job of several processes through the verb, without any CUDA: its ranks speak the protocol themselves."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from lagom_emulate import launch
from lagom_emulate.launch import job_folder
from lagom_emulate.result import EmulateResult
from lagom_emulate.verb import EmulateRequest, run_emulate
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import load_operators
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.workload import Gemm, MemoryBound
from listening import LISTENING

JOB = str(Path(__file__).with_name("client_job.py"))
GENEROUS_S = 50.0


def in_training(num_nodes: int = 1) -> ContentionModel:
    """What the emulator prices by: the GPU in the middle of a training step."""
    cluster = load_preset("h100_dgx", num_nodes)
    return ContentionModel(cluster, load_profile("plausible"), operators=load_operators(cluster.gpu).in_training())


def command(num_ranks: int, what: str = "") -> tuple[str, ...]:
    return (sys.executable, JOB, str(num_ranks), *([what] if what else []))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing may be left; its name is short whatever TMPDIR is, so that sockets lie in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name, "t")
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.mark.parametrize("length", [1, 60, 90, 200])
def test_the_socket_fits_whatever_the_temporary_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    parent = tmp_path / ("t" * length)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with job_folder() as folder:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.socket))
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()


def emulate(temporary: Path, num_ranks: int, what: str = "", **changed: object):
    spec = parse_job({"job": {"name": "j"}, "emulate": {"stall_s": 2.0} | changed}, "job", may_lack_work=True)
    request = EmulateRequest(
        command=command(num_ranks, what), cluster="h100_dgx", spec=spec, libraries=temporary, is_quiet=True
    )
    result = run_emulate(request, os.environ)
    assert not list(temporary.iterdir())
    return result


@pytest.mark.timeout(120)
def test_a_step_takes_what_its_products_and_its_collective_cost(temporary: Path) -> None:
    result = emulate(temporary, 4)
    model = in_training()
    product_s = model.kernel_seconds(model.kernel(Gemm(4096, 4096, 4096)))
    assert (result.exit_code, result.num_ranks, result.num_steps) == (0, 4, 3)
    step = result.last_step
    assert step is not None
    assert result.step_s is not None
    assert step.exposed_comm_s == pytest.approx(step.comm_s)
    assert step.compute_s == pytest.approx(8 * product_s, rel=1e-3)
    # The host launches behind the collective's end: eight products wait for one launch each at most.
    assert result.step_s == pytest.approx(8 * product_s + step.comm_s, rel=0.05)
    assert result.memory_bytes == 5_000_000_000
    assert {row.source for row in result.priced} == {"shape", "configuration"}
    assert "per step" in result.summary()


def on_hosts(temporary: Path | None, words: tuple[str, ...], **asked: int | None) -> EmulateResult:
    spec = parse_job({"job": {"name": "j"}, "emulate": {"stall_s": 2.0}}, "job", may_lack_work=True)
    request = EmulateRequest(command=words, cluster="h100_dgx", spec=spec, libraries=temporary, is_quiet=True, **asked)
    return run_emulate(request, os.environ)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("more", "asked", "num_ranks"),
    [
        ((), {"num_hosts": 2}, 4),
        (("--nnodes", "2"), {}, 4),
        pytest.param((), {"num_ranks": 16}, 16, marks=pytest.mark.long),
    ],
)
def test_each_host_runs_the_command_and_the_wire_between_them_is_paid(
    temporary: Path, more: tuple[str, ...], asked: dict[str, int], num_ranks: int
) -> None:
    result = on_hosts(temporary, (*command(num_ranks, "plain"), *more), **asked)
    assert (result.exit_code, result.num_ranks, result.num_hosts, result.num_steps) == (0, num_ranks, 2, 3)
    model = in_training(num_nodes=2)
    asked_config = CommConfig(
        algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, num_threads=512, chunk_bytes=512 << 10
    )
    reduce = Collective(CollectiveKind.ALL_REDUCE, 64 << 20, num_ranks, 2)
    assert result.last_step is not None
    assert result.last_step.comm_s == pytest.approx(model.collective(reduce, asked_config).seconds(), rel=1e-3)
    assert "2 hosts of emulated h100_dgx" in result.summary()
    assert not list(temporary.iterdir())


@pytest.mark.timeout(120)
def test_a_command_that_fails_on_one_host_ends_on_all(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host's ranks sleep, where nothing but a signal ends them."""
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    result = on_hosts(temporary, command(4, "one_host_fails"), num_hosts=2)
    assert result.exit_code == 7
    assert not with_mark(f"LAGOM_EMULATION_SOCKET={temporary}".encode())


@pytest.mark.parametrize(
    ("asked", "words", "message"),
    [
        ({"num_hosts": 2, "num_ranks": 3}, (), "cannot share evenly"),
        ({"num_hosts": 1, "num_ranks": 16}, (), "cannot share evenly"),
        ({"num_hosts": 2}, ("--nnodes=1:4",), "the command is for 4 nodes"),
        ({"num_hosts": 0}, (), "at least 1"),
    ],
)
def test_numbers_of_hosts_that_cannot_be_are_refused(
    temporary: Path, asked: dict[str, int], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        on_hosts(temporary, ("true", *words), **asked)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_hosts", "is_symmetric", "words"),
    [
        (10**20, True, "at most 8191"), (8192, True, "at most 8191"), (10**6, False, "at most 8191"),
        (65, False, "at most 64; with --symmetric"),
    ],
)  # fmt: skip
def test_more_hosts_than_there_can_be_are_refused_before_any_is_started(
    temporary: Path, num_hosts: int, is_symmetric: bool, words: str
) -> None:
    request = EmulateRequest(
        command=command(1), cluster="h100_dgx", num_hosts=num_hosts, is_symmetric=is_symmetric, libraries=temporary
    )
    with pytest.raises(JobError, match=words):
        run_emulate(request, os.environ)
    assert not list(temporary.iterdir())


def test_the_emulated_nccl_tells_hosts_apart(tmp_path: Path) -> None:
    """Two hosts of two ranks: sums and sends over the network, and memory that only the own host can open."""
    job = (sys.executable, str(Path(__file__).with_name("hosts_job.py")), "2", str(tmp_path), "nccl_ranks.py", "hosts")
    result = on_hosts(None, job, num_hosts=2, num_ranks=4)
    assert (result.exit_code, result.num_ranks, result.num_steps) == (0, 4, 3)
    model, took = in_training(num_nodes=2), {}
    for span in result.timeline.spans:
        took[span.name] = min(took.get(span.name, 1.0), span.end_s - span.start_s)
    for name, nodes, num_bytes in (("send_recv 16777216 B", None, 16 << 20), ("send_recv 33554432 B", 2, 32 << 20)):
        pair = model.collective(Collective(CollectiveKind.SEND_RECV, num_bytes, 2, nodes), CommConfig())
        assert took[name] == pytest.approx(pair.seconds(), rel=0.02)
    reduce = model.collective(Collective(CollectiveKind.ALL_REDUCE, 64 << 20, 4, 2), CommConfig())
    assert took["all_reduce 67108864 B"] == pytest.approx(reduce.seconds(), rel=0.02)


@pytest.mark.timeout(120)
def test_two_runs_give_the_same_steps(temporary: Path) -> None:
    first, second = (emulate(temporary, 3, noise=0.05, seed=4) for _ in range(2))
    assert second.steps_s == pytest.approx(first.steps_s, rel=1e-6)


@pytest.mark.timeout(120)
def test_a_command_can_tell_that_its_gpus_are_emulated_and_how_to_emulate_them_again(
    temporary: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    tells = f'echo "$LAGOM_EMULATION_COMMAND" > {seen}; cat "$LAGOM_EMULATION_GPU" >> {seen}; exec "$@"'
    request = EmulateRequest(
        command=("sh", "-c", tells, "sh", *command(1)),
        cluster="h100_dgx",
        num_ranks=4,
        spec=parse_job({"job": {"name": "job"}}, "job", may_lack_work=True),
        job=Path("my job.toml"),
    )
    run_emulate(request, os.environ)
    called, _, gpu = seen.read_text().partition("\n")
    assert called == "lagom emulate --cluster h100_dgx --job 'my job.toml' --ranks 4 --"
    assert json.loads(gpu)["name"] == "NVIDIA H100-SXM5-80GB (emulated)"


def test_a_straggler_slows_every_step(temporary: Path) -> None:
    result = emulate(temporary, 2, stragglers=[{"rank": 1, "factor": 3.0}])
    plain = emulate(temporary, 2)
    assert plain.last_step is not None
    assert result.step_s == pytest.approx(plain.step_s + 2 * plain.last_step.compute_s, rel=0.05)


@pytest.mark.timeout(120)
def test_a_rank_that_the_job_does_not_have_cannot_be_slowed_in_silence(temporary: Path) -> None:
    for key, rows in (("stragglers", [{"rank": 8, "factor": 2.0}]), ("skew", [{"rank": 8, "seconds": 1.0}])):
        with pytest.raises(JobError, match=rf"^emulate\.{key} names rank 8, but there are 8 GPUs, from 0 on$"):
            emulate(temporary, 2, **{key: rows})
    result = emulate(temporary, 2, stragglers=[{"rank": 1, "factor": 2.0}, {"rank": 5, "factor": 3.0}])
    assert result.notes[-1] == "[emulate] names ranks that the job did not have, and nothing was done to them: 5."


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["die", "mismatch"])
def test_ranks_that_can_never_go_on_are_refused_by_name(temporary: Path, what: str) -> None:
    result = emulate(temporary, 2, what)
    assert result.exit_code != 0
    assert any("rank 0 waits for operation" in line and "lacks 1 of 2" in line for line in result.refusals)


@pytest.mark.timeout(120)
def test_a_rank_that_speaks_nonsense_is_refused(temporary: Path) -> None:
    result = emulate(temporary, 1, "garbage")
    assert result.exit_code != 0
    assert any("unknown record type" in line for line in result.refusals)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_a_signal_leaves_no_process_and_no_file(temporary: Path, number: signal.Signals) -> None:
    process = emulating(temporary, command(2, "sleep"))
    mark = f"LAGOM_EMULATION_SOCKET={temporary}".encode()
    await_(lambda: len(with_mark(mark)) == 3)  # the command and its two ranks
    process.send_signal(number)
    process.wait(GENEROUS_S)
    if number is signal.SIGKILL:  # whoever is left needs a moment
        await_(lambda: not with_mark(mark) and not list(temporary.iterdir()))
    assert not with_mark(mark)
    assert not list(temporary.iterdir())


@pytest.mark.timeout(120)
def test_a_parent_that_ignores_the_end_of_children_changes_nothing(temporary: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which a command inherits
    try:
        process = emulating(temporary, (sys.executable, "-c", "raise SystemExit(3)"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    process.wait(GENEROUS_S)
    assert not list(temporary.iterdir())


STRANGER = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 2:
    here = pathlib.Path(sys.argv[1])
    script = [sys.executable, "-c", os.environ["STRANGER"]]
    bare = {"STRANGER": os.environ["STRANGER"]}
    pid = subprocess.run([*script, "", "parent"], env=bare, stdout=subprocess.PIPE, text=True, check=True).stdout
    (here / "new").write_text(f"{os.getpid()} {pid}")
    (here / "new").rename(here / "pids")
if sys.argv[2:] == ["parent"]:
    child = [sys.executable, "-c", "import time; time.sleep(1000)"]
    print(subprocess.Popen(child, env={}, stdout=2, start_new_session=True).pid)
else:
    time.sleep(1000)
"""
"""A command that ignores SIGTERM, with an orphan that nothing connects to the job: no environment, its own session."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", ["verb", "keeper"])
def test_nothing_that_a_command_hides_outlives_a_killed_verb(tmp_path: Path, temporary: Path, killed: str) -> None:
    process = emulating(temporary, (sys.executable, "-c", STRANGER, str(tmp_path)), STRANGER=STRANGER)
    await_((tmp_path / "pids").exists)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    keeper = parent_of(pids[0])
    assert parent_of(pids[1]) == keeper
    assert parent_of(keeper) == process.pid
    if killed == "verb":
        process.kill()
        await_(lambda: not is_alive(keeper))
        assert not any(is_alive(pid) for pid in pids)
    else:
        os.kill(keeper, signal.SIGKILL)
        await_(lambda: not is_alive(pids[0]))
        os.kill(pids[1], signal.SIGKILL)  # the one case in which it has no parent that looks for it
    process.wait(GENEROUS_S)
    await_(lambda: not list(temporary.iterdir()))


@pytest.mark.timeout(120)
def test_a_command_hears_of_the_end_where_verb_and_keeper_are_killed_at_once(tmp_path: Path, temporary: Path) -> None:
    named = "import os, pathlib, sys, time; p = pathlib.Path(sys.argv[1]); (p / 'new').write_text(str(os.getpid())); "
    code = named + "(p / 'new').rename(p / 'pid'); time.sleep(1000)"
    process = emulating(temporary, (sys.executable, "-c", code, str(tmp_path)))
    await_((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    keeper = parent_of(pid)
    os.kill(keeper, signal.SIGSTOP)  # it is to do nothing more
    process.kill()
    process.wait(GENEROUS_S)
    os.kill(keeper, signal.SIGKILL)
    await_(lambda: not is_alive(pid))


def emulating(temporary: Path, words: tuple[str, ...], **variables: str) -> subprocess.Popen[bytes]:
    """`lagom emulate` of a command, as a process."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from lagom_emulate import launch\n"
        "from lagom_overlap.interrupts import as_interrupts\n"
        "from lagom_emulate.verb import EmulateRequest, run_emulate\n"
        "launch._GRACE_S = 1.0\n"
        "with as_interrupts():\n"
        f"    run_emulate(EmulateRequest(command={words!r}, cluster='h100_dgx', "
        "libraries=Path(os.environ['TMPDIR'])), os.environ)\n"
    )
    return subprocess.Popen(
        [*LISTENING, sys.executable, "-c", script],
        env=os.environ | {"TMPDIR": str(temporary)} | variables,
        stderr=subprocess.DEVNULL,
    )


def await_(has_come: Callable[[], bool]) -> None:
    until_s = monotonic() + GENEROUS_S
    while not has_come() and monotonic() < until_s:
        sleep(0.05)
    assert has_come()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def with_mark(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_command_that_is_not_there_is_refused(temporary: Path) -> None:
    with pytest.raises(JobError, match="no-such-command"):
        run_emulate(EmulateRequest(command=("no-such-command",), cluster="h100_dgx", libraries=temporary), os.environ)


@pytest.mark.parametrize(
    ("cluster", "message"), [("mi300x", "emulated are a100, a10g, a40, b200, h100, h200"), ("h100_dgx", "used a GPU")]
)
def test_no_gpu_of_cuda_and_a_command_that_uses_none_are_refused(temporary: Path, cluster: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        run_emulate(EmulateRequest(command=("true",), cluster=cluster, libraries=temporary), os.environ)
    assert not list(temporary.iterdir())


@pytest.mark.timeout(120)
def test_a_python_whose_pytorch_has_no_cuda_ends_when_it_imports_it(
    temporary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once before any training, and once in all: earlier a figure of nothing followed each rank's line."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import version\n__version__ = '2.13.0+cpu'\n")
    (package / "version.py").write_text("cuda = None\nhip = None\n")
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import torch; open({str(tmp_path / 'on')!r}, 'w')"
    request = EmulateRequest(command=(sys.executable, "-c", code), cluster="h100_dgx", libraries=temporary)
    with pytest.raises(JobError, match=r"has PyTorch 2.13.0\+cpu, which has no CUDA: give the command a Python with"):
        run_emulate(request, os.environ)
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "on").exists()


@pytest.mark.timeout(120)
def test_the_run_folder_has_the_result_and_a_timeline(temporary: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    request = EmulateRequest(command=command(2), cluster="h100_dgx", libraries=temporary, out=out, is_quiet=True)
    result = run_emulate(request, os.environ)
    record = json.loads((out / "run.json").read_text())
    assert record["result"]["step_s"] == pytest.approx(result.step_s)
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 9
    assert len(result.timeline.spans) == 2 * 9


@pytest.mark.timeout(120)
def test_a_process_on_the_emulated_driver_marks_its_steps() -> None:
    job = str(Path(__file__).with_name("device_job.py"))
    result = run_emulate(EmulateRequest(command=(sys.executable, job), cluster="h100_dgx", is_quiet=True), os.environ)
    model = in_training()
    memset_s = model.kernel_seconds(model.kernel(MemoryBound(1 << 30)))
    assert (result.exit_code, result.num_steps, result.memory_bytes) == (0, 2, 1 << 30)
    assert result.steps_s == pytest.approx((memset_s, memset_s), rel=0.02)
