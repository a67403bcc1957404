"""The predicted iteration of a published job, with the package's own models."""

from lagom_overlap.cost.operators import FrameworkConstants, OperatorConstants, load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.sim.training import TrainingSimulator, TrainingTimes
from lagom_overlap.workload.step import load_rules
from training_steps.case import StepCase


def predicted(
    case: StepCase, operators: OperatorConstants | None = None, framework: FrameworkConstants | None = None
) -> TrainingTimes:
    """The iteration; other constants than the GPU's and the framework's own where given."""
    framework = framework or load_framework(case.framework)
    if case.graphed:
        framework = framework.graphed()
    simulator = TrainingSimulator(
        case.model,
        case.layout,
        seq_len=case.seq_len,
        cluster=case.cluster,
        operators=operators or load_operators(case.cluster.gpu),
        framework=framework,
        profile=load_profile("plausible"),
        rules=load_rules(case.framework),
        precision=case.precision,
    )
    return simulator.times()
