"""Models of Megatron-LM's own tables, which name sizes: its continuous integration, and its README.

`tests/functional_tests/test_cases` (NVIDIA/Megatron-LM @d98e8a64): a test's name, then `L32 H4096`, and in the note its
arguments without dashes; what is not there is the default of `megatron/training/arguments.py`: MLPs of four times the
hidden size, biases, layer norms with biases, dropout of 0.1, learned positions. Its vocabulary is the mock tokenizer's
131,073, padded.
README.md @d98e8a64, `images/model_table.png`: GPT of 1.7 to 462 B parameters on H100, sequences of 4,096 tokens, a
vocabulary of 131,072, gradients and parameters behind computations, user buffers, BF16.
"""

import re
from typing import Final

from lagom_overlap.workload.models import TransformerModel
from measured_rows import BadRowError, NotModelledError, Row, whole

_SIZES: Final = re.compile(r"\bL(\d{1,4}) H(\d{1,6})\b")
_MOCK_VOCAB: Final = 131_200
_COUNTS: Final = ("num-attention-heads", "num-query-groups", "kv-channels", "ffn-hidden-size")
_README: Final = {
    "17b": (24, 2048, 16), "71b": (30, 4096, 32), "16b": (32, 6144, 48), "32b": (48, 7168, 56), "70b": (84, 8192, 64),
    "119b": (92, 10240, 80), "177b": (96, 12288, 96), "314b": (96, 16384, 128), "462b": (112, 18432, 144),
}  # fmt: skip
"""Layers, hidden size and heads by the name's letters and digits."""


def stated_sizes(row: Row) -> tuple[int, int] | None:
    """Layers and hidden size, where the row's model says them."""
    found = _SIZES.search(row.text("model"))
    return None if found is None else (int(found[1]), int(found[2]))


def check_sizes(row: Row, model: TransformerModel) -> None:
    """Refuses a cut-down copy of a known model.

    Raises:
        NotModelledError: if the row states other sizes than the model has.
    """
    sizes = stated_sizes(row)
    if sizes is not None and sizes != (model.num_layers, model.hidden):
        raise NotModelledError(
            f"model is {row.text('model')[:60]!r}: a cut-down {model.name}, whose parts are not printed"
        )


def model_by_arguments(row: Row) -> TransformerModel | None:
    """A dense GPT of a test by the arguments in its note; None where the row states no sizes.

    Raises:
        NotModelledError: if it is no dense GPT.
        BadRowError: if its heads are not printed, or an argument is no number.
    """
    sizes = stated_sizes(row)
    if sizes is None:
        return None
    said = _arguments(row)
    name = row.text("model").partition(":")[0]
    if not name.startswith("gpt/") or "num-experts" in said or "multi-latent-attention" in said:
        raise NotModelledError(f"model is {name[:60]!r}: no dense GPT, whose other parts are not printed")
    if not said.get("num-attention-heads"):
        raise BadRowError("note says no num-attention-heads, which decides the model")
    given = {name: whole(said[name], f"note's {name}") for name in _COUNTS if said.get(name)}
    (layers, hidden), heads, gated = sizes, given["num-attention-heads"], "swiglu" in said
    return TransformerModel(
        name=f"gpt-l{layers}-h{hidden}",
        num_layers=layers,
        hidden=hidden,
        ffn=given.get("ffn-hidden-size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden),
        num_heads=heads,
        num_kv_heads=given.get("num-query-groups", heads),
        head_dim=given.get("kv-channels", hidden // heads),
        vocab=_MOCK_VOCAB,
        gated=gated,
        linear_bias="disable-bias-linear" not in said,
        norm_bias=True,
        dropout=True,
        learned_positions=row.needed_count("seq"),
    )


def readme_model(letters: str, seq_len: int) -> TransformerModel | None:
    """A GPT of the README's table, by its name's letters and digits."""
    found = next(
        (_README[name] for name in (letters.removeprefix("gpt"), letters.removeprefix("gpt3")) if name in _README), None
    )
    if found is None:
        return None
    layers, hidden, heads = found
    return TransformerModel(
        name=f"gpt-l{layers}-h{hidden}",
        num_layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab=131_072,
        gated=False,
        linear_bias=True,
        norm_bias=True,
        tied_embeddings=True,
        learned_positions=seq_len,
    )


def has_argument(row: Row, name: str) -> bool:
    """Whether a test was run with an argument."""
    return name in _arguments(row)


def _arguments(row: Row) -> dict[str, str]:
    pairs = (one.strip().partition("=") for one in row.text("note").split(";"))
    return {name: value for name, _, value in pairs if name}
