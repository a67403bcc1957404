"""One line on a step's overlap for a training log, from the profiler that has just recorded it."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.trace.reader import ReadOptions, read_file
from lagom_overlap.units import format_seconds

_SAVED: Final = "already saved"
"""In what PyTorch's profiler raises where its trace was exported before, as by `tensorboard_trace_handler`."""


class Profiler(Protocol):
    """What is used of `torch.profiler.profile`."""

    def export_chrome_trace(self, path: str) -> object:
        """Writes the trace; a profiler does so once."""
        ...


def overlap_line(profiler: Profiler | Path, keep: Path | None) -> str:
    """The line; of a trace that cannot be read, why, because a training job must not end of it.

    Every rank of a job may name the same `keep`: each writes a file of its own first, and reads that. A folder (a name
    that is no trace's) keeps the last trace of each rank.
    """
    try:
        if isinstance(profiler, Path):
            return _words(_findings(profiler))
        if keep is None:
            with TemporaryDirectory(prefix="lagom-") as folder:
                return _words(_findings(_exported(profiler, Path(folder) / "trace.json")))
        return _kept(profiler, keep)
    except (TraceError, OSError, RuntimeError) as error:
        if _SAVED in str(error):
            return f"overlap: not known ({error.args[0].rstrip('.')}: give overlap_line the file that it was saved to)"
        return f"overlap: not known ({error})"
    except Exception as error:  # the profiler asserts, a trace may be anything, and the job is more than its log
        return f"overlap: not known ({type(error).__name__}: {error})"


def _kept(profiler: Profiler, keep: Path) -> str:
    is_file = keep.name.endswith((".json", ".json.gz")) and not keep.is_dir()
    folder = keep.parent if is_file else keep
    folder.mkdir(parents=True, exist_ok=True)
    ending = ".json.gz" if keep.name.endswith(".gz") or not is_file else ".json"  # by which the profiler packs
    path = _exported(profiler, folder / f".{os.getpid()}{ending}")
    rank: int | str | None = None
    try:
        findings = _findings(path)
        rank = findings.ranks[0].trace.rank
        return _words(findings)
    finally:  # also what cannot be read was asked for
        rank = os.environ.get("RANK", "0") if rank is None else rank
        path.replace(keep if is_file else folder / f"rank{rank}{ending}")


def _exported(profiler: Profiler, path: Path) -> Path:
    profiler.export_chrome_trace(str(path))
    return path


def _findings(path: Path) -> Findings:
    return analyse(list(read_file(path, ReadOptions())))


def _words(findings: Findings) -> str:
    if not any(len(rank.trace.events) for rank in findings.ranks):
        return "overlap: not known (no timeline)"
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
