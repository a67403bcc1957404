"""What `lagom export` wrote. Format of its JSON: docs/formats_plugin.md."""

from dataclasses import dataclass
from pathlib import Path

from lagom_overlap.results.base import Result, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file that was written, how a job reads it, and what of the run it does not hold."""

    format: str
    path: Path
    use: str
    not_carried: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """One run of `lagom export`; `num_rows` calls of a step are set."""

    tool: str = "lagom export"
    run: Path
    num_rows: int
    files: tuple[ExportedFile, ...]

    def summary(self) -> str:
        """The files, and what each cannot hold."""
        calls = "1 call" if self.num_rows == 1 else f"{self.num_rows} calls"
        lines = [f"{calls} of a step set by this run"] if any(file.format != "perfetto" for file in self.files) else []
        for file in self.files:
            lines.append(f"{file.format}: {file.path}")
            lines.append(f"  use: {file.use}")
            lines += [f"  note: {note}" for note in file.not_carried]
        lines.append(f"next: {self.files[0].use}")
        return "\n".join(lines)

    def table(self) -> list[Row]:
        """One row per file."""
        return [
            {"format": file.format, "path": str(file.path), "not_carried": "; ".join(file.not_carried)}
            for file in self.files
        ]
