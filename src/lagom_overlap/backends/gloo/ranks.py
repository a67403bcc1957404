"""The rank processes of a controller: start them, command them, notice at once when one dies.

The controller is no rank. It sleeps while they measure (it waits on rank 0's answer and on every rank's end together)
and so does not disturb what is timed. Ranks live in sessions of their own, out of reach of the terminal's Ctrl-C; they
end by `close`, and by themselves when the controller ends in any way. stderr goes to files without a name, so that
nothing is left behind.
"""

import contextlib
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import lagom_overlap
from lagom_overlap.engines.messages import PEER_LOST, Command, Join, Listening, Ready, Reply, Stop, decode_reply, encode
from lagom_overlap.errors import BackendError, RankError

START_TIMEOUT_S: Final = 120.0
"""From the first process until all ranks have met: importing torch is slow on a busy machine. Chosen, not measured."""
STOP_TIMEOUT_S: Final = 3.0
"""How long ranks may take to end on command before they are killed. Chosen, not measured."""
BLAME_GRACE_S: Final = 0.5
"""How long to wait after the first death before naming a culprit: others die because they lost it, and say so."""
_MODULE: Final = "lagom_overlap.engines.gloo_worker"
_TAIL_BYTES: Final = 4000
"""Read from the end of a dead rank's stderr; its last lines have fewer. Chosen."""
_TAIL_LINES: Final = 6
"""What of them is said: the end of a traceback."""


