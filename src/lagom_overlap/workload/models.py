"""Named models: one TOML file each under `data`, with the source of its numbers."""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.errors import JobError, UnknownNameError

MAX_MODEL_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel:
    """A decoder-only transformer by its shapes.

    `gated` is an MLP of three matrices (SwiGLU) instead of two. `norms_per_layer` is 1 where attention and MLP stand
    side by side behind one norm. `linear_bias` to `tied_embeddings` only decide the count of parameters.

    A mixture of experts has `num_experts` MLPs of width `ffn` per layer, of which every token visits
    `experts_per_token`, and a dense one of width `shared_ffn` that every token visits. `dropout` says whether it is
    trained with dropout, `learned_positions` is the length of a learned position table (0: rotary or ALiBi).
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

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            value = getattr(self, field)
            if value < 1:
                raise JobError(f"model {self.name!r}: {field} is {value}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise JobError(
                f"model {self.name!r}: num_kv_heads is {self.num_kv_heads}, must divide num_heads {self.num_heads}"
            )
        for field in ("num_experts", "experts_per_token", "shared_ffn", "learned_positions"):
            value = getattr(self, field)
            if value < 0:
                raise JobError(f"model {self.name!r}: {field} is {value}, must be at least 0")
        if not (self.num_experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.num_experts):
            raise JobError(
                f"model {self.name!r}: experts_per_token is {self.experts_per_token}, "
                f"must be 1 to num_experts = {self.num_experts}, or both 0"
            )
        if self.norms_per_layer not in (1, 2):
            raise JobError(f"model {self.name!r}: norms_per_layer is {self.norms_per_layer}, must be 1 or 2")

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
    def layer_matrix_params(self) -> int:
        """Parameters of one layer's matrices: 12 h^2 for a plain layer with ffn 4h; all experts count."""
        attention = self.hidden * (self.qkv_columns + self.attention_columns)
        return attention + self.expert_layer_params + self.dense_mlp_params

    @property
    def expert_layer_params(self) -> int:
        """Parameters of one layer's experts, the router left out."""
        return self.num_experts * self.hidden * (self.up_columns + self.ffn)

    @property
    def dense_mlp_params(self) -> int:
        """Parameters of one layer's MLP that every token visits, with the router of a mixture of experts."""
        if not self.num_experts:
            return self.hidden * (self.up_columns + self.ffn)
        return self.hidden * (self.shared_ffn * (3 if self.gated else 2) + self.num_experts)

    @property
    def active_layer_params(self) -> int:
        """Parameters of one layer's matrices that a token visits."""
        visited = self.experts_per_token * self.hidden * (self.up_columns + self.ffn)
        return self.layer_matrix_params - self.expert_layer_params + visited

    @property
    def layer_params(self) -> int:
        """Parameters of one layer: matrices, biases, norms."""
        biases = self.qkv_columns + self.hidden + self.up_columns + self.hidden
        return self.layer_matrix_params + biases * self.linear_bias + self.norms_per_layer * self._norm_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding and of the learned positions; rotary and ALiBi have none."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters that the last product and the norm before it need: a tied matrix counts here too."""
        return self.vocab * self.hidden + self.vocab * self.head_bias + self._norm_params

    @property
    def num_params(self) -> int:
        """Parameters in all, a tied matrix once."""
        shared = self.vocab * self.hidden if self.tied_embeddings else 0
        return self.num_layers * self.layer_params + self.embedding_params + self.head_params - shared

    @property
    def _norm_params(self) -> int:
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
        if path.stat().st_size > MAX_MODEL_BYTES:
            raise JobError(f"model file {str(path)!r} has more than {MAX_MODEL_BYTES} bytes, the most that is allowed")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        unknown = sorted(set(table) - set(TransformerModel.__slots__))
        if unknown:
            allowed = ", ".join(TransformerModel.__slots__)
            raise JobError(f"model file {str(path)!r}: unknown key {unknown[0]!r}; allowed: {allowed}")
        return msgspec.convert(table, TransformerModel)
    except OSError as error:
        raise JobError(f"model file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, no UTF-8, or not a model's fields
        raise JobError(f"model file {str(path)!r} is no model: {error}") from None
