"""Named models: one TOML file each under `data`, with the source of its numbers."""

import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.record import read_regular
from lagom_overlap.toml_tables import from_table, parse_toml
from lagom_overlap.workload.layer_kinds import (
    MAX_LAYERS,
    LatentAttention,
    LayerKind,
    Mamba,
    Mixer,
    Mlp,
    check_size,
    parse_pattern,
    repeated,
)

MAX_MODEL_BYTES: Final = 1 << 20
"""Chosen: a model's file has some lines."""
MAX_MTP_LAYERS: Final = 16
"""Chosen: DeepSeek-V3 has one."""
MAX_PARTS: Final = 2
"""Parts of a layer: a mixer and an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Parameters of a layer: matrices that tensor parallelism cuts, those that it leaves whole, experts, what is small.

    `active` are those of the matrices that a token visits, `expert_small` the experts' biases, `small` the others and
    norms.
    """

    cut: int
    whole: int
    experts: int
    active: int
    expert_small: int
    small: int

    @property
    def matrices(self) -> int:
        """Of all matrices."""
        return self.cut + self.whole + self.experts

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.expert_small + self.small


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel:
    """A decoder-only transformer by its shapes.

    `pattern` says of what kind each layer is (`layer_kinds`; "": all of attention and an MLP or a mixture). `gated` is
    an MLP of three matrices (SwiGLU) instead of two. `norms_per_layer` is 1 where attention and MLP stand
    side by side behind one norm. `linear_bias` to `tied_embeddings`, and `sinks`, a learned logit per head, only
    decide the count of parameters.

    A mixture of experts has `num_experts` MLPs of width `ffn` per layer, of which every token visits
    `experts_per_token`, and a dense one of width `shared_ffn` that every token visits; where its experts read and make
    rows of `expert_hidden` columns, two matrices around them lead there and back (0: the hidden size). Its layers
    without experts have MLPs of width `dense_ffn` (0: `ffn`). `window` is how many keys attention in a window sees.
    `mtp_layers` predict one further token each, as Megatron-Core builds them: a projection of hidden state and next
    token's embedding, the layers of `mtp_pattern` ("": one of the last kind), a norm, the head again; with
    `mtp_repeats` all of them are one and the same. Without `rotary` attention turns nothing by its position;
    `scaled_rotary`: what it turns by is scaled (YaRN's attention factor is not 1). `dropout` says whether it is trained
    with dropout, `learned_positions` is the length of a learned position table (0: rotary or ALiBi). `clamped`: gate
    and up are cut to a range before they meet (gpt-oss).
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    norms_per_layer: int = 2
    linear_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    dropout: bool = False
    learned_positions: int = 0
    pattern: str = ""
    dense_ffn: int = 0
    expert_hidden: int = 0
    latent: LatentAttention | None = None
    window: int = 0
    sinks: bool = False
    clamped: bool = False
    mamba: Mamba | None = None
    rotary: bool = True
    scaled_rotary: bool = False
    mtp_layers: int = 0
    mtp_pattern: str = ""
    mtp_repeats: bool = False

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            check_size(f"model {self.name!r}: {field}", getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise JobError(
                f"model {self.name!r}: num_kv_heads is {self.num_kv_heads}, must divide num_heads {self.num_heads}"
            )
        for field in (
            "num_experts", "experts_per_token", "shared_ffn", "learned_positions", "dense_ffn", "expert_hidden",
            "window", "mtp_layers",
        ):  # fmt: skip
            check_size(f"model {self.name!r}: {field}", getattr(self, field), least=0)
        if not (self.num_experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.num_experts):
            raise JobError(
                f"model {self.name!r}: experts_per_token is {self.experts_per_token}, "
                f"must be 1 to num_experts = {self.num_experts}, or both 0"
            )
        if self.norms_per_layer not in (1, 2):
            raise JobError(f"model {self.name!r}: norms_per_layer is {self.norms_per_layer}, must be 1 or 2")
        if self.num_layers > MAX_LAYERS:
            raise JobError(f"model {self.name!r}: num_layers is {self.num_layers}, must be at most {MAX_LAYERS}")
        if self.mtp_layers > MAX_MTP_LAYERS:
            raise JobError(f"model {self.name!r}: mtp_layers is {self.mtp_layers}, must be at most {MAX_MTP_LAYERS}")
        self._check_kinds()

    def _check_kinds(self) -> None:
        kinds = {*self.named_kinds, *(self.mtp_kinds if self.mtp_layers else ())}
        parts = {kind.mixer for kind in kinds} | {kind.mlp for kind in kinds}
        needed = {"num_experts": Mlp.EXPERTS, "latent": Mixer.LATENT, "window": Mixer.WINDOW, "mamba": Mixer.MAMBA}
        for field, kind in needed.items():
            given, used = getattr(self, field), kind in parts
            if used and not given:
                raise JobError(f"model {self.name!r}: pattern has layers of kind {kind}, which need {field}")
            if given and not used:
                raise JobError(f"model {self.name!r}: {field} is given, but pattern has no layer of kind {kind}")
        if self.scaled_rotary and not self.rotary:
            raise JobError(f"model {self.name!r}: scaled_rotary is true, must be false where rotary is")
        if self.norms_per_layer == 1 and (self.pattern or self.mtp_layers):
            raise JobError(f"model {self.name!r}: norms_per_layer is 1, must be 2 with pattern or mtp_layers")
        for field in ("mtp_pattern", "mtp_repeats"):
            if getattr(self, field) and not self.mtp_layers:
                raise JobError(f"model {self.name!r}: {field} needs mtp_layers of at least 1")
        if self.latent is not None and (self.latent.qk_head_dim + self.latent.v_head_dim) % 2:
            widths = f"{self.latent.qk_head_dim} and {self.latent.v_head_dim}"
            raise JobError(f"model {self.name!r}: latent: heads of {widths} columns, must be an even number together")

    @property
    def named_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that the pattern names, once through."""
        pattern = self.pattern or ("attention+experts" if self.num_experts else "attention+mlp")
        return parse_pattern(pattern, f"model {self.name!r}: pattern")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return repeated(self.named_kinds, self.num_layers)

    @property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of one multi-token prediction's layers."""
        if self.mtp_pattern:
            return parse_pattern(self.mtp_pattern, f"model {self.name!r}: mtp_pattern")
        return self.layer_kinds[-1:]

    def with_mtp(self, num: int) -> "TransformerModel":
        """The same with as many multi-token predictions."""
        pattern, repeats = (self.mtp_pattern, self.mtp_repeats) if num else ("", False)
        return replace(self, mtp_layers=num, mtp_pattern=pattern, mtp_repeats=repeats)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer; those of multi-token prediction are counted on behind the others."""
        if layer < self.num_layers:
            return self.layer_kinds[layer]
        return self.mtp_kinds[(layer - self.num_layers) % len(self.mtp_kinds)]

    def _only(self) -> LayerParams:
        """Of the layers of a model in which all are of one kind."""
        kinds = set(self.layer_kinds)
        if len(kinds) > 1:
            raise JobError(f"model {self.name!r} has layers of {len(kinds)} kinds: this needs layers of one kind")
        return self.params_of(self.layer_kinds[0])

    @property
    def qkv_columns(self) -> int:
        """Columns of the joint query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_columns(self) -> int:
        """Columns that attention returns: heads times their width."""
        return self.num_heads * self.head_dim

    @property
    def up_columns(self) -> int:
        """Columns of the MLP's first product: the gate's next to the up projection's where gated."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def dense_width(self) -> int:
        """Width of an MLP that stands alone, in a layer without experts."""
        return self.dense_ffn or self.ffn

    @property
    def expert_width(self) -> int:
        """Columns of the rows that experts read and make."""
        return self.expert_hidden or self.hidden

    @property
    def layer_matrix_params(self) -> int:
        """Parameters of one layer's matrices: 12 h^2 for a plain layer with ffn 4h; all experts count."""
        return self._only().matrices

    @property
    def expert_layer_params(self) -> int:
        """Parameters of one layer's experts, the router left out."""
        return self._only().experts

    @property
    def active_layer_params(self) -> int:
        """Parameters of one layer's matrices that a token visits."""
        return self._only().active

    @property
    def layer_params(self) -> int:
        """Parameters of one layer: matrices, biases, norms."""
        return self._only().total

    def params_of(self, kind: LayerKind) -> LayerParams:
        """Parameters of a layer of that kind."""
        cut, whole, small = self._mixer_params(kind.mixer)
        more, inner, biases = self._mlp_params(kind.mlp)
        one = self.expert_width * (self.up_columns + self.ffn)
        norms = self.norms_per_layer if kind.num_parts == MAX_PARTS else 1
        is_mixture, dense = kind.mlp is Mlp.EXPERTS, cut + more + whole + inner
        expert_biases = (self.up_columns + self.expert_width) * self.linear_bias
        return LayerParams(
            cut=cut + more,
            whole=whole + inner,
            experts=self.num_experts * one if is_mixture else 0,
            active=dense + (self.experts_per_token * one if is_mixture else 0),
            expert_small=self.num_experts * expert_biases if is_mixture else 0,
            small=small + biases + norms * self.norm_params,
        )

    def _mixer_params(self, mixer: Mixer) -> tuple[int, int, int]:
        """Cut by tensor parallelism, left whole, small."""
        h, heads = self.hidden, self.num_heads
        if mixer is Mixer.LATENT:
            assert self.latent is not None
            a, rank = self.latent, self.latent.q_lora_rank
            up = (rank or h) * heads * a.qk_head_dim + a.kv_lora_rank * heads * (a.qk_nope_head_dim + a.v_head_dim)
            return up + heads * a.v_head_dim * h, h * a.down_columns, rank + a.kv_lora_rank
        if mixer is Mixer.MAMBA:
            assert self.mamba is not None
            m = self.mamba
            small = m.conv_columns * (m.conv + 1) + 3 * m.num_heads + m.inner  # taps and bias; A, D, step; gated norm
            return h * (m.in_columns + m.inner), 0, small
        if mixer is Mixer.NONE:
            return 0, 0, 0
        biases = (self.qkv_columns + h) * self.linear_bias
        return h * (self.qkv_columns + self.attention_columns), 0, biases + self.num_heads * self.sinks

    def _mlp_params(self, mlp: Mlp) -> tuple[int, int, int]:
        """The same of an MLP, or of what every token visits around experts."""
        h, factor = self.hidden, 3 if self.gated else 2
        if mlp is Mlp.NONE:
            return 0, 0, 0
        if mlp is Mlp.MLP:
            width = self.dense_width
            biases = (width * (factor - 1) + h) * self.linear_bias
            return h * width * factor, 0, biases
        projections = 2 * h * self.expert_hidden
        return h * (self.shared_ffn * factor + self.num_experts), projections, self.num_experts * self.linear_bias

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding and of the learned positions; rotary and ALiBi have none."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters that the last product and the norm before it need: a tied matrix counts here too."""
        return self.vocab * self.hidden + self.vocab * self.head_bias + self.norm_params

    @property
    def num_params(self) -> int:
        """Parameters in all, a tied matrix once; multi-token prediction is not among them."""
        shared = self.vocab * self.hidden if self.tied_embeddings else 0
        layers = sum(self.params_of(kind).total * count for kind, count in self.kind_counts.items())
        return layers + self.embedding_params + self.head_params - shared

    @property
    def num_active_params(self) -> int:
        """Parameters of the matrices that a token visits, the embedding's and the head's among them."""
        layers = sum(self.params_of(kind).active * count for kind, count in self.kind_counts.items())
        return layers + (1 if self.tied_embeddings else 2) * self.vocab * self.hidden

    @property
    def kind_counts(self) -> Counter[LayerKind]:
        """How many layers there are of each kind."""
        return Counter(self.layer_kinds)

    @property
    def num_mtp_held(self) -> int:
        """Predictions with parameters of their own."""
        return min(1, self.mtp_layers) if self.mtp_repeats else self.mtp_layers

    @property
    def mtp_params(self) -> int:
        """Parameters of one multi-token prediction: its projection, norms and layers."""
        layers = sum(self.params_of(kind).total for kind in self.mtp_kinds)
        return 2 * self.hidden * self.hidden + 3 * self.norm_params + layers

    @property
    def norm_params(self) -> int:
        """Parameters of a norm of the hidden size."""
        return self.hidden * (2 if self.norm_bias else 1)


def model_names() -> list[str]:
    """The names that `load_model` knows, sorted."""
    folder = resources.files(__package__) / "data"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_model(name: str) -> TransformerModel:
    """The model of that name, or of that file where the name ends in `.toml`.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if the file cannot be read or describes no model.
    """
    if name.endswith(".toml"):
        return _model_of_file(Path(name))
    if name not in model_names():
        raise UnknownNameError.among("model", name, model_names())
    text = (resources.files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), TransformerModel)


def _model_of_file(path: Path) -> TransformerModel:
    try:
        table = parse_toml(read_regular(path, MAX_MODEL_BYTES))
    except OSError as error:
        raise JobError(f"model file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, no UTF-8, tables in tables
        raise JobError(f"model file {str(path)!r} is no model: {error}") from None
    return from_table(table, TransformerModel, f"model file {str(path)!r}")
