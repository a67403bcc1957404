"""What `lagom list`, `lagom runs` and `lagom show` tell. Format of their JSON: docs/formats.md."""

from dataclasses import asdict, dataclass
from pathlib import Path

from lagom_overlap.results.base import Result, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ListResult(Result):
    """The names that a key or a flag takes, with figures in SI units; `use` is where such a name is written."""

    tool: str = "lagom list"
    kind: str
    use: str
    rows: tuple[Row, ...]

    def summary(self) -> str:
        """The names, and where one is written."""
        return "\n".join([*(str(row["name"]) for row in self.rows), self.use])

    def table(self) -> tuple[Row, ...]:
        """One row per name; the columns depend on the kind."""
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run folder: what was run (`kind`), of which job ("" where it had none), when (UTC), and its report's file."""

    folder: Path
    kind: str
    job: str
    date: str
    report: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsResult(Result):
    """The runs below a folder, the latest first."""

    tool: str = "lagom runs"
    below: Path
    runs: tuple[ListedRun, ...]

    def summary(self) -> str:
        """One line per run."""
        return "\n".join(f"{run.date} {run.kind} {run.job} {run.folder}" for run in self.runs)

    def table(self) -> list[Row]:
        """One row per run."""
        return [
            {**asdict(run), "folder": str(run.folder), "report": None if run.report is None else str(run.report)}
            for run in self.runs
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowResult(Result):
    """A file or folder in words: what it is, what it says, and the line to type next ("" where there is none)."""

    tool: str = "lagom show"
    path: Path
    what: str
    said: tuple[str, ...]
    next: str

    def summary(self) -> str:
        """All of it as lines."""
        return "\n".join(
            [f"{self.path}: {self.what}", *(f"  {line}" for line in self.said), *filter(None, (self.next,))]
        )

    def table(self) -> list[Row]:
        """One row per line."""
        return [{"said": line} for line in self.said]
