"""Every fault at every state of the switching protocol: one driver, one job, a table of what may come of it.

A cell is a small real job on gloo, one rank of which has a fault at a point (`fault_rank`). What must hold of all: no
rank hangs, no message is wrong, nothing is left: no process, file or shared memory. A fault that ends a rank ends the
job as it does without us: the same exit codes, in time. After any other one the job goes on to its end, and all ranks
end with the same settings.

"twin" is no fault, but a second job with the same journal and the same saved file, in which a rank comes to the same
point at the same time.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import lagom_overlap
from forked_python import ForkedPython
from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.collective.sites import CallType, Site, SiteSetting
from lagom_overlap.errors import LagomError
from lagom_overlap.export.saved import SavedSettings, read_saved, write_saved
from lagom_overlap.online.journal import whole_lines
from lagom_overlap.tuners.bundle import parse_header
from ports import free_port

SRC = str(Path(lagom_overlap.__file__).parents[1])
RANK = Path(__file__).with_name("fault_rank.py")
TIMEOUT_S = 4.0
"""Of the tuner: what a rank waits on our account."""
LIMIT_S = 600.0
"""Of a job, on a machine that has other things to do. A rank that waits for ever does so for longer."""
NUM_BYTES = 3 << 19

SEARCHED = {
    "window_steps": 4,
    "num_pairs": 3,
    "max_steps": 68,
    "watch_steps": 4,
    "drift_ratio": 1e6,
    "check_share": 0.0,
}
MODES: dict[str, dict[str, Any]] = {
    "search": {"steps": 24, "tuner": SEARCHED},
    "verdict": {"steps": 40, "tuner": SEARCHED | {"max_steps": 52}},
    "saved": {"steps": 24, "tuner": SEARCHED, "is_saved": True},
    "check": {"steps": 24, "tuner": SEARCHED | {"check_share": 0.005, "max_slowdown": 1e6}, "is_saved": True},
    "done": {"steps": 24, "tuner": SEARCHED | {"watch_steps": 0}, "is_saved": True},
    "frozen": {"steps": 24, "tuner": SEARCHED, "disagrees": True},
    "off": {"steps": 24, "tuner": SEARCHED, "freezes_at": 4},
    "stock": {"steps": 24, "tuner": None},
}
POINTS = {
    "greet": "search",
    "a step of record": "search",
    "before the report": "search",
    "after the report": "search",
    "before the decision": "search",
    "after the decision": "search",
    "before the plan": "search",
    "after the plan": "search",
    "a step of search": "search",
    "a step of verdict": "verdict",
    "getting ready": "saved",
    "ready": "saved",
    "before the last word": "saved",
    "before the switch": "saved",
    "after the switch": "saved",
    "after the last word": "saved",
    "a step of watch": "saved",
    "a step of check": "check",
    "a step of done": "done",
    "a step of frozen": "frozen",
    "a step of off": "off",
    "before the end": "saved",
}
"""Where a fault comes, and in what kind of job."""
REPORTS = ("before the report", "after the report")
"""Points that rank 0, who hears the others, never comes to."""
DECIDES = ("before the decision", "after the decision")
"""Points that rank 0 alone comes to."""
MAY_END = dict.fromkeys(
    ("before the last word", "before the switch", "after the switch", "after the last word"), ("lost_for_good", "mute")
)
"""Where a rank has given its word for a switch and cannot know what the others do: the job ends, in words."""
ENDING = ("kill", "term", "interrupt", "exception")
"""Faults that end the rank, and with it the job."""
FAULTS = (
    *ENDING,
    *("stop", "stop_long", "lost", "lost_for_good", "mute", "disk", "read_only", "shm", "clock", "stdio", "fork"),
    *("disabled", "bug", "twin"),
)
EXPECTED_FILES = ("journal.jsonl", "lagom.json", "start.json", "ended-", "twin-")
"""What a job, or its driver, leaves on purpose, by how the names begin."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault at a point, in a job of so many ranks; `stock` is the same job without us."""

    point: str
    fault: str
    num_ranks: int = 2
    is_last: bool = True
    """The victim is the last rank, not rank 0."""

    @property
    def victim(self) -> int:
        is_first = self.point in DECIDES or not (self.is_last or self.point in REPORTS)
        return 0 if is_first else self.num_ranks - 1

    @property
    def is_real(self) -> bool:
        """Whether there is such a case: a user's error comes in a step, one of ours nowhere else."""
        if self.fault == "exception":
            return self.point.startswith("a step of") or self.point == "before the end"
        return self.fault != "bug" or not self.point.startswith(("a step of", "before the end"))


