"""What `lagom simulate --model` found of a model's layouts, or of a job's variants. JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from lagom_overlap.results.base import Drawn, Row

BEST_FILE: Final = "best.toml"
"""The fastest of the jobs, in the run folder."""
KeyValue = bool | int | float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One job: `keys` of its file that tell it from the others, and what `lagom simulate` predicts of it.

    `num_tokens` are those of an iteration: where rows differ in it, seconds per iteration do not compare.
    `memory_bytes` are the fullest GPU's, `exposed_share` is the share of the iteration in which the last stage waits
    for communication. `is_on_frontier`: no other row is as fast with less memory, or as small and faster.
    """

    keys: Mapping[str, KeyValue]
    num_gpus: int
    num_tokens: int
    iteration_s: float
    tokens_per_s: float
    mfu: float
    exposed_share: float
    memory_bytes: int
    is_on_frontier: bool = False

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens_per_s / self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedVariant:
    """A job that cannot be built, or does not fit, and why."""

    keys: Mapping[str, KeyValue]
    why: str


@dataclass(frozen=True, kw_only=True)
class LayoutsResult(Drawn):
    """Simulated jobs, the one of most tokens per second first.

    Of `num_layouts` that there are, `num_too_large` were looked at and do not fit. The first `num_certain` rows are
    the fastest of all that there are: what was not simulated cannot be faster by its lower bound. `global_batch` is
    that of the first row, in sequences of `seq_len` tokens. `is_ranking`: the rows are layouts of a model, else
    variants of a job file.
    """

    verb: ClassVar[str] = "layouts"

    is_ranking: bool

    tool: str = "lagom simulate"
    job: str
    model: str
    cluster: str
    num_gpus: int
    seq_len: int
    global_batch: int
    num_layouts: int
    num_too_large: int
    num_certain: int
    memory_limit_bytes: int
    rows: tuple[LayoutRow, ...]
    refused: tuple[RefusedVariant, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def same_work(self) -> bool:
        """Whether an iteration of every row trains as many tokens."""
        return len({row.num_tokens for row in self.rows}) == 1

    def table(self) -> list[Row]:
        """One row per job, the fastest first."""
        return [
            {
                "layout": ", ".join(f"{key}={value}" for key, value in row.keys.items()),
                "num_gpus": row.num_gpus,
                "num_tokens": row.num_tokens,
                "iteration_s": row.iteration_s,
                "tokens_per_s": row.tokens_per_s,
                "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
                "mfu": row.mfu,
                "exposed_share": row.exposed_share,
                "memory_bytes": row.memory_bytes,
                "is_on_frontier": row.is_on_frontier,
            }
            for row in self.rows
        ]
