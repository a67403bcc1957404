"""Jobs of fresh processes: one program by stock PyTorch and with us, compared by all that an observer sees.

That is what they computed, exit codes, the exception's last words, and what they left: processes, files, shared memory.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import fuzzing  # noqa: E402, F401 - says what the process that forks imports
from programs import Program  # noqa: E402

from forked_python import ForkedPython  # noqa: E402
from ports import free_port  # noqa: E402

RANK = Path(__file__).with_name("fresh_rank.py")
WAYS = {"observe": "observe", "launched": "online", "saved": "config", "online": "tuner", "route": "route"}
STOCK_ABORT = "terminate called without an active exception"
"""PyTorch issue 190489: a stock job over gloo may end so."""


@dataclass
class Ended:
    """What an observer sees of a job."""

    codes: list[int | None] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_stocks_abort: bool = False

    def seen(self) -> tuple[object, ...]:
        return self.codes, self.records, self.words, self.left


class FreshJob:
    """Its ranks, started."""

    def __init__(self, program: Program, way: str, folder: Path) -> None:
        self._folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        self._way = way
        port = free_port()
        self._ranks = []
        for rank in range(program.num_ranks):
            with (folder / f"{way}.err{rank}").open("w") as err:
                words = [
                    str(rank),
                    str(program.num_ranks),
                    str(port),
                    way,
                    program.text(),
                    str(folder / f"{way}.{rank}"),
                ]
                environment = os.environ | {"TMPDIR": str(folder / "tmp"), "KINETO_LOG_LEVEL": "6"}
                self._ranks.append(ForkedPython(RANK, words, env=environment, stdout=err, stderr=err))

    def ended(self, limit_s: float) -> Ended:
        """Waits for all; codes of None: it did not end."""
        found = Ended()
        give_up = time.monotonic() + limit_s
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < give_up:
            time.sleep(0.05)
        found.codes = [rank.poll() for rank in self._ranks]
        for number, rank in enumerate(self._ranks):
            children = _children_of(rank.pid)
            rank.kill()
            out, err = (self._folder / f"{self._way}.{name}{number}" for name in ("", "err"))
            out = self._folder / f"{self._way}.{number}"
            text = err.read_text()
            found.records.append(out.read_text() if out.exists() else "")
            errors = [line for line in text.splitlines() if line and not line.startswith((" ", "lagom:", "["))]
            found.words.append(next((line for line in reversed(errors) if "Error" in line or "Interrupt" in line), ""))
            found.errors.append(text[-3000:])
            found.is_stocks_abort |= STOCK_ABORT in text
            found.left += [f"process {pid}" for pid in children]
            found.left += [path.name for path in Path("/dev/shm").glob(f"*_{rank.pid}_*")]
        found.left += sorted(path.name for path in (self._folder / "tmp").iterdir() if not path.name.startswith("job"))
        return found


def _children_of(pid: int) -> list[str]:
    """Processes that a rank started and that outlived it, if it still runs; orphans go to the process that forks."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def compared(program: Program, *, limit_s: float = 240.0) -> dict[str, object]:
    """What became of a program in fresh processes."""
    way = WAYS.get(program.mode, "route")
    folder = Path(tempfile.mkdtemp(prefix="fresh"))
    try:
        num_aborts = 0
        for _ in range(3):
            if way == "config":
                FreshJob(program, "learn", folder).ended(limit_s)
                if not (folder / "settings.json").exists():
                    way = "tuner"  # it ended before there was anything to learn
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            stock = FreshJob(program, "stock", folder).ended(limit_s)
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            ours = FreshJob(program, way, folder).ended(limit_s)
            if not (stock.is_stocks_abort or ours.is_stocks_abort):
                break
            num_aborts += 1
        is_equal = stock.seen() == ours.seen()
        found: dict[str, object] = {
            "equal": is_equal,
            "way": way,
            "codes": [stock.codes, ours.codes],
            "aborts": num_aborts,
        }
        if not is_equal:
            differing = [
                name for name in ("codes", "records", "words", "left") if getattr(stock, name) != getattr(ours, name)
            ]
            found |= {
                "differing": differing,
                "why": {name: [getattr(stock, name), getattr(ours, name)] for name in differing if name != "records"},
            }
            if "records" in differing:
                found["records"] = _first(stock.records, ours.records)
            found["errors"] = ours.errors
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first(stock: list[str], ours: list[str]) -> str:
    for rank, (one, other) in enumerate(zip(stock, ours, strict=True)):
        if one != other:
            pairs = zip(json.loads(one or "[]"), json.loads(other or "[]"), strict=False)
            return f"rank {rank}: {str(next(((a, b) for a, b in pairs if a != b), (len(one), len(other))))[:600]}"
    return ""
