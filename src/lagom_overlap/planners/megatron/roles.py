"""What a collective is for, as Megatron's code tells them apart."""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, Phase
from lagom_overlap.workload.gathers import parameter_gathers


class MegatronRole(StrEnum):
    """Which of Megatron's mechanisms issues a collective."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    SAVED_INPUT = "saved_input"
    INPUT_GRADIENT = "input_gradient"
    EXPERT = "expert"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of all collectives of an iteration."""

    of: dict[str, MegatronRole]

    @classmethod
    def find(cls, index: StepIndex) -> "Roles":
        """Tells the collectives of an iteration apart."""
        gradients = {op.name for op in index.gradient_comms}
        parameters = {buffer.maker for buffer in parameter_gathers(index.iteration)}
        roles = {}
        for op in index.iteration.comms:
            if op.name in gradients:
                roles[op.name] = MegatronRole.GRADIENT
            elif op.name in parameters:
                roles[op.name] = MegatronRole.PARAMETER
            else:
                roles[op.name] = _role(index, op)
        return cls(roles)

    def names(self, role: MegatronRole) -> list[str]:
        """Collectives of a role, in program order."""
        return [name for name, own_role in self.of.items() if own_role is role]


def _role(index: StepIndex, op: CommOp) -> MegatronRole:
    if op.collective.kind is CollectiveKind.ALL_TO_ALL:
        return MegatronRole.EXPERT
    readers = [index.ops[name].origin.phase for name in index.followers[op.name]]
    if op.collective.kind is CollectiveKind.ALL_GATHER and readers and set(readers) == {Phase.WEIGHT_GRAD}:
        return MegatronRole.SAVED_INPUT
    reduces = op.collective.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
    phases = [index.ops[dep].origin.phase for dep in op.deps]
    if reduces and op.origin.phase is Phase.BACKWARD and phases == [Phase.BACKWARD]:
        return MegatronRole.INPUT_GRADIENT
    return MegatronRole.ACTIVATION
