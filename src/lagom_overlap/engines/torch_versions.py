"""The releases of PyTorch that this package's own tests ran with: `data/torch_versions.toml`.

`benchmarks/torch_versions.py` writes the file and the table in docs/support.md. Needs no torch.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTorch:
    """One build of PyTorch and what the tests without ranks of their own, the slow ones left out, said under it.

    `nccl` is the release that the build was compiled with, empty where it has none; `date` is year, month and day.
    """

    torch: str
    python: str
    nccl: str
    date: str
    num_passed: int
    num_skipped: int
    failed: tuple[str, ...]

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
    rows = [
        CheckedTorch(**{**row, "failed": tuple(row["failed"])})  # the file is ours
        for row in tomllib.loads(text).get("tested", [])
    ]
    return tuple(sorted(rows, key=lambda row: (row.release, row.torch)))


def as_markdown(rows: tuple[CheckedTorch, ...]) -> str:
    """The table of docs/support.md."""
    lines = [
        "| PyTorch | Python | built with NCCL | passed | skipped | failed | date |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.torch} | {row.python} | {row.nccl or '-'} | {row.num_passed:,} | {row.num_skipped:,} | "
        f"{len(row.failed):,} | {row.date} |"
        for row in rows
    ]
    return "\n".join(lines)
