"""Tiny overlaps with closed forms, independent of the package's cost model and simulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.base import Trial, Tuner
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

Run = Callable[[str, Assignment], Outcome]
"""Group name and assignment to outcome."""


def group(name: str, num_comms: int, count: int = 1) -> OverlapGroup:
    comms = tuple(
        CommOp(name=f"c{j}", collective=Collective(CollectiveKind.ALL_GATHER, 2**20, 4)) for j in range(num_comms)
    )
    return OverlapGroup(name=name, computations=(CompOp(name="mm", work=Gemm(8, 8, 8)),), comms=comms, count=count)


def problem(
    space: ConfigSpace,
    *,
    name: str = "g",
    num_comms: int = 1,
    default: CommConfig | None = None,
    count: int = 1,
    baselines: Mapping[str, Assignment] | None = None,
) -> GroupProblem:
    return GroupProblem(
        group=group(name, num_comms, count),
        spaces=(space,) * num_comms,
        default=(CommConfig() if default is None else default,) * num_comms,
        baselines=baselines or {},
    )


def channels_only(*values: int) -> ConfigSpace:
    return ConfigSpace((Subspace(num_channels=values),))


def channels(assignment: Assignment) -> tuple[int | None, ...]:
    return tuple(config.num_channels for config in assignment)


def measured(comp_s: float, *comm_s: float) -> Measurement:
    """Eq. 1 of the paper: Z = max(X, Y)."""
    return Measurement(makespan_s=max(comp_s, sum(comm_s)), comp_s=comp_s, comm_s=comm_s)


@dataclass(frozen=True, slots=True)
class TableOverlap:
    """x_j and the computation's extra time by number of channels, collective by collective: everything adds up."""

    comm_s: tuple[Mapping[int, float], ...]
    extra_s: tuple[Mapping[int, float], ...]
    alone_s: float

    def __call__(self, name: str, assignment: Assignment) -> Measurement:
        # The untouched default (None) is the largest setting.
        places = [config.num_channels or max(self.comm_s[0]) for config in assignment]
        times = [table[place] for table, place in zip(self.comm_s, places, strict=True)]
        extra = sum(table[place] for table, place in zip(self.extra_s, places, strict=True))
        return measured(self.alone_s + extra, *times)


def drive(tuner: Tuner, run: Run, limit: int = 10_000) -> list[Trial]:
    """Runs a tuner to its end; returns the trials."""
    trials: list[Trial] = []
    while (trial := tuner.ask()) is not None:
        trials.append(trial)
        assert len(trials) <= limit, "the search does not end"
        tuner.tell(trial, {name: run(name, assignment) for name, assignment in trial.assignments.items()})
    return trials


def failing(*forbidden: Assignment, otherwise: Run) -> Run:
    def run(name: str, assignment: Assignment) -> Outcome:
        return Failure("cannot run") if assignment in forbidden else otherwise(name, assignment)

    return run
