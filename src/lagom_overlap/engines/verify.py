"""Check a collective's answer before it is timed."""

import torch

from lagom_overlap.collective import Collective, ConfigKey
from lagom_overlap.engines.base import Buffers, Engine
from lagom_overlap.engines.buffers import clear, expected, fill


def is_correct(engine: Engine, key: ConfigKey, collective: Collective, rank: int, buffers: Buffers) -> bool:
    """Whether this rank ends with the right numbers under the configuration in force; leaves the buffers zeroed.

    Collective: every rank calls it.
    """
    fill(collective, rank, buffers)
    engine.execute(key, buffers).wait()
    correct = torch.equal(buffers.target, expected(collective, rank))
    clear(buffers)
    return correct
