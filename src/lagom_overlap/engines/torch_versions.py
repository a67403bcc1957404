"""The releases of PyTorch that this package's own tests ran with: `data/torch_versions.toml`.

`benchmarks/torch_versions.py` writes the file and the table in docs/support.md. Needs no torch.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What tests said, on `date` (year, month and day); `failed` are their names."""

    date: str
    num_passed: int
    num_skipped: int
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTorch:
    """One build of PyTorch and what this package's tests said under it.

    `alone` are those that need PyTorch and spawn no ranks, the slow ones left out, `with_ranks` all that spawn ranks.
    `nccl` is the release that the build was compiled with, empty where it has none.
    """

    torch: str
    python: str
    nccl: str
    alone: Ran
    with_ranks: Ran

    @property
    def runs(self) -> tuple[Ran, Ran]:
        """Both."""
        return self.alone, self.with_ranks

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(ran.num_passed for ran in self.runs)

    @property
    def failed(self) -> tuple[str, ...]:
        """Tests that failed."""
        return tuple(name for ran in self.runs for name in ran.failed)

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        return release_of(self.torch)


def release_of(version: str) -> tuple[int, int]:
    """Major and minor of a version such as `2.13.0+cpu`.

    Raises:
        ValueError: if it is none.
    """
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def releases_tested() -> tuple[CheckedTorch, ...]:
    """Every build that was tested, by release."""
    text = (files("lagom_overlap.engines") / "data" / "torch_versions.toml").read_text(encoding="utf-8")
    return tuple(sorted(map(_row, tomllib.loads(text).get("tested", [])), key=lambda row: (row.release, row.torch)))


def _row(table: dict[str, Any]) -> CheckedTorch:
    """A row of the file, which is ours."""
    runs = {name: Ran(**{**table[name], "failed": tuple(table[name]["failed"])}) for name in ("alone", "with_ranks")}
    return CheckedTorch(**{**table, **runs})


def as_markdown(rows: tuple[CheckedTorch, ...]) -> str:
    """The table of docs/support.md."""
    lines = [
        "| PyTorch | Python | its NCCL | alone: passed | skipped | failed | with ranks: passed | skipped | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        " | ".join(
            [
                f"| {row.torch} | {row.python} | {row.nccl or '-'}",
                *(f"{ran.num_passed:,} | {ran.num_skipped:,} | {len(ran.failed):,}" for ran in row.runs),
            ]
        )
        + " |"
        for row in rows
    ]
    return "\n".join(lines)
