"""Model tier: how many micro-batches are launched together, so that parameters and gradients hide (Centauri, Eq. 2).

    min  max(C_AG - L1 C_fw, 0) + max(C_RS - L2 C_bw, 0)
    s.t. L1 m <= M, L2 m <= M, L1 + L2 <= mb

L1 and L2 count micro-batches of forward and backward; C are the costs of a stage: parameters gathered, gradients
scattered, one micro-batch forward, backward; m is what one forward keeps, M what is left of the memory. With a pipeline
of depth p, L1, L2 >= p (Fig. 7b), multiples of p with interleaving.

L1 + L2 <= mb contradicts the paper's own evaluation (mb = 6 micro-batches, "overlapping micro-batches to 6"): that is
`strict`; relaxed is L1, L2 <= mb. Ties: the least memory, max(L1, L2) m, then the fewest, L1 + L2.
"""

from dataclasses import dataclass

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What Eq. 2 knows: seconds, bytes, counts."""

    gather_s: float
    scatter_s: float
    forward_s: float
    backward_s: float
    activation_bytes: int
    memory_bytes: int
    num_micro_batches: int
    pipeline: int = 1
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "pipeline", "activation_bytes"):
            if getattr(self, name) < 1:
                raise JobError(f"model tier: {name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True)
class GradientLaunch:
    """Micro-batches launched together, and the communication that stays uncovered (s)."""

    forward: int
    backward: int
    exposed_s: float

    def held_bytes(self, costs: ModelCosts) -> int:
        """Activations of the micro-batches that the first stage holds at once: max(L1, L2) m."""
        return max(self.forward, self.backward) * costs.activation_bytes


def depth_first(costs: ModelCosts) -> GradientLaunch:
    """The least memory: as many micro-batches as the pipeline is deep (Fig. 7b)."""
    return GradientLaunch(costs.pipeline, costs.pipeline, exposed_s(costs, costs.pipeline, costs.pipeline))


def breadth_first(costs: ModelCosts) -> GradientLaunch:
    """The most overlap: all micro-batches, whatever they hold (Fig. 7c)."""
    num = costs.num_micro_batches
    return GradientLaunch(num, num, exposed_s(costs, num, num))


def exposed_s(costs: ModelCosts, forward: int, backward: int) -> float:
    """The objective."""
    return max(costs.gather_s - forward * costs.forward_s, 0.0) + max(
        costs.scatter_s - backward * costs.backward_s, 0.0
    )


def launch(costs: ModelCosts, *, strict: bool = False) -> GradientLaunch:
    """The best numbers, by enumeration.

    Raises:
        JobError: if the memory does not hold the least number of micro-batches; says by how much.
    """
    least = costs.pipeline if costs.pipeline > 1 else 1
    step = costs.pipeline if costs.interleaved else 1
    fitting = costs.memory_bytes // costs.activation_bytes
    most = min(costs.num_micro_batches, fitting)
    if fitting < least:
        needed = least * costs.activation_bytes
        raise JobError(
            f"model tier: {least} micro-batches need {needed} bytes, memory has {costs.memory_bytes}: "
            f"{needed - costs.memory_bytes} bytes too many"
        )
    numbers = range(least, most + 1, step)
    slides = [
        GradientLaunch(forward, backward, exposed_s(costs, forward, backward))
        for forward in numbers
        for backward in numbers
        if not strict or forward + backward <= costs.num_micro_batches
    ]
    if not slides:
        raise JobError(
            f"model tier: forward and backward need {2 * least} micro-batches together, there are "
            f"{costs.num_micro_batches}: strict asks for L1 + L2 <= micro-batches"
        )
    return min(slides, key=lambda f: (f.exposed_s, max(f.forward, f.backward), f.forward + f.backward))
