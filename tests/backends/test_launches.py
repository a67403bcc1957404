"""The computation's side through the simulator, a recording of it, and the backends that cannot set it."""

import json
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.recorded import open_backend as open_recorded
from lagom_overlap.backends.simulated import open_backend
from lagom_overlap.collective import (
    Collective,
    CollectiveKind,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    LaunchSpace,
    SpaceLimits,
    StreamPriority,
    launch_of,
    launched,
)
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import LagomError, SpaceError
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.bundle import header_line, parse_header
from lagom_overlap.tuners.problem import Failure, GroupProblem, Measurement
from lagom_overlap.tuners.rows import GroupRow, assignment_of, group_row, outcome_of
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

SPACE = LaunchSpace(
    sm_carveouts=(0, 8, 16), orders=(LaunchOrder.COMPUTATION_FIRST,), priorities=(StreamPriority.NORMAL,)
)
GROUP = OverlapGroup(
    name="ffn",
    computations=(CompOp(name="up", work=Gemm(4096, 28672, 4096)), CompOp(name="down", work=Gemm(4096, 4096, 14336))),
    comms=(CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 200 * MIB, 8)),),
)
CARVED = LaunchConfig(sm_carveout=16)


def request(launches: LaunchSpace | None = SPACE, sm_carveout: int | None = 0, bundle: Path | None = None):
    return BackendRequest(
        job_fingerprint="f",
        cluster=load_preset("h100_dgx"),
        sm_carveout=sm_carveout,
        limits=SpaceLimits(num_channels=(4, 16), launches=launches),
        bundle=bundle,
    )


def sixteen(problem: GroupProblem) -> tuple[CommConfig, ...]:
    return (next(config for config in problem.spaces[0] if config.num_channels == 16),)


def test_the_simulator_offers_what_the_job_allows_and_prices_it() -> None:
    backend = open_backend(request())
    problem = backend.problem(GROUP)
    assert problem.launches == SPACE
    assert launch_of(problem.default).is_untouched
    plain = sixteen(problem)
    straggling, carved = (backend.measure(GROUP, launched(plain, launch)) for launch in (LaunchConfig(), CARVED))
    assert isinstance(straggling, Measurement)
    assert isinstance(carved, Measurement)
    model = ContentionModel(load_preset("h100_dgx"), load_profile("plausible"), 16)
    assert carved.makespan_s == GroupSimulator(GROUP, model).evaluate(plain).makespan_s
    assert carved.makespan_s != straggling.makespan_s
    assert carved.timeline is not None
    assert max(span.end_s for span in carved.timeline.spans) == pytest.approx(carved.makespan_s)


def test_without_values_to_try_the_computation_is_left_alone() -> None:
    assert open_backend(request(launches=None)).problem(GROUP).launches.is_untouched


def test_a_carve_out_of_plain_products_or_beyond_the_sms_is_refused_by_its_key() -> None:
    with pytest.raises(SpaceError, match=r"tune\.space\.sm_carveout: .*cost\.sm_carveout = 0"):
        open_backend(request(sm_carveout=None))
    with pytest.raises(SpaceError, match=r"tune\.space\.sm_carveout holds 132, must lie in 0\.\.131"):
        open_backend(request(launches=LaunchSpace(sm_carveouts=(8, 132))))
    open_backend(request(launches=LaunchSpace(priorities=(StreamPriority.NORMAL,)), sm_carveout=None))


@pytest.mark.parametrize("launch", [LaunchConfig(), CARVED, *list(SPACE)[-3:]], ids=str)
def test_a_row_gives_both_sides_back(launch: LaunchConfig) -> None:
    problem = open_backend(request()).problem(GROUP)
    mine = launched(sixteen(problem), launch)
    outcome = Measurement(makespan_s=1.0, comp_s=1.0, comm_s=(0.5,))
    text = msgspec.json.encode(group_row(problem, mine, outcome))
    row = msgspec.json.decode(text, type=GroupRow)
    assert assignment_of(row, problem) == mine
    assert outcome_of(row, problem) == outcome
    assert ("launch" in json.loads(text)) is not launch.is_untouched  # old readers see old rows


def test_a_recording_replays_each_launch_apart_and_offers_what_was_recorded(tmp_path: Path) -> None:
    backend = open_backend(request())
    problem = backend.problem(GROUP)
    arms = [launched(sixteen(problem), launch) for launch in (LaunchConfig(), CARVED)]
    times = [backend.measure(GROUP, arm) for arm in arms]
    header = header_line("f", "simulated", (problem,), limits=request().limits)
    assert parse_header(header, "it").groups["ffn"].launches == SPACE
    rows = [
        json.dumps({"groups": {"ffn": json.loads(msgspec.json.encode(group_row(problem, arm, time)))}})
        for arm, time in zip(arms, times, strict=True)
    ]
    path = tmp_path / "measurements.jsonl"
    path.write_text("\n".join([header, *rows]) + "\n")
    again = open_recorded(request(bundle=path))
    assert again.problem(GROUP).launches == SPACE
    for arm, time in zip(arms, times, strict=True):
        found = again.measure(GROUP, arm)
        assert isinstance(found, Measurement)
        assert isinstance(time, Measurement)
        assert found.makespan_s == time.makespan_s
    assert isinstance(again.measure(GROUP, launched(arms[0], LaunchConfig(sm_carveout=8))), Failure)
    fewer = LaunchSpace(sm_carveouts=(16,))
    assert open_recorded(request(fewer, bundle=path)).problem(GROUP).launches == fewer
    assert open_recorded(request(None, bundle=path)).problem(GROUP).launches.is_untouched
    with pytest.raises(LagomError, match=r"tune\.space\.sm_carveout holds 4, but the recording holds \[0, 8, 16\]"):
        open_recorded(request(LaunchSpace(sm_carveouts=(4,)), bundle=path)).problem(GROUP)
