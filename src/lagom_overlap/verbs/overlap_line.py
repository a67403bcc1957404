"""One line on a step's overlap for a training log, from the profiler that has just recorded it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.trace.reader import ReadOptions, read_file
from lagom_overlap.units import format_seconds


class Profiler(Protocol):
    """What is used of `torch.profiler.profile`."""

    def export_chrome_trace(self, path: str) -> object:
        """Writes the trace; a profiler does so once."""
        ...


def overlap_line(profiler: Profiler | Path, keep: Path | None) -> str:
    """The line; of a trace that cannot be read, why, because a training job must not end of it."""
    try:
        if isinstance(profiler, Path):
            return _line(profiler)
        if keep is not None:
            profiler.export_chrome_trace(str(keep))
            return _line(keep)
        with TemporaryDirectory(prefix="lagom-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return _line(path)
    except (TraceError, OSError, RuntimeError) as error:
        return f"overlap: not known ({error})"
    except Exception as error:  # the profiler asserts, a trace may be anything, and the job is more than its log
        return f"overlap: not known ({type(error).__name__}: {error})"


def _line(path: Path) -> str:
    findings = analyse(list(read_file(path, ReadOptions())))
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    if not timed:
        return "overlap: not known (no timeline)"
    return _words(findings)


def _words(findings: Findings) -> str:
    measures = [rank.measures for rank in findings.ranks]
    whole = sum(measures[1:], measures[0])
    num, span_ns = findings.num_windows, max(1, whole.span_ns)

    def part(length_ns: float) -> str:
        return f"{format_seconds(length_ns / num / NS_PER_S)} ({100 * length_ns / span_ns:.1f} %)"

    what = "step" if any(rank.trace.steps for rank in findings.ranks) else "trace"
    overlap = "no communication" if whole.overlap_pct is None else f"overlap {whole.overlap_pct:.1f} %"
    return (
        f"overlap: {what} {format_seconds(whole.span_ns / num / NS_PER_S)}, compute {part(whole.compute_ns)}, "
        f"exposed communication {part(whole.exposed_comm_ns)}, idle {part(whole.idle_ns)}, {overlap}"
    )
