"""The journal comes back exactly, and says which line is damaged."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_overlap import channels_only, problem

from lagom_overlap.collective import Algorithm, CommConfig, Protocol, Transport
from lagom_overlap.errors import BundleError
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entries_from_json, entry_to_json
from lagom_overlap.tuners.problem import Failure, Measurement, Outcome

PROBLEMS = (
    problem(channels_only(1, 2), name="block/0", num_comms=2),
    problem(channels_only(1, 2), name='blöck "1"', num_comms=1),
)

times = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
sizes = st.none() | st.integers(1, 2**40)
configs = st.builds(
    CommConfig,
    algorithm=st.none() | st.sampled_from(Algorithm),
    protocol=st.none() | st.sampled_from(Protocol),
    transport=st.none() | st.sampled_from(Transport),
    num_channels=sizes,
    num_threads=sizes,
    chunk_bytes=sizes,
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    assignments, outcomes, reasons, priorities = {}, {}, {}, {}
    for one in draw(st.lists(st.sampled_from(PROBLEMS), min_size=1, unique_by=id)):
        name, num_comms = one.group.name, len(one.group.comms)
        assignments[name] = tuple(draw(configs) for _ in range(num_comms))
        outcome: Outcome = Failure(draw(st.text()))
        if draw(st.booleans()):
            outcome = Measurement(
                makespan_s=draw(times),
                comp_s=draw(times),
                comm_s=tuple(draw(times) for _ in range(num_comms)),
                num_repeats=draw(st.integers(1, 99)),
                makespan_iqr_s=draw(times),
            )
        outcomes[name] = outcome
        if draw(st.booleans()):
            reasons[name] = draw(st.text())
            priorities[name] = {"c0": draw(times)}
    step = Step(
        number=draw(st.integers(0, 10**6)),
        kind=draw(st.sampled_from(StepKind)),
        assignments=assignments,
        arm=draw(st.none() | st.text()),
        round=draw(st.none() | st.integers(0, 100)),
        reasons=reasons,
        priorities=priorities,
    )
    return Entry(step=step, outcomes=outcomes)


@settings(deadline=None)
@given(st.lists(entries(), max_size=3))
def test_what_is_written_comes_back_exactly(written: list[Entry]) -> None:
    lines = [entry_to_json(entry, PROBLEMS) for entry in written]
    assert not any("\n" in line for line in lines)
    assert entries_from_json(lines, PROBLEMS) == tuple(written)


def good() -> Entry:
    config = CommConfig(num_channels=2)
    return Entry(
        step=Step(number=0, kind=StepKind.SEARCH, assignments={"block/0": (config, CommConfig())}),
        outcomes={"block/0": Measurement(makespan_s=2, comp_s=1, comm_s=(1.5, 0.5), timeline=Timeline(()))},
    )


def test_collectives_and_knobs_stand_by_name_and_missing_knobs_as_null() -> None:
    row = json.loads(entry_to_json(good(), PROBLEMS))
    assert row["groups"]["block/0"]["configs"] == {
        "c0": {
            "algorithm": None,
            "protocol": None,
            "transport": None,
            "num_channels": 2,
            "num_threads": None,
            "chunk_bytes": None,
        },
        "c1": dict.fromkeys(("algorithm", "protocol", "transport", "num_channels", "num_threads", "chunk_bytes"), None),
    }
    assert row["groups"]["block/0"]["measured"]["comm_s"] == {"c0": 1.5, "c1": 0.5}


def test_a_timeline_is_not_kept() -> None:
    (back,) = entries_from_json([entry_to_json(good(), PROBLEMS)], PROBLEMS)
    outcome = back.outcomes["block/0"]
    assert isinstance(outcome, Measurement)
    assert outcome.timeline is None


def edited(*path: str, value: object = None, drop: bool = False) -> str:
    row = json.loads(entry_to_json(good(), PROBLEMS))
    place = row
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(row)


GROUP = ("groups", "block/0")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        entry_to_json(good(), PROBLEMS)[:-9],
        edited("number", value="0"),
        edited("kind", value="guess"),
        edited("surprise", value=1),
        edited("arm", drop=True),
        edited("groups", "nobody", value=json.loads(entry_to_json(good(), PROBLEMS))["groups"]["block/0"]),
        edited(*GROUP, "configs", "c1", drop=True),
        edited(*GROUP, "configs", "c0", "num_channels", value=0),
        edited(*GROUP, "configs", "c0", "num_channels", value="2"),
        edited(*GROUP, "configs", "c0", "num_channels", value=True),
        edited(*GROUP, "configs", "c0", "algorithm", value="circle"),
        edited(*GROUP, "configs", "c0", "chunk_bytes", drop=True),
        edited(*GROUP, "measured", value=None),
        edited(*GROUP, "failure", value=1),
        edited(*GROUP, "measured", "makespan_s", value=-1),
        edited(*GROUP, "measured", "makespan_s", value="1"),
        edited(*GROUP, "measured", "num_repeats", value=0),
        edited(*GROUP, "measured", "comm_s", value={"c0": 1}),
        edited(*GROUP, "measured", "comm_s", value=[1, 2]),
        edited(*GROUP, "priorities", value={"c0": None}),
    ],
)
def test_a_damaged_line_is_named(line: str) -> None:
    with pytest.raises(BundleError, match=r"^line 2 of the measurements is damaged: "):
        entries_from_json([entry_to_json(good(), PROBLEMS), line], PROBLEMS)


def test_lines_are_counted_as_in_their_file() -> None:
    with pytest.raises(BundleError, match="line 5 of the measurements"):
        entries_from_json([entry_to_json(good(), PROBLEMS), "{"], PROBLEMS, first_line=4)
