"""The parent of a job's command on one host: whatever ends the verb, SIGKILL included, ends the command with it.

A verb that is killed can end nothing. So the command is a child of this small process, whose stdin is a pipe that only
the verb writes to: a further line is its wish, end of file without one its end. Nothing of the command escapes,
whatever session, environment or parent it gives itself: the keeper is a subreaper (PR_SET_CHILD_SUBREAPER), so that all
orphans below it become its children. Should the keeper be killed, the kernel sends the command SIGTERM
(PR_SET_PDEATHSIG: its first process only, and a launcher ends its workers), and the verb ends what is left.

`keeper_command` starts it with the standard library alone. Its order comes as a line of JSON on stdin; what it reports
goes to a pipe of its own, a line each: `started PID` or `failed ERRNO`, then `ended CODE`.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from lagom_emulate.processes import descendants

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02
_KILLED_S: Final = 10.0
"""Time that processes get to vanish after SIGKILL; one that hangs in the kernel never does. Chosen, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command and its environment. `grace_s` is what it has to end after SIGTERM.

    `folder` is the verb's own, which the keeper removes where the verb, process `verb`, can no longer do so.
    """

    verb: int
    command: list[str]
    environment: dict[str, str]
    folder: str
    quiet_stdout: bool
    grace_s: float

    def encoded(self) -> bytes:
        """The line for a keeper's stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"


def keeper_command(report: int) -> list[str]:
    """The command of a keeper that reports to this descriptor: this Python and this package, without `site`."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    code = f"import sys; sys.path[:] = {paths!r}; from lagom_emulate.keeper import keep; keep({report})"
    return [sys.executable, "-I", "-S", "-c", code]


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep(report: int) -> None:
    """Starts the command, reports its end, and leaves nothing of it once the verb wishes so or has gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # Whoever started us may ignore SIGCHLD: then the kernel would take our children, and nobody hear of their end.
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # a handler, which the command does not inherit as it would SIG_IGN
    become_subreaper()
    order = _read_order()
    if order is None:
        return
    kept = _Command(order, report)
    while not kept.is_told_to_end():
        pass
    kept.end()
    if not kept.is_wished or os.getppid() != order.verb:  # the parent changes a moment after its files are closed
        shutil.rmtree(order.folder, ignore_errors=True)


def _read_order() -> Order | None:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            return None
        line += data
    return Order(**json.loads(line))


class _Command:
    """The command as a child in a session of its own."""

    def __init__(self, order: Order, report: int) -> None:
        self._report, self._grace_s = report, order.grace_s
        self._pid, self._has_ended, self.is_wished = 0, False, False
        self._wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def die_with_keeper() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != keeper:  # it was killed before the kernel knew
                os._exit(1)

        try:
            process = subprocess.Popen(
                order.command,
                env=order.environment,
                stdin=subprocess.DEVNULL,
                stdout=2 if order.quiet_stdout else None,
                start_new_session=True,
                preexec_fn=die_with_keeper,  # noqa: PLW1509  # one thread
            )
        except OSError as error:
            self._say(f"failed {error.errno}")
            return
        process.returncode = 0  # `_reap` waits for it
        self._pid = process.pid
        self._say(f"started {process.pid}")

    def is_told_to_end(self) -> bool:
        """Whether the verb wishes so or has gone. Waits for anything to happen; takes the processes that have ended."""
        if 0 not in self._reap(0):
            return False
        self.is_wished = bool(os.read(0, 1 << 12))
        return True

    def end(self) -> None:
        """Asks the command to end, then kills it and all below us."""
        until_s = monotonic() + self._grace_s
        if self._pid and not self._has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGTERM)
        while self._pid and not self._has_ended and monotonic() < until_s:
            self._reap(timeout_s=_POLL_S)
        until_s = monotonic() + _KILLED_S
        while (left := descendants(os.getpid())) and monotonic() < until_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap(timeout_s=_POLL_S)

    def _reap(self, *also: int, timeout_s: float | None = None) -> list[int]:
        """Takes the processes that have ended, once one may have; reports the command's code. What is readable."""
        readable, _, _ = select.select([self._wake, *also], [], [], timeout_s)
        if self._wake in readable:
            os.read(self._wake, 1 << 12)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._pid:
                    self._has_ended = True
                    self._say(f"ended {os.waitstatus_to_exitcode(found[1])}")
        return readable

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the verb has gone
            os.write(self._report, line.encode() + b"\n")
