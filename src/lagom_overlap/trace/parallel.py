"""Reads many trace files at once: a few processes, each with one file at a time.

A process asks for the next file when it has handed over the last trace of the one before, so memory holds what was read
so far and one file for each process. A process that dies (the kernel's out-of-memory killer) is an error that names its
file, never a hang. Ctrl-C reaches this process only: the others have it blocked from their first instruction, and are
ended by us; should we be killed, they find their pipe closed and end too.
"""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from lagom_overlap.errors import TraceError
from lagom_overlap.interrupts import SIGNALS
from lagom_overlap.trace.gpu_trace import short_name

T = TypeVar("T")


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    file: int


def _serve(pipe: Connection, read: Callable[[Path], Iterable[object]]) -> None:
    """What each process does: reads file after file until its pipe closes."""
    try:
        while True:
            path = pipe.recv()
            try:
                for item in read(path):
                    pipe.send(item)
                pipe.send(None)
            except Exception as error:
                pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C or SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(num: int, read: Callable[[Path], Iterable[object]]) -> list[_Worker]:
    context = multiprocessing.get_context("spawn")
    workers = []
    resource_tracker.ensure_running()  # it would unblock the signal in between
    with _interrupts_blocked():
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, read), daemon=True)
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours, -1))
    return workers


def _died(worker: _Worker, path: Path) -> TraceError:
    worker.process.join(1)
    code = worker.process.exitcode
    killed = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
    return TraceError(f"{short_name(path)}: the process that read it ended with code {code}{killed}; try --jobs 1")


def read_in_processes(
    paths: Sequence[Path], read: Callable[[Path], Iterable[T]], num_jobs: int
) -> Generator[tuple[int, T | None], None, None]:
    """(index of the path, what was read of it), in the order in which it comes; None where a file is done.

    `read` must be importable by name in a fresh process.

    Raises:
        TraceError: if a process dies; and whatever `read` raises.
    """
    workers = _start(min(num_jobs, len(paths)), read)
    try:
        waiting = list(range(len(paths)))[::-1]
        busy: dict[Connection, _Worker] = {}
        for worker in workers:
            worker.file = waiting.pop()
            worker.pipe.send(paths[worker.file])
            busy[worker.pipe] = worker
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # wait gives back what it was given
                try:
                    item = worker.pipe.recv()
                except EOFError:
                    raise _died(worker, paths[worker.file]) from None
                if isinstance(item, Exception):
                    raise item
                yield worker.file, item
                if item is None:
                    del busy[worker.pipe]
                    if waiting:
                        worker.file = waiting.pop()
                        worker.pipe.send(paths[worker.file])
                        busy[worker.pipe] = worker
    finally:
        for worker in workers:
            worker.process.kill()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()