@dataclass(slots=True)
class Outcome:
    """What came of a cell: `results` of the ranks that reached their end; `faults` is what must not be."""

    cell: Cell
    codes: list[int | None]
    results: list[dict[str, Any] | None]
    words: str
    took_s: float
    leftovers: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_in_doubt: bool = False
    """The job ended because of `MAY_END`."""


def cells(points: list[str] | None = None, faults: list[str] | None = None) -> Iterator[Cell]:
    """The whole matrix: ranks 2, 3, 4 and the victim's place by turns."""
    number = 0
    for point in points or POINTS:
        for fault in faults or FAULTS:
            cell = Cell(point, fault, 2 + number % 3, is_last=number % 2 == 0)
            if cell.is_real:
                number += 1
                yield cell


def _saved(path: Path, num_ranks: int) -> None:
    """Two slices on two channels for the message of every step."""
    call = CallType(
        description="default_pg",
        num_ranks=num_ranks,
        creation_order=0,
        kind=CollectiveKind.ALL_TO_ALL,
        num_bytes=NUM_BYTES,
    )
    setting = SiteSetting(Site(call, 0), CommConfig(num_channels=2, chunk_bytes=NUM_BYTES // 2))
    saved = SavedSettings(
        world_size=num_ranks,
        route="gloo",
        is_adopted=True,
        settings=(setting,),
        engine=engine_here(),
        verdict="as told",
        date="2026-11-23T00:00:00Z",
    )
    write_saved(path, saved)


def engine_here() -> str:
    """As `SavedSettings.engine` has it."""
    return f"ProcessGroupGloo of torch {'.'.join(metadata.version('torch').split('.')[:2])}"


FORKING = threading.Lock()
"""Jobs that run at once share the process that forks their ranks."""


def ended(process: ForkedPython, deadline: float) -> int | None:
    """The exit code, None if it still runs then."""
    while True:
        with FORKING:
            code = process.poll()
        if code is not None or time.monotonic() > deadline:
            return code
        time.sleep(0.05)


class Job:
    """The ranks of one job; what each writes is kept."""

    def __init__(self, folder: Path, cell: Cell, mode: dict[str, Any], *, number: int = 0) -> None:
        """`number` tells jobs with the same folder apart: their journal and their saved file are one."""
        tuner = mode["tuner"]
        if tuner is not None:
            # A rank that waits for its twin is late, and the machine is busy.
            timeout_s = LIMIT_S if cell.fault == "twin" else TIMEOUT_S
            tuner = tuner | {"timeout_s": timeout_s, "journal": str(folder / "journal.jsonl")}
            if mode.get("is_saved"):
                start = folder / ("lagom.json" if cell.fault == "twin" else "start.json")
                if number == 0:
                    _saved(start, cell.num_ranks)
                tuner["config"] = str(start)
        what = {
            "point": cell.point,
            "fault": cell.fault,
            "victim": cell.victim,
            "folder": str(folder),
            "number": number,
            "steps": mode["steps"],
            "tuner": tuner,
            "freezes_at": mode.get("freezes_at"),
            "disagrees": mode.get("disagrees", False),
            "save": str(folder / "lagom.json"),
        }
        port = free_port()
        self.ranks: list[ForkedPython] = []
        self.logs: list[list[str]] = []
        self._readers: list[threading.Thread] = []
        self._results: list[int] = []
        for rank in range(cell.num_ranks):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": cell.num_ranks, "LOCAL_WORLD_SIZE": cell.num_ranks}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            reader, writer = os.pipe()
            with FORKING:
                process = ForkedPython(
                    RANK,
                    [json.dumps(what)],
                    env={**os.environ, **{name: str(value) for name, value in world.items()}},
                    cwd=folder,  # by which a process that is left is known
                    stdin=writer,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            os.close(writer)
            lines: list[str] = []
            drained = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
            drained.start()
            self.ranks.append(process)
            self.logs.append(lines)
            self._readers.append(drained)
            self._results.append(reader)

    def attend(self, cell: Cell, deadline: float) -> None:
        """Lets a stopped victim go on: after a moment, or when all others have given it up."""
        if cell.fault not in ("stop", "stop_long"):
            return
        victim = self.ranks[cell.victim]
        while ended(victim, 0.0) is None and time.monotonic() < deadline:
            if _is_stopped(victim.pid):
                time.sleep(0.3 if cell.fault == "stop" else TIMEOUT_S + 2)
                os.kill(victim.pid, signal.SIGCONT)
                return
            time.sleep(0.02)

    def finish(self, deadline: float) -> tuple[list[int | None], list[dict[str, Any] | None], str]:
        """Exit codes (None: it hung), results, words."""
        codes = [ended(process, deadline) for process in self.ranks]
        for process, reader in zip(self.ranks, self._readers, strict=True):
            with FORKING:
                process.kill()
            ended(process, time.monotonic() + 60)
            reader.join(10)
            if process.stdout is not None:
                process.stdout.close()
        results: list[dict[str, Any] | None] = []
        for descriptor in self._results:
            with os.fdopen(descriptor) as file:
                text = file.read()
            results.append(json.loads(text) if text else None)
        words = "\n".join(f"--- rank {rank}\n{''.join(lines)[-6000:]}" for rank, lines in enumerate(self.logs))
        return codes, results, words


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


@cache
def codes_without_us(fault: str, num_ranks: int, is_last: bool, is_at_end: bool) -> tuple[int | None, ...]:
    """What the same fault in a step of the same job, or after its last one, comes to."""
    cell = Cell("before the end" if is_at_end else "a step of stock", fault, num_ranks, is_last)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), cell, MODES["stock"])
        return tuple(job.finish(time.monotonic() + LIMIT_S)[0])


def left_behind(folder: Path, held: set[str]) -> list[str]:
    """Files, shared memory and processes of a job whose ranks have all ended; what the ranks' sockets become."""
    left = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    left = [name for name in left if not name.startswith(EXPECTED_FILES)]
    new = set(os.listdir("/dev/shm")) - held  # noqa: PTH208
    # the emulated NCCL of other tests, which run at the same time, makes lagom_nccl_*; no rank of these jobs loads it
    left += [found for found in new if "lagom" in found and not found.startswith("lagom_nccl_")]
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink() == folder:
                left.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
        except OSError:  # it has ended, or is not ours to look at
            continue
    return left


def run(cell: Cell) -> Outcome:
    """One job, judged."""
    with tempfile.TemporaryDirectory(prefix="lagom-fault-") as name:
        folder, began = Path(name), time.monotonic()
        held = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are all that is wanted
        deadline = began + LIMIT_S
        num_jobs = 2 if cell.fault == "twin" else 1
        jobs = [Job(folder, cell, MODES[POINTS[cell.point]], number=number) for number in range(num_jobs)]
        jobs[0].attend(cell, deadline)
        codes: list[int | None] = []
        results: list[dict[str, Any] | None] = []
        words = ""
        for job in jobs:
            own_codes, own_results, own_words = job.finish(deadline)
            codes, results, words = codes + own_codes, results + own_results, words + own_words
        outcome = Outcome(cell, codes, results, words, time.monotonic() - began, left_behind(folder, held))
        if cell.fault == "twin":
            outcome.faults += _damaged(folder, cell.num_ranks)
    judge(outcome)
    return outcome


def _damaged(folder: Path, num_ranks: int) -> list[str]:
    """What is wrong with files that two jobs have written."""
    found = []
    journal, saved = folder / "journal.jsonl", folder / "lagom.json"
    if journal.exists():
        lines = whole_lines(journal.read_text())
        try:
            for line in lines:
                json.loads(line)
            parse_header(lines[0], str(journal))
        except (ValueError, IndexError, LagomError) as error:
            found.append(f"the journal is damaged: {error}")
    if saved.exists():
        try:
            read_saved(saved, world_size=num_ranks, engine=engine_here())
        except LagomError as error:
            found.append(f"the saved file is damaged: {error}")
    return found


def judge(outcome: Outcome) -> None:  # noqa: PLR0912 - one case for each thing that must not be
    """Fills in what must not be."""
    cell, faults, codes = outcome.cell, outcome.faults, outcome.codes
    if None in codes:
        faults.append(f"rank {codes.index(None)} hangs")
    if any(result is not None and result["wrong"] for result in outcome.results):
        faults.append("a message is wrong")
    if outcome.leftovers:
        faults.append(f"left behind: {outcome.leftovers}")
    if "Traceback" in outcome.words and cell.fault not in (*ENDING, "bug", "stdio"):
        faults.append("a traceback")
    if outcome.words.count(f"fault {cell.fault} at {cell.point}") != (2 if cell.fault == "twin" else 1):
        faults.append("the fault never came")
        return
    if cell.fault in ENDING:
        expected = codes_without_us(cell.fault, cell.num_ranks, cell.victim != 0, cell.point == "before the end")
        if tuple(codes) != expected:
            faults.append(f"exit codes {codes}, without us {list(expected)}")
        return
    if any(codes):
        if cell.fault in MAY_END.get(cell.point, ()) and all(codes):
            outcome.is_in_doubt = True
            faults[:] = [fault for fault in faults if fault != "a traceback"]
        else:
            faults.append(f"exit codes {codes}")
        return
    results = [result for result in outcome.results if result is not None]
    if len(results) < len(codes):
        faults.append("a rank has no result")
    for start in range(0, len(results), cell.num_ranks):
        settings = [result["settings"] for result in results[start : start + cell.num_ranks]]
        if len(set(settings)) > 1:
            faults.append(f"the ranks end with different settings: {settings}")
