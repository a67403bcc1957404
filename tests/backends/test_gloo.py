"""The gloo backend on real rank processes; messages are small, so that a busy machine of two cores is enough."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from forked_ranks import forked_ranks

import lagom_overlap
from lagom_overlap.backends import BackendRequest
from lagom_overlap.backends.gloo import (
    RankBackend,
    backend,
    join_if_launched_by_torchrun,
    link,
    open_backend,
    probe_link_emulation,
    ranks,
    torch_extra,
)
from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.backends.gloo.terms import space_within
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits, Transport
from lagom_overlap.engines.messages import Measure, Ready, Wrong
from lagom_overlap.errors import BackendError, MissingDependencyError, RankError, SpaceError, WrongResultError
from lagom_overlap.timeline import SpanKind
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, OverlapGroup

__all__ = ["forked_ranks"]
pytestmark = [pytest.mark.torch, pytest.mark.gloo]

KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
GONE_WITHIN_S = 200.0
"""Far more than it takes (tenths of a second) on a machine that is not overloaded."""
SRC = str(Path(lagom_overlap.__file__).parents[1])


def request(**changes: object) -> BackendRequest:
    return BackendRequest(**{"job_fingerprint": "test", "timeout_s": 40.0, **changes})


def group_of(*collectives: Collective, starts_after: tuple[int, ...] = (), name: str = "g") -> OverlapGroup:
    works = (Gemm(64, 64, 64), Attention(batch=1, num_heads=2, seq_len=32, head_dim=16), MemoryBound(64 * KIB))
    return OverlapGroup(
        name=name,
        computations=tuple(CompOp(name=f"c{index}", work=work) for index, work in enumerate(works)),
        comms=tuple(
            CommOp(name=f"{index}-{collective.kind}", collective=collective)
            for index, collective in enumerate(collectives)
        ),
        starts_after=starts_after,
    )


def small_group(num_ranks: int = 2) -> OverlapGroup:
    return group_of(Collective(CollectiveKind.ALL_REDUCE, 4 * KIB, num_ranks))


def sliced(num_channels: int, chunk_bytes: int = 512 * KIB) -> CommConfig:
    return CommConfig(num_channels=num_channels, chunk_bytes=chunk_bytes)


def exists(pid: int) -> bool:
    """Whether the process is there and not just waiting to be reaped by a container's init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: tuple[int, ...]) -> bool:
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(map(exists, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankBackend]:
    opened = open_backend(request(repeats=3))
    pids = opened.pids
    assert len(pids) == 2
    assert all(map(exists, pids))
    yield opened
    opened.close()
    opened.close()
    assert all_gone(pids)


@pytest.fixture
def open_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., RankBackend]]:
    """Opens backends whose temporary files, if they left any, would be found in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    opened: list[RankBackend] = []

    def open_one(**changes: object) -> RankBackend:
        opened.append(open_backend(request(**changes)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    assert list(tmp_path.iterdir()) == []


# --- right answers and consistent times


@pytest.mark.parametrize("config", [CommConfig(), sliced(1), sliced(3), sliced(8, 513 * KIB + 1), sliced(8, 64 * MIB)])
def test_all_collectives_are_right_and_times_fit_together(two_ranks: RankBackend, config: CommConfig) -> None:
    odd = 8 * (131072 * 3 + 77)  # elements per rank that are no multiple of any slice
    group = group_of(*(Collective(kind, odd, 2) for kind in KINDS), starts_after=(0, 2, 1, 3))
    outcome = two_ranks.measure(group, (config,) * 4)  # raises WrongResultError where an answer is wrong
    assert isinstance(outcome, Measurement)
    assert outcome.num_repeats == 3
    # On each rank Z holds every computation and the whole stream, so the maxima and their medians do as well.
    assert outcome.makespan_s >= max(outcome.comp_s, *outcome.comm_s)
    assert all(time_s > 0 for time_s in (outcome.comp_s, *outcome.comm_s))
    timeline = outcome.timeline
    assert timeline is not None
    assert [span.name for span in timeline.of(SpanKind.COMP)] == ["c0", "c1", "c2"]
    comms = {span.name: span for span in timeline.of(SpanKind.COMM)}
    assert set(comms) == set(group.comm_names)
    for name, start in zip(group.comm_names, group.starts_after, strict=True):
        if start:
            assert comms[name].start_s >= timeline.of(SpanKind.COMP)[start - 1].end_s


def test_collectives_may_differ_in_configuration_and_small_ones_work(two_ranks: RankBackend) -> None:
    tiny = group_of(*(Collective(kind, 8, 2) for kind in KINDS), Collective(CollectiveKind.ALL_GATHER, 8, 2))
    assignment = (CommConfig(), sliced(2), CommConfig(num_channels=4), CommConfig(chunk_bytes=MIB), sliced(8))
    assert isinstance(two_ranks.measure(tiny, assignment), Measurement)


@pytest.mark.slow
def test_four_ranks_are_right_too(open_for: Callable[..., RankBackend]) -> None:
    opened = open_for(num_ranks=4)
    group = group_of(*(Collective(kind, 16 * (131072 + 13), 4) for kind in KINDS))
    for config in (CommConfig(), sliced(2), sliced(3, 777_777)):
        assert isinstance(opened.measure(group, (config,) * 4), Measurement)


# --- what may be tried


def test_the_problem_offers_the_native_call_and_three_baselines(two_ranks: RankBackend) -> None:
    group = group_of(Collective(CollectiveKind.ALL_GATHER, 8 * MIB, 2))
    problem = two_ranks.problem(group)
    assert problem.default == (CommConfig(),)
    assert dict(problem.baselines) == {
        "engine_default": (sliced(1, 8 * MIB),),
        "fixed_min": (sliced(1, 512 * KIB),),
        "fixed_max": (sliced(8, 2 * MIB),),
    }


def test_a_group_that_cannot_run_is_refused_with_the_reason(two_ranks: RankBackend) -> None:
    with pytest.raises(BackendError, match="runs over 4 ranks, but the job starts 2"):
        two_ranks.problem(small_group(4))
    with pytest.raises(BackendError, match=r"must be a multiple of 8 bytes"):
        two_ranks.problem(group_of(Collective(CollectiveKind.ALL_GATHER, 12, 2)))
    kernel = CompOp(name="k", work=Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0))
    with pytest.raises(BackendError, match="'k' is a kernel"):
        two_ranks.problem(OverlapGroup(name="g", computations=(kernel,), comms=small_group().comms))
    with pytest.raises(BackendError, match=r"needs [0-9.]+ GiB \([0-9]+ bytes\) for 2 ranks, this machine has"):
        two_ranks.problem(group_of(Collective(CollectiveKind.ALL_GATHER, 1 << 50, 2)))


def test_a_configuration_that_gloo_lacks_is_a_failure_and_the_search_goes_on(two_ranks: RankBackend) -> None:
    outcome = two_ranks.measure(small_group(), (CommConfig(protocol=Protocol.LL),))
    assert isinstance(outcome, Failure)
    assert "protocol is ll" in outcome.reason
    assert isinstance(two_ranks.measure(small_group(), (CommConfig(),)), Measurement)


def test_limits_take_the_place_of_the_engines_values() -> None:
    collective = Collective(CollectiveKind.ALL_GATHER, 4 * MIB, 2)
    subspace = space_within(collective, SpaceLimits(num_channels=(3, 5), chunk_bytes=(MIB, 2 * MIB))).subspaces[0]
    assert (subspace.num_channels, subspace.chunk_bytes) == ((3, 5), (MIB, 2 * MIB))


def test_of_slices_beyond_the_message_one_is_kept() -> None:
    collective = Collective(CollectiveKind.ALL_GATHER, 3 * MIB, 2)
    limits = SpaceLimits(chunk_bytes=(MIB, 4 * MIB, 8 * MIB, 16 * MIB))
    assert space_within(collective, limits).subspaces[0].chunk_bytes == (MIB, 4 * MIB)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (SpaceLimits(num_threads=(64,)), r"^tune\.space\.num_threads is \[64\]: gloo has no such knob"),
        (SpaceLimits(algorithms=(Algorithm.RING,)), r"^tune\.space\.algorithm is \['ring'\]: gloo has no such knob"),
        (SpaceLimits(protocols=(Protocol.LL, Protocol.SIMPLE)), r"^tune\.space\.protocol is \['ll', 'simple'\]"),
        (SpaceLimits(transports=(Transport.SHM,)), r"^tune\.space\.transport is \['shm'\]"),
        (SpaceLimits(num_channels=(1, 16)), r"^tune\.space\.num_channels holds 16, gloo offers 1 to 8"),
        (SpaceLimits(num_channels=(0, 1)), r"^tune\.space\.num_channels holds 0, gloo offers 1 to 8"),
        (SpaceLimits(num_channels=()), r"^tune\.space\.num_channels allows no value"),
        (SpaceLimits(num_channels=(4, 2)), r"^tune\.space\.num_channels is \[4, 2\], must be increasing"),
        (SpaceLimits(chunk_bytes=(64 * KIB,)), r"^tune\.space\.chunk_bytes is 65536"),
    ],
)
def test_limits_outside_what_gloo_offers_are_refused(limits: SpaceLimits, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space_within(Collective(CollectiveKind.ALL_GATHER, 4 * MIB, 2), limits)


# --- ends: good, bad, and none left behind


def test_a_killed_rank_ends_the_run_with_its_number_and_signal(open_for: Callable[..., RankBackend]) -> None:
    opened = open_for(repeats=10**6)
    pids = opened.pids
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(RankError, match=rf"rank 1 \(process {pids[1]}\) was killed by SIGKILL"):
        opened.measure(small_group(), (sliced(2),))
    assert all_gone(pids)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_idle_is_named_at_the_next_measurement(
    open_for: Callable[..., RankBackend],
) -> None:
    opened = open_for()
    os.kill(opened.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 0 .* was killed by SIGKILL"):
        opened.measure(small_group(), (CommConfig(),))


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_within_the_time_of_a_measurement(open_for: Callable[..., RankBackend]) -> None:
    opened = open_for(repeats=10**6, timeout_s=5.0)
    pids = opened.pids
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGSTOP)).start()
    with pytest.raises(RankError, match=r"no answer within 5 s: rank 1 .* is stopped"):
        opened.measure(small_group(), (sliced(2),))
    assert all_gone(pids)


def test_ranks_ignore_the_ctrl_c_that_a_terminal_sends_to_all(two_ranks: RankBackend) -> None:
    for pid in two_ranks.pids:
        os.kill(pid, signal.SIGINT)
    assert isinstance(two_ranks.measure(small_group(), (CommConfig(),)), Measurement)


@pytest.mark.slow
def test_ctrl_c_in_the_controller_leaves_no_rank_and_no_backend(
    open_for: Callable[..., RankBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_for(repeats=10**6)
    pids = opened.pids

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "select", SimpleNamespace(select=interrupted))
    with pytest.raises(KeyboardInterrupt):
        opened.measure(small_group(), (sliced(2),))
    assert all_gone(pids)
    assert opened.pids == ()
    with pytest.raises(BackendError, match="have ended"):
        opened.measure(small_group(), (CommConfig(),))


def _run_script(body: str, **environment: str) -> subprocess.Popen[str]:
    script = textwrap.dedent("""
        import json, sys
        from lagom_overlap.backends import BackendRequest
        from lagom_overlap.backends.gloo import join_if_launched_by_torchrun, open_backend
        from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
        from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup
        group = OverlapGroup(name="g", computations=(CompOp(name="c", work=Gemm(8, 8, 8)),), comms=(
            CommOp(name="ar", collective=Collective(CollectiveKind.ALL_REDUCE, 4096, 2)),))
    """) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC, **environment},
    )


def test_the_ranks_of_a_killed_controller_end_by_themselves() -> None:
    controller = _run_script("""
        backend = open_backend(BackendRequest(job_fingerprint="x", repeats=10**6))
        print(json.dumps(backend.pids), flush=True)
        backend.measure(group, (CommConfig(),))
    """)
    assert controller.stdout is not None
    pids = tuple(json.loads(controller.stdout.readline()))
    assert all(map(exists, pids))
    time.sleep(0.3)
    controller.kill()
    controller.communicate()
    assert all_gone(pids)


LAUNCHED = """
    code = join_if_launched_by_torchrun()
    if code is not None:
        sys.exit(code)
    backend = open_backend(BackendRequest(job_fingerprint="x"))
    print(backend.measure(group, (CommConfig(num_channels=2),)).num_repeats, len(backend.pids))
    backend.close()
