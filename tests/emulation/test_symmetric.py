"""Symmetric ranks: one host of several runs; in the clock, in the stand-in for NCCL, and in what PyTorch is told."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from lagom_emulate.result import EmulateResult
from lagom_emulate.symmetric import SymmetricGroups, SymmetricRanksError, enter_world
from lagom_emulate.verb import EmulateRequest, run_emulate
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import parse_job

HERE = Path(__file__).parent


def emulate(words: Sequence[str], *, stall_s: float = 60.0, **asked: object) -> EmulateResult:
    emulated = {"stall_s": stall_s, **{key: asked.pop(key) for key in ("stragglers",) if key in asked}}
    spec = parse_job({"job": {"name": "j"}, "emulate": emulated}, "job", may_lack_work=True)
    request = EmulateRequest(
        command=(sys.executable, *words), cluster="h100_dgx", spec=spec, is_quiet=True, **({"num_hosts": 2} | asked)
    )
    return run_emulate(request, os.environ)


def hosts_job(folder: Path, function: str) -> tuple[str, ...]:
    folder.mkdir()
    return str(HERE / "hosts_job.py"), "2", str(folder), "symmetric_ranks.py", function


@pytest.mark.timeout(120)
def test_a_collective_waits_for_the_processes_alone_and_costs_what_all_ranks_cost() -> None:
    job = str(HERE / "client_job.py"), "4", "plain"
    both, one = (emulate(job, is_symmetric=is_symmetric) for is_symmetric in (False, True))
    assert (one.exit_code, one.num_ranks, one.num_started, one.num_hosts) == (0, 4, 2, 2)
    assert (both.num_ranks, both.num_started) == (4, 4)
    assert one.steps_s == pytest.approx(both.steps_s, rel=1e-9)
    assert one.last_step == both.last_step
    assert "2 of 4 ranks were not started" in one.summary()
    assert "4 ranks (2 started) on 2 hosts" in one.summary()


@pytest.mark.timeout(120)
def test_the_stand_in_for_nccl_prices_groups_over_hosts_as_if_all_were_there(tmp_path: Path) -> None:
    both, one = (
        emulate(hosts_job(tmp_path / str(is_symmetric), "steps"), is_symmetric=is_symmetric, num_ranks=4)
        for is_symmetric in (False, True)
    )
    assert (both.num_started, one.num_started, one.num_steps) == (4, 2, 3)
    assert one.steps_s == pytest.approx(both.steps_s, rel=1e-9)
    spans = [
        {(span.name, span.rank): span.end_s - span.start_s for span in result.timeline.spans if span.rank < 2}
        for result in (both, one)
    ]
    assert len(spans[1]) == 4
    assert spans[1] == pytest.approx(spans[0], rel=1e-6)


@pytest.mark.timeout(120)
def test_a_send_to_a_rank_that_is_not_started_ends_the_job_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"--symmetric: Send: rank [23] of a communicator of 4 is on host 1, which is not"
    ):
        emulate(hosts_job(tmp_path / "job", "sends"), is_symmetric=True, num_ranks=4)


@pytest.mark.timeout(120)
def test_a_job_that_waits_outside_of_its_gpus_is_ended(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nothing has moved for 3 s: the job waits outside of its GPUs"):
        emulate(hosts_job(tmp_path / "job", "sleeps"), is_symmetric=True, num_ranks=4, stall_s=3.0)


@pytest.mark.timeout(120)
def test_a_command_that_fails_before_it_uses_a_gpu_has_no_ranks_to_speak_of() -> None:
    ran = emulate(("-c", "raise SystemExit(3)"), is_symmetric=True, num_ranks=4)
    assert (ran.exit_code, ran.num_ranks, ran.num_started) == (3, 0, 0)
    assert not any("Symmetric" in note for note in ran.notes)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("given", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_a_process_that_is_no_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Mapping[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "alone.py"
    script.write_text(
        "import ctypes as c, time; d = c.CDLL('libcuda.so.1'); d.lagom_emulation_mark(b'{}'); time.sleep(600)"
    )
    with pytest.raises(JobError, match="a process without RANK"):
        emulate((str(script),), is_symmetric=True)


@pytest.mark.parametrize(
    ("words", "asked", "message"),
    [
        (("--nnodes", "2"), {}, "--symmetric starts one host's"),
        ((), {"num_hosts": 1}, "--symmetric needs several hosts"),
        ((), {"stragglers": [{"rank": 9, "factor": 2.0}]}, "stragglers names rank 9"),
    ],
)
def test_what_symmetric_ranks_cannot_be_asked_for(
    words: tuple[str, ...], asked: Mapping[str, object], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        emulate(("-c", "pass", *words), is_symmetric=True, **asked)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}, ("64", "8", "8")),
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "8"}, ("64", "8", "8")),  # a rank's child
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "", "GROUP_WORLD_SIZE": "1"}, ("8", "", "1")),
    ],
)
def test_a_rank_has_the_world_of_all_hosts_once(given: dict[str, str], expected: tuple[str, ...]) -> None:
    environment = given | {"LAGOM_EMULATION_SYMMETRIC_HOSTS": "8"}
    enter_world(environment)
    enter_world(environment)
    assert tuple(environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")) == expected
    alone = dict(given)
    enter_world(alone)
    assert alone == given


class Device:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.named: list[tuple[tuple[int, ...], int, int]] = []
        self.refused: list[str] = []

    def name_group(self, num_started: int, ranks: Sequence[int], own: int, peer: int) -> None:
        assert num_started == 2
        self.named.append((tuple(ranks), own, peer))

    def refuse(self, text: str) -> None:
        self.refused.append(text)


class C10d:
    """The part of torch.distributed.distributed_c10d that is used, as PyTorch 2.11 to 2.15 have it."""

    ProcessGroup = SimpleNamespace(unbox=lambda group: group)
    Backend = str

    def __init__(self) -> None:
        self.made: list[str] = []

    class BackendConfig:
        def __init__(self, backend: str) -> None:
            self.backend = backend

        def get_device_backend_map(self) -> dict[str, str]:
            if ":" in self.backend:
                return dict(part.split(":") for part in self.backend.split(","))
            return dict.fromkeys(("cpu", "cuda") if self.backend == "gloo" else ("cuda",), self.backend)

    def _process_group_name(self, ranks: Sequence[int], use_hashed_name: bool) -> str:
        return f"name of {list(ranks)}"

    def _new_process_group_helper(  # noqa: PLR0917 - as PyTorch has it
        self,
        group_size: int,
        group_rank: int | None,
        global_ranks_in_group: list[int],
        backend: str,
        store: object,
        group_name: str,
    ) -> str:
        self.made.append(backend)
        return group_name


def started(c10d: object, **environment: str) -> Device:
    device = Device()
    SymmetricGroups(device, c10d, 1, 2).start(environment)
    return device


def test_a_world_that_is_not_that_of_one_host_is_refused() -> None:
    """Three of four ranks that somebody else started: their places on the first host are not those of the others."""
    with pytest.raises(SymmetricRanksError, match="WORLD_SIZE 3 with LOCAL_WORLD_SIZE 2"):
        started(C10d(), WORLD_SIZE="3", LAGOM_EMULATION_SYMMETRIC_HOSTS="4")
    assert not started(C10d(), WORLD_SIZE="8", LAGOM_EMULATION_SYMMETRIC_HOSTS="4").refused


def test_the_device_is_told_the_group_that_is_made_and_nothing_afterwards() -> None:
    c10d = C10d()
    device = started(c10d)
    assert c10d._new_process_group_helper(6, 1, [], "nccl", None, "0") == "0"
    assert device.named == [((0, 1, 2, 3, 4, 5), 1, -1), ((), -1, -1)]
    device.named.clear()
    c10d._process_group_name([1, 3, 5], True)  # a split comes next
    c10d._process_group_name([0, 2, 4], True)  # not of this rank
    assert device.named == [((1, 3, 5), 0, -1), ((), -1, -1)]


def test_the_device_is_told_the_group_of_each_operator_and_its_peer() -> None:
    c10d = C10d()
    device = Device()
    groups = SymmetricGroups(device, c10d, 1, 2)
    groups.start({})
    c10d._new_process_group_helper(3, 0, [1, 3, 5], "nccl", None, "over")
    device.named.clear()

    def operator(name: str, *names: str) -> SimpleNamespace:
        arguments = [SimpleNamespace(name=each) for each in names]
        return SimpleNamespace(_schema=SimpleNamespace(name=name, arguments=arguments))

    over = SimpleNamespace(group_name="over")
    send = operator("c10d::send", "tensors", "process_group", "dst")
    assert groups.call(send, ([], over, 2), {}, lambda: "sent") == "sent"
    gather = operator("_c10d_functional::all_gather_into_tensor", "input", "group_size", "group_name")
    groups.call(gather, (None, 3, "over"), {}, lambda: None)
    groups.call(gather, (None, 3, "unknown"), {}, lambda: None)
    told = ((1, 3, 5), 0, 5), ((), -1, -1), ((1, 3, 5), 0, -1), ((), -1, -1), ((), -1, -1), ((), -1, -1)
    assert device.named == list(told)


@pytest.mark.parametrize(
    ("ranks", "backend", "made"),
    [
        ([], "nccl", "nccl"),
        ([], "cpu:gloo,cuda:nccl", "cuda:nccl"),
        ([0, 1], "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ([0, 1], "gloo", "gloo"),
        ([2, 3], "gloo", "gloo"),  # nobody's here
    ],
)
def test_gloo_connects_only_ranks_that_are_processes(ranks: list[int], backend: str, made: str) -> None:
    c10d = C10d()
    started(c10d)
    c10d._new_process_group_helper(4, 1, ranks, backend, None, "g")
    assert c10d.made == [made]


def test_what_would_wait_for_absent_ranks_is_refused_by_name() -> None:
    c10d = C10d()
    device = started(c10d)
    with pytest.raises(SymmetricRanksError, match="a gloo group connects ranks that are not started"):
        c10d._new_process_group_helper(4, 1, [], "gloo", None, "0")
    assert device.refused == ["--symmetric: a gloo group connects ranks that are not started (ranks 0, 1, 2, 3)"]
    for environment, message in (
        ({"TORCH_DIST_INIT_BARRIER": "1"}, "TORCH_DIST_INIT_BARRIER=1"),
        ({"LAGOM_RUN_MODE": "online"}, "online tuning decides with all ranks"),
    ):
        with pytest.raises(SymmetricRanksError, match=message):
            started(C10d(), **environment)
    with pytest.raises(SymmetricRanksError, match="not with this release of PyTorch"):
        started(SimpleNamespace(_process_group_name=None))
