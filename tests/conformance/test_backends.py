"""What every backend promises, wherever its times come from: a new backend is one more line in BACKENDS."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import pytest
from c_build import build_libraries

from lagom_overlap.backends import Backend, BackendRequest, gloo, recorded, simulated
from lagom_overlap.backends.fake_nccl import FakeNcclBackend
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.hardware import load_preset
from lagom_overlap.timeline import SpanKind
from lagom_overlap.tuners.bundle import header_line
from lagom_overlap.tuners.problem import Failure, GroupProblem, Measurement
from lagom_overlap.tuners.rows import group_row
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup

REPEATS: Final = 2
IMPOSSIBLE: Final = CommConfig(num_channels=10**6)
OUTSIDE_ITS_SPACE: Final = {"engine_default": "the whole message as one slice: what gloo's engine does without tuning"}
"""Baselines that no search may propose, and why they are worth a comparison all the same."""


def group_of(name: str, *sizes: int) -> OverlapGroup:
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    return OverlapGroup(
        name=name,
        computations=(CompOp(name="mm", work=Gemm(64, 64, 64)), CompOp(name="add", work=MemoryBound(4096))),
        comms=tuple(
            CommOp(name=f"{name}{index}", collective=Collective(kind, num_bytes, 2))
            for index, (kind, num_bytes) in enumerate(zip(kinds, sizes, strict=False))
        ),
    )


GROUPS: Final = (group_of("one", MIB), group_of("two", 4 * MIB, MIB))


def simulated_request() -> BackendRequest:
    return BackendRequest(job_fingerprint="job", repeats=REPEATS, cluster=load_preset("a40_nvlink", 1))


def open_simulated(factory: pytest.TempPathFactory) -> Backend:
    return simulated.open_backend(simulated_request())


def open_recorded(factory: pytest.TempPathFactory) -> Backend:
    """A recording of the simulated backend: every group's default and baselines."""
    source = open_simulated(factory)
    problems = tuple(map(source.problem, GROUPS))
    lines = [header_line("job", "simulated", problems, description=source.description)]
    for problem in problems:
        for assignment in (problem.default, *problem.baselines.values()):
            row = group_row(problem, assignment, source.measure(problem.group, assignment))
            lines.append(msgspec.json.encode({"groups": {problem.group.name: row}}).decode())
    path = factory.mktemp("bundle") / "measurements.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return recorded.open_backend(BackendRequest(job_fingerprint="job", bundle=path))


def open_fake_nccl(factory: pytest.TempPathFactory) -> Backend:
    """The real tuner plug-in, compiled here, under the fake NCCL."""
    plugin, fake = build_libraries(factory)
    return FakeNcclBackend(simulated_request(), fake_library=fake, plugin_library=plugin)


def open_gloo(factory: pytest.TempPathFactory) -> Backend:
    pytest.importorskip("torch")
    return gloo.open_backend(BackendRequest(job_fingerprint="job", repeats=REPEATS))


Open = Callable[[pytest.TempPathFactory], Backend]
BACKENDS: Final = [
    pytest.param(open_simulated, id="simulated"),
    pytest.param(open_recorded, id="recorded"),
    pytest.param(open_fake_nccl, id="fake_nccl"),
    pytest.param(open_gloo, id="gloo", marks=[pytest.mark.torch, pytest.mark.gloo]),
]


@dataclass(frozen=True)
class Opened:
    """A backend and the problems of all groups, asked for before anything is measured, as a job does."""

    backend: Backend
    problems: tuple[GroupProblem, ...]


@pytest.fixture(scope="module", params=BACKENDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    backend = request.param(tmp_path_factory)
    yield Opened(backend, tuple(map(backend.problem, GROUPS)))
    backend.close()


def test_it_says_in_one_line_what_its_times_come_from(opened: Opened) -> None:
    assert opened.backend.description.strip()
    assert "\n" not in opened.backend.description


def test_a_problem_is_of_its_group_and_the_same_when_asked_again(opened: Opened) -> None:
    for group, problem in zip(GROUPS, opened.problems, strict=True):
        assert problem.group == group
        assert len(problem.spaces) == len(problem.default) == len(group.comms)
        assert all(len(space) >= 1 for space in problem.spaces)
        again = opened.backend.problem(group)
        assert (again.spaces, again.default) == (problem.spaces, problem.default)
        assert dict(again.baselines) == dict(problem.baselines)


def test_baselines_lie_in_their_spaces_or_are_documented(opened: Opened) -> None:
    for problem in opened.problems:
        assert {"fixed_min", "fixed_max"} <= set(problem.baselines)
        for name, assignment in problem.baselines.items():
            inside = [config in space for config, space in zip(assignment, problem.spaces, strict=True)]
            assert all(inside) or name in OUTSIDE_ITS_SPACE, f"{name} lies outside its space: {assignment}"


def test_the_default_and_every_baseline_give_times_of_one_shape(opened: Opened) -> None:
    for problem in opened.problems:
        for assignment in (problem.default, problem.default, *problem.baselines.values()):
            outcome = opened.backend.measure(problem.group, assignment)
            assert isinstance(outcome, Measurement), outcome
            assert len(outcome.comm_s) == len(problem.group.comms)
            assert outcome.num_repeats == REPEATS
            assert outcome.makespan_iqr_s >= 0
            assert min(outcome.comp_s, *outcome.comm_s) > 0
            # Z holds the whole of every stream on each rank, so also in maxima over ranks and medians over repeats
            assert outcome.makespan_s >= max(outcome.comp_s, *outcome.comm_s) * (1 - 1e-9)
            if outcome.timeline is not None:
                comms = {span.name for span in outcome.timeline.of(SpanKind.COMM)}
                assert comms == set(problem.group.comm_names)


def test_an_impossible_configuration_is_a_failure_with_a_reason_and_the_search_goes_on(opened: Opened) -> None:
    for problem in opened.problems:
        outcome = opened.backend.measure(problem.group, (*problem.default[:-1], IMPOSSIBLE))
        assert isinstance(outcome, Failure)
        assert outcome.reason.strip()
        assert isinstance(opened.backend.measure(problem.group, problem.default), Measurement)


@pytest.mark.parametrize("open_backend", BACKENDS)
def test_it_may_be_closed_twice(open_backend: Open, tmp_path_factory: pytest.TempPathFactory) -> None:
    backend = open_backend(tmp_path_factory)
    backend.close()
    backend.close()
