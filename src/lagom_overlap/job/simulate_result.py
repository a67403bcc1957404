"""What `lagom simulate` prints with --json: typed, stable, in SI units."""

from collections.abc import Mapping

import msgspec

from lagom_overlap.cost.operators.passes import CommTimes
from lagom_overlap.report.simulate_model import CarveOutJson, CommunicatorJson, MemoryJson, SimulateJson, StageJson
from lagom_overlap.workload.parallel import GroupKind, StageMemory

__all__ = [
    "CarveOutJson",
    "CommunicatorJson",
    "MemoryJson",
    "SimulateJson",
    "StageJson",
    "communicators_json",
    "memory_json",
]


def communicators_json(comms: Mapping[GroupKind, CommTimes]) -> list[CommunicatorJson]:
    """Per communicator its time, by name."""
    return [
        CommunicatorJson(
            name=group.value, total_s=times.total_s, exposed_s=times.exposed_s, stretched_s=times.stretched_s
        )
        for group, times in sorted(comms.items(), key=lambda item: item[0].value)
    ]


def memory_json(memory: StageMemory) -> MemoryJson:
    """A stage's memory as it is printed."""
    return msgspec.convert(
        {
            "parameter_bytes": memory.parameter_bytes,
            "gradient_bytes": memory.gradient_bytes,
            "optimizer_bytes": memory.optimizer_bytes,
            "activation_bytes": memory.activation_bytes,
            "total_bytes": memory.total_bytes,
        },
        MemoryJson,
    )