"""


@pytest.mark.slow
def test_launched_ranks_join_and_only_rank_0_prints() -> None:
    port = str(20_000 + os.getpid() % 10_000)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched = [_run_script(LAUNCHED, RANK=str(rank), **variables) for rank in (0, 1)]
    outputs = [rank.communicate() for rank in launched]
    assert [rank.returncode for rank in launched] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["1 1\n", ""]


def test_a_world_that_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    assert join_if_launched_by_torchrun() is None
    with pytest.raises(BackendError, match=r"started 4 ranks .* the job names 2"):
        open_backend(request())
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(BackendError, match="WORLD_SIZE is 'four'"):
        open_backend(request())


def test_without_a_launcher_nobody_joins() -> None:
    assert join_if_launched_by_torchrun() is None


def test_one_rank_is_too_few() -> None:
    with pytest.raises(BackendError, match="names 1 ranks, gloo needs at least 2"):
        open_backend(request(num_ranks=1))


def test_without_torch_the_pip_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_extra.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        open_backend(request())


class RanksThatAreWrong:
    """Stands for rank processes of which rank 1 finds a wrong answer in the second collective."""

    def __init__(self, *_: object, **__: object) -> None:
        self.ready = Ready("0", (0, 1))
        self.closed = False

    def exchange(self, command: Measure, what: str, timeout_s: float) -> Wrong:
        return Wrong(1, (1,))

    def close(self) -> None:
        self.closed = True


def test_a_wrong_result_names_collective_rank_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "RankProcesses", RanksThatAreWrong)
    opened = open_backend(request())
    group = group_of(Collective(KINDS[0], 8, 2), Collective(KINDS[1], 16, 2))
    with pytest.raises(WrongResultError, match=r"'1-reduce_scatter' of 16 bytes .* on rank 1 under .*num_channels=4"):
        opened.measure(group, (CommConfig(), sliced(4)))
    assert opened._ranks.closed


# --- memory and the emulated link


def test_memory_of_a_rank_counts_equal_computations_once() -> None:
    comms = (CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 800, 2)),)
    works = [Gemm(10, 20, 30), Gemm(10, 20, 30), MemoryBound(64)]
    group = OverlapGroup(
        name="g", computations=tuple(CompOp(name=f"{i}", work=w) for i, w in enumerate(works)), comms=comms
    )
    assert backend.rank_bytes([group]) == 2 * (800 + 400) + 4 * (10 * 30 + 30 * 20 + 10 * 20) + 64


def test_groups_share_buffers_and_computations_but_what_differs_adds_up() -> None:
    gather, reduce = Collective(CollectiveKind.ALL_GATHER, 8000, 2), Collective(CollectiveKind.ALL_REDUCE, 4000, 2)
    one, two, both = group_of(gather), group_of(gather, gather), group_of(gather, reduce)
    works = backend.kept_bytes([one]) - (8000 + 4000)
    assert backend.kept_bytes([one, two]) == backend.kept_bytes([two]) == works + 2 * (8000 + 4000)
    assert backend.kept_bytes([one, two, both]) == works + 2 * (8000 + 4000) + 4000
    assert backend.rank_bytes([one, two, both]) == works + 2 * (8000 + 4000) + 4000 + (8000 + 4000)


def test_groups_that_fit_one_by_one_but_not_together_are_refused_before_any_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [
        group_of(Collective(CollectiveKind.ALL_REDUCE, 8 * MIB + 8 * index, 2), name=f"g{index}") for index in range(3)
    ]
    free_bytes = 2 * backend.rank_bytes(groups[:2])
    monkeypatch.setattr(backend, "_available_bytes", lambda: free_bytes)
    monkeypatch.setattr(backend, "RankProcesses", RanksThatAreWrong)
    opened = open_backend(request())
    for group in groups[:2]:
        opened.problem(group)
        opened.problem(group)  # asked again, it needs nothing more
    needed = 2 * backend.rank_bytes(groups)
    words = rf"groups 'g0', 'g1', 'g2' together need .* \({needed} bytes\) for 2 ranks, .* \({free_bytes} bytes\)"
    with pytest.raises(BackendError, match=words):
        opened.problem(groups[2])
    with pytest.raises(BackendError, match=words):
        opened.measure(groups[2], (CommConfig(),))
    assert opened.problem(groups[1]).group == groups[1]


def test_what_the_ranks_hold_already_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    group, other = small_group(), group_of(Collective(CollectiveKind.ALL_REDUCE, 8 * KIB, 2), name="h")
    left = 2 * (backend.rank_bytes([group, other]) - backend.kept_bytes([group]))
    monkeypatch.setattr(backend, "_available_bytes", lambda: left)
    backend.check_memory([group, other], 2, held=[group])
    with pytest.raises(BackendError, match="group 'h' needs"):
        backend.check_memory([group, other], 2)


@pytest.mark.slow
def test_an_emulated_link_is_no_faster_than_its_rate(open_for: Callable[..., RankBackend]) -> None:
    reason = probe_link_emulation()
    if reason is not None:
        pytest.skip(f"no link emulation here: {reason}")
    opened = open_for(link_bytes_per_s=20e6)
    assert "EMULATED link of 0.16 Gbit/s" in opened.description
    num_bytes, burst_bytes = 4 * MIB, 512 * KIB
    gather = group_of(Collective(CollectiveKind.ALL_GATHER, num_bytes, 2))
    outcomes = [opened.measure(gather, (CommConfig(),)) for _ in range(5)]
    # Each rank sends half; all of it passes one bucket of twice the rate, which may start full. A rank that begins late
    # sees only the end of a gather, so the longest counts.
    times_s = [outcome.comm_s[0] for outcome in outcomes if isinstance(outcome, Measurement)]
    assert max(times_s) >= (num_bytes - burst_bytes) / (2 * 20e6)


def test_a_machine_without_the_tools_is_told_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda tool, **_: None if tool == "tc" else f"/bin/{tool}")
    assert "missing: tc" in (probe_link_emulation() or "")
    with pytest.raises(BackendError, match="cannot emulate a link: missing tc"):
        open_backend(request(link_bytes_per_s=1e9))


def test_tools_are_found_where_a_users_path_leaves_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in link.TOOLS:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "user"))  # as Debian's for everybody but root: without sbin
    monkeypatch.setattr(link, "_ADMIN_FOLDERS", ())
    assert link._missing_tools() == list(link.TOOLS)
    monkeypatch.setattr(link, "_ADMIN_FOLDERS", (str(tmp_path),))
    assert link._missing_tools() == []


def test_a_machine_that_refuses_namespaces_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = ["sh", "-c", "echo 'unshare failed: Operation not permitted' >&2; exit 1"]
    monkeypatch.setattr(link, "_missing_tools", list)
    monkeypatch.setattr(link, "_set_up", lambda *_: refusing)
    assert probe_link_emulation() == "unshare failed: Operation not permitted"
    with pytest.raises(BackendError, match="Operation not permitted"):
        open_backend(request(link_bytes_per_s=1e9))


def _session_of(leader: int) -> list[int]:
    """The processes of the leader's session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("script", ["sleep 60", "printf rea; sleep 60"])
def test_a_namespace_that_is_never_ready_is_given_up_and_leaves_no_process(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(link, "_missing_tools", list)
    monkeypatch.setattr(link.subprocess, "Popen", Kept)
    monkeypatch.setattr(link, "_set_up", lambda *_: ["sh", "-c", f"{script}; echo ready"])
    monkeypatch.setattr(link, "_TIMEOUT_S", 0.2)
    with pytest.raises(BackendError, match=r"setting up a network namespace took more than 0\.2 s"):
        EmulatedLink(1e9, 2)
    (holder,) = started
    assert holder.returncode == -signal.SIGKILL
    assert all_gone(tuple(_session_of(holder.pid)))  # nor the tool that it waited for


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(BackendError, match=r"^an emulated link of .* Gbit/s: must be .* at least 0\.008 Gbit/s"):
        open_backend(request(link_bytes_per_s=rate))
