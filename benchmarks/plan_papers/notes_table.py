"""Whether a published breakdown of overlap can be true: communication hides behind computation, or it does not.

With one stream of communication a step takes at least the longer of computation and all communication; with streams
that run at the same time (NVLink inside nodes, the network between them) at least the longest of computation and each
stream. What is hidden is at most the computation.

`LLAMA_70B` is the table of the notes "Communication Overlap in Megatron-LM" (64 GPUs, tensor 4, pipeline 4, data 4):
its sums and shares are right, and no machine could show it: it hides 11.47 s behind 8 s.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One kind of communication: seconds without overlap and what of it stays visible with it; the links it uses."""

    alone_s: float
    exposed_s: float
    link: str

    @property
    def hidden_share(self) -> float:
        """What is hidden."""
        return 1.0 - self.exposed_s / self.alone_s


@dataclass(frozen=True, slots=True)
class OverlapTable:
    """A breakdown of one step."""

    computation_s: float
    rows: Mapping[str, OverlapRow]

    @property
    def serial_s(self) -> float:
        """The step without overlap."""
        return self.computation_s + sum(row.alone_s for row in self.rows.values())

    @property
    def stated_s(self) -> float:
        """The step that the table states: computation and what stays visible."""
        return self.computation_s + sum(row.exposed_s for row in self.rows.values())

    def least_s(self, *, links_run_together: bool) -> float:
        """The shortest step that is possible, on one stream of communication or one per link."""
        by_link: dict[str, float] = {}
        for row in self.rows.values():
            link = row.link if links_run_together else ""
            by_link[link] = by_link.get(link, 0.0) + row.alone_s
        return max(self.computation_s, *by_link.values())


LLAMA_70B = OverlapTable(
    8.0,
    {
        "tensor": OverlapRow(2.8, 0.8, "nvlink"),
        "gradients": OverlapRow(11.2, 1.8, "network"),
        "pipeline": OverlapRow(0.08, 0.01, "network"),
    },
)
