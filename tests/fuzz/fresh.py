"""Jobs of fresh processes: one program by stock PyTorch and with us, compared by all that an observer sees.

That is what they computed, exit codes, the exception's last words, and what they left: processes, files, shared memory.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import fuzzing  # noqa: E402 - also says what the process that forks imports
from programs import Program  # noqa: E402

from forked_python import ForkedPython  # noqa: E402
from ports import free_port  # noqa: E402

RANK = Path(__file__).with_name("fresh_rank.py")
WAYS = {
    "observe": "observe",
    "launched": "online",
    "saved": "config",
    "relaunched": "config",
    "online": "tuner",
    "route": "route",
}
LAUNCHED = {
    "observe": ["--observe"],
    "online": ["--online"],
    "config": ["--online", "--config", "{folder}/settings.json"],
}
"""Ways of `lagom run`, with its flags."""
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
    """Its processes, started: the ranks, or what launches them."""

    def __init__(self, program: Program, way: str, folder: Path) -> None:
        self._folder, self._way, self._program = folder, way, program
        (folder / "tmp").mkdir(exist_ok=True)
        for name in ("run", f"{way}.*", "events.*", "journal.*"):  # of an earlier try
            for old in folder.glob(name):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        port, number = str(free_port()), str(program.num_ranks)
        words = [number, port, way, program.text(), str(folder / f"{way}.")]
        environment = os.environ | {"TMPDIR": str(folder / "tmp"), "KINETO_LOG_LEVEL": "6"}
        self._processes: list[ForkedPython | subprocess.Popen[bytes]] = []
        self._is_launched = program.has("spawned") or program.has("launches")
        if self._is_launched:
            command = [sys.executable, str(RANK), "spawn", *words]
            if not program.has("spawned"):
                torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", number, "--master-port", port]
                command = [sys.executable, *torchrun, str(RANK), "env", *words]
            if way in LAUNCHED:
                lagom = [sys.executable, "-m", "lagom_overlap", "run", *LAUNCHED[way], "--out", str(folder / "run")]
                command = [*(word.format(folder=folder) for word in lagom), "--", *command]
            with self._err(0).open("w") as err:
                self._processes.append(subprocess.Popen(command, env=environment, stdout=err, stderr=err))
            return
        for rank in range(program.num_ranks):
            with self._err(rank).open("w") as err:
                self._processes.append(ForkedPython(RANK, [str(rank), *words], env=environment, stdout=err, stderr=err))

    def _err(self, number: int) -> Path:
        return self._folder / f"{self._way}.err{number}"

    def ended(self, limit_s: float) -> Ended:
        """Waits for all; codes of None: it did not end."""
        found = Ended()
        give_up = time.monotonic() + limit_s
        while any(process.poll() is None for process in self._processes) and time.monotonic() < give_up:
            time.sleep(0.05)
        found.codes = [process.poll() for process in self._processes]
        for number, process in enumerate(self._processes):
            children = _children_of(process.pid)
            process.kill()
            if self._is_launched:
                process.wait(30)
                _end_all(children)
            text = self._err(number).read_text()
            errors = [
                line for line in text.splitlines() if line and not line.startswith((" ", "lagom:", "[", "frame #"))
            ]  # a frame: of PyTorch's own warnings
            words = next((line for line in reversed(errors) if "Error" in line or "Interrupt" in line), "")
            # Launchers say whose end they saw first, and who is left says what broke first.
            if not self._is_launched and not self._program.has("dies"):
                found.words.append(re.sub(r"\[[^]]*\]:\d+", "[...]", words))
            found.errors.append(text[-3000:])
            found.is_stocks_abort |= STOCK_ABORT in text
            found.left += [f"process {pid}" for pid in children]
            found.left += [path.name for path in Path("/dev/shm").glob(f"*_{process.pid}_*")]
        for rank in range(self._program.num_ranks):
            out = self._folder / f"{self._way}.{rank}"
            found.records.append(out.read_text() if out.exists() else "")
        names = sorted(path.name for path in (self._folder / "tmp").iterdir())
        found.left += [name for name in names if not name.startswith(("job", "torchelastic_", "pytorch-errorfile-"))]
        return found

    def wrong_files(self) -> list[str]:
        """What is wrong with our own files: every rank has its own, in which it begins once."""
        if self._way not in LAUNCHED or self._program.has("again") or self._program.has("without"):
            return []
        folder = self._folder / "run" if self._is_launched else self._folder
        wrong = []
        for rank in range(self._program.num_ranks):
            events = folder / f"events.{rank}.jsonl"
            lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
            begins = [line["rank"] for line in lines if line["event"] == "begin"]
            if begins != [rank]:
                wrong.append(f"{events.name}: begun by {begins}")
        return wrong


def _children_of(pid: int) -> list[str]:
    """Processes that a rank started and that outlived it, if it still runs; orphans go to the process that forks."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def _end_all(pids: list[str]) -> None:
    """Ranks of a launcher that did not end, and whatever those have started."""
    for pid in pids:
        _end_all(_children_of(int(pid)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def compared(program: Program, *, allowed_s: float = fuzzing.ALLOWED_S) -> dict[str, object]:
    """What became of a program in fresh processes; with us it may take as long as in persistent ones."""
    way = WAYS.get(program.mode, "route")
    folder = Path(tempfile.mkdtemp(prefix="fresh"))
    try:
        num_aborts = 0
        for _ in range(3):
            if way == "config":
                FreshJob(program.alone(), "learn", folder).ended(fuzzing.STOCK_LIMIT_S)
                if not (folder / "settings.json").exists():
                    way = "tuner"  # it ended before there was anything to learn
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            began_s = time.monotonic()
            stock = FreshJob(program, "stock", folder).ended(fuzzing.STOCK_LIMIT_S)
            stock_s = time.monotonic() - began_s
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            job = FreshJob(program, way, folder)
            ours = job.ended(fuzzing.limit_s(stock_s, allowed_s))
            if not (stock.is_stocks_abort or ours.is_stocks_abort):
                break
            num_aborts += 1
        wrong_files = job.wrong_files() if None not in ours.codes else []
        is_equal = stock.seen() == ours.seen() and not wrong_files
        found: dict[str, object] = {
            "equal": is_equal,
            "way": way,
            "codes": [stock.codes, ours.codes],
            "aborts": num_aborts,
            "seconds": [round(stock_s, 1), round(time.monotonic() - began_s - stock_s, 1)],
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
            found["files"] = wrong_files
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first(stock: list[str], ours: list[str]) -> str:
    for rank, (one, other) in enumerate(zip(stock, ours, strict=True)):
        if one != other:
            lines = [[json.loads(line) for line in text.splitlines()] for text in (one, other)]
            pairs = zip(*([record for life in lives for record in life] for lives in lines), strict=False)
            return f"rank {rank}: {str(next(((a, b) for a, b in pairs if a != b), (len(one), len(other))))[:600]}"
    return ""
