"""Options of tuners and planners in a job file: every one of them is tried, of the right type and of a wrong one."""

import inspect
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.registry import make_planner
from lagom_overlap.registry import PLANNERS, TUNERS, entry_point_names, load
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.workload import CommOp, CompOp, MemoryBound, OverlapGroup

NOT_OPTIONS = {"seed", "on_progress", "warm"}
VALUES: dict[type, tuple[Any, Any]] = {int: (7, "seven"), float: (0.5, "half"), str: (None, 3), bool: (True, 1)}
"""Of each type a value that is allowed (None: the default, whose words are the option's own) and one that is not."""


def options_of(kind: str) -> list[tuple[str, str, object, object]]:
    """(name, option, allowed value, refused value) of everything registered."""
    found = []
    for name in entry_point_names(kind):
        factory = load(kind, "thing", name)
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        for parameter in inspect.signature(factory).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY or parameter.name in NOT_OPTIONS:
                continue
            (held,) = set(get_args(hints[parameter.name]) or (hints[parameter.name],)) - {NoneType}
            good, bad = VALUES[held]
            found.append((name, parameter.name, parameter.default if good is None else good, bad))
    return found


def problem() -> GroupProblem:
    space = ConfigSpace(
        (
            Subspace(
                algorithm=Algorithm.RING,
                protocol=Protocol.SIMPLE,
                num_channels=(1, 2, 4, 8),
                num_threads=(256, 512),
                chunk_bytes=(1 << 16, 1 << 20),
            ),
        )
    )
    gather = CommOp(name="gather", collective=Collective(CollectiveKind.ALL_GATHER, 1 << 24, 8))
    group = OverlapGroup(name="g", computations=(CompOp(name="c", work=MemoryBound(1 << 30)),), comms=(gather,))
    return GroupProblem(group=group, spaces=(space,), default=(CommConfig(),))


@pytest.mark.parametrize(("name", "option", "good", "bad"), options_of(TUNERS))
def test_every_option_of_every_tuner_is_taken_and_checked(name: str, option: str, good: object, bad: object) -> None:
    def made(value: object) -> object:
        return make_tuner(name, (problem(),), seed=0, options={option: value}, guarded=False)

    good = {"num_threads": 256, "limit": 16}.get(option, good)  # what this space holds
    assert made(good) is not None
    with pytest.raises(JobError, match=f"tune.options.{option} is {bad!r}: tuner '{name}' expects"):
        made(bad)


@pytest.mark.parametrize(("name", "option", "good", "bad"), options_of(PLANNERS))
def test_every_option_of_every_planner_is_taken_and_checked(name: str, option: str, good: object, bad: object) -> None:
    needs: dict[str, object] = {
        "rs_dgrad": {"tensor_overlap": "pipelined"},
        "delay_weight_grad": {"overlap_experts": True},
    }.get(option, {})
    assert make_planner(name, {option: good} | needs) is not None
    with pytest.raises(JobError, match=f"plan.options.{option} is {bad!r}: planner '{name}' expects"):
        make_planner(name, {option: bad})


def test_a_boolean_is_no_number() -> None:
    with pytest.raises(JobError, match="expects int"):
        make_tuner("autoccl", (problem(),), seed=0, options={"num_train": True}, guarded=False)
