"""What /proc says of the processes of a job: which rank one is, whether it sleeps, who descends from whom."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MAX_DIGITS = 6
_MAX_LAUNCH_QUEUES = 32
_ASLEEP = ("S", "I", "Z", "X")
_WATCHDOGS = "pt_nccl_"
"""How the names of PyTorch's threads begin that look after a job (watchdog, heartbeat): never the job's own work."""


def rank_of(pid: int) -> tuple[int | None, int]:
    """RANK and WORLD_SIZE in a process's environment; None and 1 where they are not there."""
    found = _numbers(pid, {b"RANK": -1, b"WORLD_SIZE": 1})
    return None if found[b"RANK"] < 0 else found[b"RANK"], max(1, found[b"WORLD_SIZE"])


def local_world_size_of(pid: int) -> int | None:
    """LOCAL_WORLD_SIZE in a rank's environment; None where it, or RANK, is not there."""
    found = _numbers(pid, {b"RANK": -1, b"LOCAL_WORLD_SIZE": 0})
    return found[b"LOCAL_WORLD_SIZE"] if found[b"RANK"] >= 0 and found[b"LOCAL_WORLD_SIZE"] else None


def launch_queues_of(pid: int) -> int:
    """CUDA_DEVICE_MAX_CONNECTIONS of a process as it was started, 0 where it is not set or beyond CUDA's 1 to 32."""
    found = _numbers(pid, {b"CUDA_DEVICE_MAX_CONNECTIONS": 0})[b"CUDA_DEVICE_MAX_CONNECTIONS"]
    return found if found <= _MAX_LAUNCH_QUEUES else 0


def _numbers(pid: int, defaults: Mapping[bytes, int]) -> dict[bytes, int]:
    """Whole numbers in a process's environment."""
    found = dict(defaults)
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name in found and value.isdigit() and len(value) < _MAX_DIGITS:
                found[name] = int(value)
    return found


@dataclass(slots=True)
class Activity:
    """Whether a process works, its watchdogs apart: asked from time to time."""

    pid: int
    _ticks: int = -1
    _since_s: float = 0.0

    def has_slept(self, now_s: float, at_least_s: float) -> bool:
        """Whether all its threads sleep and none has used the processor for so long, as far as was asked."""
        ticks, is_asleep = 0, True
        with contextlib.suppress(OSError, ValueError, IndexError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                    fields = _fields(task / "stat")
                    if (task / "comm").read_text(errors="replace").startswith(_WATCHDOGS):
                        continue
                    is_asleep = is_asleep and fields[0] in _ASLEEP
                    ticks += int(fields[11]) + int(fields[12])
        if not is_asleep or ticks != self._ticks:
            self._ticks, self._since_s = ticks, now_s
            return False
        return now_s - self._since_s >= at_least_s


@dataclass(slots=True)
class JobWork:
    """Whether any process below one works, such as a compiler that a rank waits for: asked once a second."""

    pid: int
    _asked_s: float = 0.0
    _ticks: int = 0
    _is_busy: bool = True

    def is_busy(self, now_s: float) -> bool:
        """Whether they took more than a tenth of a processor since the last question."""
        if now_s - self._asked_s >= 1.0:
            ticks = sum(_ticks_of(pid) for pid in descendants(self.pid))
            allowed = 0.1 * (now_s - self._asked_s) * os.sysconf("SC_CLK_TCK")
            self._is_busy = not self._asked_s or abs(ticks - self._ticks) > allowed
            self._asked_s, self._ticks = now_s, ticks
        return self._is_busy


def _ticks_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _fields(Path(f"/proc/{pid}/stat"))
        return int(fields[11]) + int(fields[12])
    return 0


def descendants(pid: int) -> list[int]:
    """The processes below one, children before theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                children.setdefault(int(_fields(folder / "stat")[1]), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def _fields(stat: Path) -> list[str]:
    """The fields of a stat file from the state on: the name before it may hold anything."""
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
