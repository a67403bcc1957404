"""Settings of all classes for one order: coordinate descent on the simulated makespan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lagom_overlap.collective import CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.joint.contended import CommClass, Contended, Settings
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import Iteration

CHANNELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS: Final = (128 * KIB, 512 * KIB, 2 * MIB)
LEAST_GAIN: Final = 1e-6
"""A smaller relative gain is none."""

Choices = Mapping[CommClass, Sequence[CommConfig]]
"""What may be chosen for each class; the first is the default."""


def choices_of(contended: Contended) -> Choices:
    """The default of each class, and variants of it by channels and chunk that the model allows."""
    return {kind: _variants(kind, contended.model) for kind in contended.classes()}


def _variants(kind: CommClass, model: ContentionModel) -> tuple[CommConfig, ...]:
    default = model.default_config(kind.collective)
    chunks = dict.fromkeys((default.chunk_bytes, *CHUNKS))
    varied = (replace(default, num_channels=number, chunk_bytes=size) for size in chunks for number in CHANNELS)
    return tuple(dict.fromkeys(config for config in (default, *varied) if _runs(kind, config, model)))


def _runs(kind: CommClass, config: CommConfig, model: ContentionModel) -> bool:
    try:
        model.collective(kind.collective, config)
    except SpaceError:
        return False
    return True


def tuned_settings(
    contended: Contended, iteration: Iteration, choices: Choices, start: Settings, deadline: Deadline
) -> tuple[Settings, float]:
    """The settings that no change of one class improves, and the makespan (s); the best so far at the deadline."""
    settings = dict(start)
    best_s = contended.makespan_s(iteration, settings)
    improved = True
    while improved:
        improved = False
        for kind, configs in choices.items():
            for config in configs:
                if deadline.left_s <= 0:
                    return settings, best_s
                if config == settings.get(kind, configs[0]):
                    continue
                tried_s = contended.makespan_s(iteration, {**settings, kind: config})
                if tried_s < best_s * (1 - LEAST_GAIN):
                    settings[kind], best_s, improved = config, tried_s, True
    return settings, best_s
