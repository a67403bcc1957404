"""A pipeline's layout as a line of text, as Megatron-Core reads it (`--pipeline-model-parallel-layout`).

Model chunks are separated by `|`: `E` is the embedding, `t` a layer, `m` a multi-token prediction, `L` the head with
the loss; `x*n` is n times x, `(...)*n` n times what stands in parentheses: `Et*4|(t*4|)*14tmL`. Commas are for the eye.

Predictions stand in one chunk, behind the last layer: with the head, or in a chunk before it (`Et*3|(tt|)*29m|L`, the
layout of NVIDIA's DeepSeek-V3), whose results travel to the head's. Rules: NVIDIA/Megatron-LM @d98e8a6,
`core/transformer/pipeline_parallel_layer_layout.py`, which also allows inner chunks that hold nothing. The ends may
hold a table alone (`E|(t|)*126L`: 126 layers, embedding and head on 16 stages of 8 chunks).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lagom_overlap.errors import JobError

MAX_PLACES: Final = 100_000
"""Chosen: `*n` in nested parentheses must not fill the memory."""
_GROUP: Final = re.compile(r"\(([^()]*)\)(?:\*(\d{1,6}))?")
_ONE: Final = re.compile(r"([EtmL|])\*(\d{1,6})")


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """What each model chunk holds: layers, and in one of them multi-token predictions; without any that is the last."""

    layers: tuple[int, ...]
    num_mtp: int
    mtp_chunk: int


@lru_cache(maxsize=256)
def parse_pipeline_layout(text: str) -> ChunkSizes:
    """The chunks that a layout describes.

    Raises:
        JobError: if it is no layout, or one that is not modelled.
    """
    where = f"parallel.pipeline_layout is {text[:60]!r}"
    spelled = _spelled("".join(text.split()).replace(",", ""), where)
    if set(spelled) - set("EtmL|"):
        raise JobError(f"{where}: allowed are E, t, m, L, |, (...) and *n")
    chunks = spelled.split("|")
    if spelled.count("E") != 1 or not chunks[0].startswith("E"):
        raise JobError(f"{where}: must have one E, at its start")
    if spelled.count("L") != 1 or not chunks[-1].endswith("L"):
        raise JobError(f"{where}: must have one L, at its end")
    order = [re.fullmatch(r"E?t*m*L?", chunk) for chunk in chunks]
    if not all(order) or "t" in spelled.partition("m")[2]:
        raise JobError(f"{where}: layers t come before predictions m")
    predicting = [number for number, chunk in enumerate(chunks) if "m" in chunk] or [len(chunks) - 1]
    if len(predicting) > 1:
        raise JobError(f"{where}: predictions m must stand in one chunk")
    inner = [number for number, chunk in enumerate(chunks[:-1]) if number and not {"t", "m"} & set(chunk)]
    if inner:
        raise JobError(f"{where}: chunk {inner[0]} has no t and no m, every chunk but the ends must have one")
    return ChunkSizes(tuple(chunk.count("t") for chunk in chunks), spelled.count("m"), predicting[0])


def _spelled(text: str, where: str) -> str:
    """The text without `*n` and parentheses."""
    for pattern in (_ONE, _GROUP):
        repeated = sum(len(match[1]) * int(match[2] or 1) for match in pattern.finditer(text))
        if repeated > MAX_PLACES:
            raise JobError(f"{where}: more than {MAX_PLACES} places")
        text = pattern.sub(lambda match: match[1] * int(match[2] or 1), text)
    return text
