"""Who runs the plan of a step: asked for, or the job's own framework; nothing else is planned for it."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.carriers import NO_GRAPH, SETTINGS_PLANNERS, STEPS_OF, Carrier, settings_carrier
from lagom_overlap.planners.framework_waits import FSDP2
from lagom_overlap.verbs.plan_problem import OURS, PlanInput

_PLANNER_OF: Final = {planner: carrier for carrier, planner in SETTINGS_PLANNERS.items()}


@dataclass(frozen=True, slots=True)
class Carried:
    """A planner, and who runs its plans; None: nobody does, the plan shows what another order could give."""

    carrier: Carrier | None
    planner: str


def carried(given: PlanInput, *, carrier: Carrier | None, planner: str | None) -> Carried:
    """The carrier and the planner that are asked for, by the command line, then by the job; else the job's framework's.

    Raises:
        JobError: if the carrier cannot run this step, or not what the planner makes.
    """
    carrier, planner = carrier or given.carrier, planner or given.planner
    if carrier is None:
        carrier = _PLANNER_OF.get(planner) if planner else _own(given)
        carrier = Carrier.PROGRAM if carrier is None and given.is_program else carrier
    planner = planner or (OURS if carrier is None else SETTINGS_PLANNERS.get(carrier, OURS))
    if carrier is not None:
        _check(given, carrier, planner)
    return Carried(carrier, planner)


def _own(given: PlanInput) -> Carrier | None:
    """The carrier that is the step's own framework."""
    if given.is_program:
        return Carrier.PROGRAM
    return settings_carrier(given.problem.framework)


def _check(given: PlanInput, carrier: Carrier, planner: str) -> None:
    wanted = SETTINGS_PLANNERS.get(carrier)
    if wanted is not None and planner != wanted:
        raise JobError(f"{carrier} takes settings, which planner {wanted!r} chooses; {planner!r} rewrites a graph")
    if wanted is None and planner in _PLANNER_OF:
        raise JobError(f"planner {planner!r} chooses settings of {_PLANNER_OF[planner]}, which {carrier} does not take")
    whose = given.problem.framework
    if carrier in STEPS_OF and whose not in STEPS_OF[carrier]:
        issued = "no framework issues this step" if whose is None else f"this step is issued by {whose}"
        raise JobError(f"for {carrier}: {issued}, and {carrier} runs steps of {' or '.join(STEPS_OF[carrier])} only")
    if carrier is Carrier.INDUCTOR and whose == FSDP2:
        raise JobError(f"for inductor: {NO_GRAPH}. --for fsdp2 chooses FSDP2's settings")
    if carrier in (Carrier.INDUCTOR, Carrier.PROGRAM) and not given.is_program:
        raise JobError(f"for {carrier}: a graph is needed that runs, which is that of a [program]; this job has none")


def nobody(given: PlanInput) -> str:
    """What is said of a plan that nobody runs."""
    own = _own(given)
    settings = f" {given.problem.framework} takes settings: --for {own}." if own is not None else ""
    return f"No framework issues this order: the plan shows what another order could give.{settings}"
