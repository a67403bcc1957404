"""Bytes that memory-bound kernels move per element of a 2-byte activation: what is counted.

The counts are data, `data/kernels.toml`, by who wrote the kernels; a framework's file names its own.
"""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any, Final, TypeVar

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.parallel.layout import Dispatcher
from lagom_overlap.workload.step.framework_file import over

_Tables = dict[str, Any]  # any TOML value
_Counts = TypeVar("_Counts")


class Accumulation(StrEnum):
    """How a weight's gradient gets into the buffer where those of all micro-batches meet.

    Nothing that costs; a kernel that adds it in its own format; the product that makes it, whose epilogue reads and
    writes FP32 (Megatron-LM since February 2022).
    """

    FREE = "free"
    ADDED = "added"
    FUSED = "fused"


Kernels = tuple[int, ...]
"""An operator's kernels, each by the bytes that it moves per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What kernels move forward and backward; `gated` per column of a gated activation, `loss` in all, per logit.

    `cut_loss` is `loss` where tensor parallelism cuts the vocabulary. `fuses_latent`: one kernel turns latent
    attention's queries in place and one makes its keys and values; otherwise all are turned and then copied.
    `scaled_rotary` is `rotary` of angles that YaRN scales, where the fused kernel cannot (None: it can): what
    streams, then what cuts rows into halves and joins them. `repeats_keys`: keys and values are repeated for every
    head before attention. `joins_sums` says that a sum of gradients is a part of the kernel that reads it, as
    inductor makes it: of the norm's backward, or of the copy before a reduction along the second axis.
    """

    norm: tuple[Kernels, Kernels]
    rotary: tuple[Kernels, Kernels]
    gated: tuple[Kernels, Kernels]
    loss: tuple[int, int]
    cut_loss: tuple[int, int]
    fuses_latent: bool = True
    scaled_rotary: tuple[tuple[Kernels, Kernels], tuple[Kernels, Kernels]] | None = None
    repeats_keys: bool = False
    joins_sums: bool = False

    def sum_bytes(self, num_addends: int) -> int:
        """Bytes per element of a sum of gradients: a kernel for each two, or one more read for each."""
        return (2 if self.joins_sums else 6) * (num_addends - 1)

    def sum_launches(self, num_addends: int) -> int:
        """Kernels of that sum."""
        return 0 if self.joins_sums else num_addends - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSteps:
    """Context parallelism as a ring of attentions: bytes per query element and further step, forward and backward.

    Keys and values, repeated to all heads, are gathered once per pass; each step's result is merged into an FP32 one,
    of half the rows where only the second half of the queries met the keys; backward adds gradients in FP32 and sends
    those of keys and values to the next rank after every step. With `waits` collectives are waited for where they are
    issued.
    """

    merge_bytes: tuple[int, int]
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Bytes per element of scaling and casting to FP8.

    `operand`: an input in forward or a gradient in backward, with its copy by columns for the weight's gradient;
    `operand_again`: an input that is computed again. `weight`: a matrix in forward, again, and in backward;
    `keeps_weights`: that of a step's first micro-batch serves the others. `by_columns` are those of the copy by columns
    where a kernel of its own makes it, which alone rearranges; 0: each cast writes both. `by_rows`: products can have a
    scale per row (torchao's, under a compiler).
    """

    operand: int
    operand_again: int
    weight: tuple[int, int, int]
    keeps_weights: bool = False
    by_columns: int = 0
    by_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How a framework runs a mixture of experts.

    `apart`: each expert's product and cast is a kernel of its own (Transformer Engine's `GroupedLinear`), not one for
    all (PyTorch's grouped product). `fuses_moves`: kernels of Megatron-LM's dispatchers take tokens to their experts
    (`step/experts.py`), not PyTorch's operators on indices. `router_launches` are the router's kernels after its
    product.
    """

    apart: bool = False
    fuses_moves: bool = False
    router_launches: int = 4

    def counting_launches(self, dispatcher: Dispatcher, num_ranks: int) -> int:
        """Kernels, copies to the host and small collectives that find out how many rows go where.

        All-to-all: four sums and casts of the map, the gather of all ranks' counts, four sums of those, four copies to
        the host, the probabilities' all-to-all. Merged: the map and the probabilities laid out for the kernel, its scan
        of them, the copy to the host. One rank has two of the sums and one copy. A capacity is known beforehand; its
        indices take a sort.
        """
        if not self.fuses_moves:
            return 0
        if num_ranks == 1 and dispatcher is Dispatcher.ALL_TO_ALL:
            return 3
        return {Dispatcher.ALL_TO_ALL: 14, Dispatcher.CAPACITY: 4, Dispatcher.MERGED: 6}[dispatcher]


@cache
def _sets() -> _Tables:
    text = (resources.files(__package__) / "data" / "kernels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def counts(kind: str, given: Any) -> _Tables:  # any TOML value
    """The table of counts that a framework's file gives by its name, or as a table that may extend a named one.

    Raises:
        UnknownNameError: if there is no such name.
    """
    table = {"extends": given} if isinstance(given, str) else dict(given)
    extended = table.pop("extends", None)
    if extended is None:
        return table
    known: _Tables = _sets()[kind]
    if extended not in known:
        raise UnknownNameError.among(f"set of {kind}", extended, sorted(known))
    return over(counts(kind, known[extended]), table)


def load_counts(kind: str, name: str, shape: type[_Counts]) -> _Counts:
    """The named set of counts."""
    return from_table(counts(kind, name), shape, "kernels.toml", f"{kind}.{name}.")


NVFP4_CASTS: Final = load_counts("casts", "nvfp4", Casts)
FUSED_LOSS: Final = ((2, 4), (4,))
"""Transformer Engine's cross entropy (`common/triton/cross_entropy.py`, v2.12), forward and backward: a pass for
maximum and sum, one that writes the gradient over the logits; that times the loss's gradient."""
LOSS_LAUNCHES: Final = (10, 4)
"""Of the cross entropy that is not fused."""