class _RankProcess:
    """One spawned rank."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else self._stderr,
                stderr=self._stderr,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise BackendError(f"rank {rank} could not be started: {error}") from error
        self.pidfd = os.pidfd_open(self.process.pid)

    def send(self, line: bytes) -> None:
        """Writes to its stdin; a rank that is gone is noticed by whoever waits for the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def last_words(self) -> str:
        """The end of its stderr in one line, for an error's message; empty if it said nothing."""
        fd = self._stderr.fileno()
        size = os.fstat(fd).st_size
        text = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        return " | ".join(line.strip() for line in text.splitlines()[-_TAIL_LINES:])

    def state(self) -> str:
        """How it ended, or what the kernel says it does now."""
        code = self.process.poll()
        if code is None:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii", errors="replace")
            letter = stat.rpartition(")")[2].split()[0]
            return "is stopped (SIGSTOP or a debugger)" if letter in "Tt" else "did not answer"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """Ends it and whatever it started, and frees its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        os.close(self.pidfd)
        self._stderr.close()


class RankProcesses:
    """Ranks 0 to n-1 on this machine; under a launcher (`joined`) only the child that is rank 0.

    Call from a thread that lives as long as the ranks: the kernel kills them when the starting thread ends.
    """

    def __init__(
        self, num_ranks: int, *, engine: str = "gloo", prefix: Sequence[str] = (), joined: bool = False
    ) -> None:
        """Starts them and waits until all have met.

        Raises:
            RankError: if one ends, or they have not met within `START_TIMEOUT_S`.
        """
        self._num_ranks = num_ranks
        self._joined = joined
        self._unread = b""
        self._ranks: list[_RankProcess] = []
        try:
            for rank in range(1 if joined else num_ranks):
                command = [*prefix, sys.executable, "-P", "-m", _MODULE, f"--rank={rank}", f"--ranks={num_ranks}"]
                command += [f"--parent={os.getpid()}", f"--engine={engine}", *(["--joined"] if joined else [])]
                self._ranks.append(_RankProcess(rank, command, _environment(joined=joined)))
            self.ready = self._meet(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty after `close`."""
        return tuple(rank.process.pid for rank in self._ranks)

    def exchange(self, command: Command, what: str, timeout_s: float) -> Reply:
        """Rank 0's answer to a command; `what` says in an error what was going on.

        Whatever interrupts it (an error, Ctrl-C) ends the ranks: they would answer an old question later.

        Raises:
            RankError: if a rank ends, or there is no answer in time.
        """
        if not self._ranks:
            raise BackendError("the ranks have ended; open the backend again")
        try:
            self._ranks[0].send(encode(command))
            return self._reply(what, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every rank, politely where they listen; safe to call twice."""
        ranks, self._ranks = self._ranks, []
        if not ranks:
            return
        try:
            if all(rank.process.poll() is None for rank in ranks):
                ranks[0].send(encode(Stop()))
                if self._joined:  # the others must hear it from rank 0, or they would see it vanish
                    select.select([ranks[0].pidfd], [], [], STOP_TIMEOUT_S)
        finally:
            for rank in ranks:
                rank.kill()

    def _meet(self, deadline: float) -> Ready:
        what = "starting"
        if not self._joined:
            listening = self._reply(what, deadline, START_TIMEOUT_S)
            if not isinstance(listening, Listening):
                raise BackendError(f"rank 0 said {listening}, expected its port")
            for rank in self._ranks[1:]:
                rank.send(encode(Join(listening.port)))
        ready = self._reply(what, deadline, START_TIMEOUT_S)
        if not isinstance(ready, Ready):
            raise BackendError(f"rank 0 said {ready}, expected to be ready")
        return ready

    def _reply(self, what: str, deadline: float, timeout_s: float) -> Reply:
        stdout = self._ranks[0].process.stdout
        assert stdout is not None
        while b"\n" not in self._unread:
            watched = [stdout.fileno(), *(rank.pidfd for rank in self._ranks)]
            readable, _, _ = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._no_answer(what, timeout_s)
            data = os.read(stdout.fileno(), 1 << 16) if stdout.fileno() in readable else b""
            self._unread += data
            if not data:
                raise self._death(what)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return decode_reply(line)
        except ValueError as error:
            raise BackendError(f"rank 0 answered nonsense while {what}: {error}") from error

    def _death(self, what: str) -> RankError:
        """The error for the first rank that ended of its own, not because another did."""
        deadline = time.monotonic() + BLAME_GRACE_S
        while time.monotonic() < deadline and not any(self._ended_alone(rank) for rank in self._ranks):
            time.sleep(0.02)
        ended = [rank for rank in self._ranks if rank.process.poll() is not None]
        culprits = [rank for rank in ended if self._ended_alone(rank)] or ended or self._ranks[:1]
        culprit = culprits[0]
        if self._joined and culprit.process.poll() == PEER_LOST:
            others = "rank 1" if self._num_ranks == 2 else f"one of ranks 1 to {self._num_ranks - 1}"
            return RankError(f"{others} went away while {what}; rank 0 says: {culprit.last_words()}")
        return RankError(self._describe(culprit, what))

    def _no_answer(self, what: str, timeout_s: float) -> RankError:
        stopped = [rank for rank in self._ranks if "stopped" in rank.state()]
        blamed = "; ".join(self._describe(rank, what) for rank in stopped or self._ranks)
        return RankError(f"no answer within {timeout_s:g} s: {blamed}")

    @staticmethod
    def _ended_alone(rank: _RankProcess) -> bool:
        code = rank.process.poll()
        return code is not None and code not in (0, PEER_LOST)

    @staticmethod
    def _describe(rank: _RankProcess, what: str) -> str:
        last_words = rank.last_words()
        tail = f"; it last said: {last_words}" if last_words else ""
        return f"rank {rank.rank} (process {rank.process.pid}) {rank.state()} while {what}{tail}"


def _environment(*, joined: bool) -> dict[str, str]:
    """Ours, with one thread a rank, this package on the path, and no other launcher's traces."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings would be taken for a rank's last words
    package_root = str(Path(lagom_overlap.__file__).parents[1])
    if package_root not in site.getsitepackages():  # run from a checkout: the ranks must find the same code
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *([inherited] if inherited else [])])
    if not joined:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(variable, None)
    return environment
