"""What a model's layers are: each by its kind, a mixer of tokens and an MLP; and the shapes that only some kinds have.

A model's `pattern` names the kinds in order, `mixer+mlp` or one of the two alone (`attention+mlp`, `latent+experts`,
`mamba`), `n*kind` for n in a row, and begins again from its start until all layers have one.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from lagom_overlap.errors import JobError

MAX_LAYERS: Final = 10_000
"""Chosen, far above any model that is known."""
MAX_SIZE: Final = 1 << 30
"""Of heads, columns and tokens: beyond any model's, and small enough for products of three of them."""
MAX_CHUNK: Final = 1 << 12
"""Tokens of a chunk of Mamba-2's scan; its kernels are written for 64 to 256."""
_WORD: Final = re.compile(r"(?:(\d{1,5})\*)?([a-z]+)(?:\+([a-z]+))?")


def check_size(what: str, value: int, *, least: int = 1, most: int = MAX_SIZE) -> None:
    """Refuses a size that no model has.

    Raises:
        JobError: naming it, its value and what is allowed.
    """
    if value < least:
        raise JobError(f"{what} is {value}, must be at least {least}")
    if value > most:
        raise JobError(f"{what} is {value}, must be at most {most}")


class Mixer(StrEnum):
    """The part of a layer in which tokens meet: attention, attention in a window, latent attention, Mamba-2, none."""

    ATTENTION = "attention"
    WINDOW = "window"
    LATENT = "latent"
    MAMBA = "mamba"
    NONE = "none"


class Mlp(StrEnum):
    """The part that treats each token alone: one MLP, a mixture of experts, none."""

    MLP = "mlp"
    EXPERTS = "experts"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's two parts; at least one of them is there."""

    mixer: Mixer
    mlp: Mlp

    def __str__(self) -> str:
        parts = [str(part) for part in (self.mixer, self.mlp) if part != "none"]
        return "+".join(parts)

    @property
    def num_parts(self) -> int:
        """Parts that the layer has, each behind its own norm and added to its input."""
        return (self.mixer is not Mixer.NONE) + (self.mlp is not Mlp.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values from low-rank latents.

    `q_lora_rank` 0: queries have a whole projection. Queries and keys of a head are `qk_nope_head_dim` columns without
    positions and `qk_rope_head_dim` with them, the latter of keys shared by all heads; values are `v_head_dim` wide.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_size(f"model: latent.{name}", getattr(self, name))
        check_size("model: latent.q_lora_rank", self.q_lora_rank, least=0)

    @property
    def qk_head_dim(self) -> int:
        """Columns of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def down_columns(self) -> int:
        """Columns of the projections down: the latents and the keys' shared part with positions."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """A Mamba-2 mixer (arXiv 2405.21060): `num_heads` of `head_dim` columns, a state of `state_dim` per column.

    `num_groups` of heads share B and C; tokens are convolved over `conv` of them; the scan runs in chunks of `chunk`.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv: int = 4
    chunk: int = 128

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_dim", "num_groups", "conv", "chunk"):
            most = MAX_CHUNK if name == "chunk" else MAX_SIZE
            check_size(f"model: mamba.{name}", getattr(self, name), most=most)
        if self.num_heads % self.num_groups:
            raise JobError(f"model: mamba.num_groups is {self.num_groups}, must divide num_heads {self.num_heads}")

    @property
    def inner(self) -> int:
        """Columns that the scan makes: heads times their width."""
        return self.num_heads * self.head_dim

    @property
    def conv_columns(self) -> int:
        """Columns that are convolved: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def in_columns(self) -> int:
        """Columns of the joint projection: the gate, what is convolved, a step size per head."""
        return self.inner + self.conv_columns + self.num_heads


@lru_cache(maxsize=256)
def parse_pattern(pattern: str, where: str) -> tuple[LayerKind, ...]:
    """The kinds that a pattern names, once through.

    Raises:
        JobError: if it names none, or a kind that there is not.
    """
    kinds: list[LayerKind] = []
    for word in pattern.split():
        match = _WORD.fullmatch(word)
        kind = _kind(match[2], match[3]) if match else None
        if match is None or kind is None:
            mixers = ", ".join(part for part in Mixer if part is not Mixer.NONE)
            mlps = ", ".join(part for part in Mlp if part is not Mlp.NONE)
            raise JobError(
                f"{where} has {word[:40]!r}; allowed: a mixer ({mixers}), an MLP ({mlps}), or mixer+MLP, "
                "and n* before it for n in a row"
            )
        count = int(match[1] or 1)
        if not 1 <= count <= MAX_LAYERS - len(kinds):
            raise JobError(f"{where} has {word[:40]!r}: must be 1 to {MAX_LAYERS} layers in all")
        kinds += [kind] * count
    if not kinds:
        raise JobError(f"{where} is {pattern[:40]!r}, must name at least one layer")
    return tuple(kinds)


def _kind(first: str, second: str | None) -> LayerKind | None:
    mixers, mlps = set(Mixer) - {Mixer.NONE}, set(Mlp) - {Mlp.NONE}
    if second is not None:
        return LayerKind(Mixer(first), Mlp(second)) if first in mixers and second in mlps else None
    if first in mixers:
        return LayerKind(Mixer(first), Mlp.NONE)
    return LayerKind(Mixer.NONE, Mlp(first)) if first in mlps else None


@lru_cache(maxsize=256)
def repeated(kinds: tuple[LayerKind, ...], num_layers: int) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, of those that its pattern names, which begin again until all layers have one."""
    return (kinds * (-(-num_layers // len(kinds))))[:num_layers]


def scan_flops(mamba: Mamba) -> float:
    """Forward FLOPs per token of Mamba-2's scan, in chunks (arXiv 2405.21060, section 6).

    Products: C B^T of a chunk's tokens, for each group; it times x, for each head; a chunk's state from B and x; what C
    reads of the state before it.
    """
    scores = 2.0 * mamba.chunk * mamba.num_groups * mamba.state_dim
    within = 2.0 * mamba.chunk * mamba.inner
    states = 2.0 * 2.0 * mamba.inner * mamba.state_dim
    return scores + within + states
