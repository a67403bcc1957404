"""An overlap of forms that no model of ours fits: a power law in the channels, an exponential in the chunk."""

from math import exp
from random import Random

from toy_overlap import Run, measured

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.problem import Assignment, Measurement

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = tuple(2**k for k in range(15, 22))
SPACE = ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=CHUNKS),))
DEFAULT = CommConfig(num_channels=8, chunk_bytes=2**21)


def overlap(num_comms: int, *, comp_s: float = 2e-3, noise: float = 0.0, seed: int = 0) -> Run:
    """x falls with channels and chunk, each collective costs computation in proportion to its channels."""
    rng = Random(seed)

    def run(name: str, assignment: Assignment) -> Measurement:
        comm_s, extra_s = [], 0.0
        for config in assignment:
            channels, chunk = config.num_channels or 8, config.chunk_bytes or 2**21
            comm_s.append(1e-3 * (0.2 + 2 * channels**-0.8 + exp(-chunk / 2**17)) * exp(rng.gauss(0, noise)))
            extra_s += 1e-3 * (0.06 * channels + 0.1 * chunk / 2**21) / num_comms
        return measured((comp_s + extra_s) * exp(rng.gauss(0, noise)), *comm_s)

    return run
