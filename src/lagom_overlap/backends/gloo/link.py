"""An emulated link: every rank in one private network namespace whose loopback has a rate limit.

What is emulated is bandwidth alone. All ranks' traffic leaves through one token bucket (tc tbf) on the namespace's
loopback, of `num_ranks` times the rate of one direction of the wanted link: in a ring, every rank sends at once. With
two ranks that is a full-duplex wire, except that one direction may use what the other leaves. No latency, no loss, no
topology is added (beyond the queue of the bucket), packets are at most 9000 bytes, and copies still cost CPU time.
It is a slower loopback, not a cluster.

Needs no privilege where user namespaces are allowed: `unshare`, `nsenter` (util-linux), `ip` and `tc` (iproute2).
"""

import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from typing import IO, Final

from lagom_overlap.errors import BackendError
from lagom_overlap.units import GBIT_PER_S

TOOLS: Final = ("unshare", "nsenter", "ip", "tc")
_ADMIN_FOLDERS: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where `ip` and `tc` lie on systems that leave these out of an ordinary user's PATH."""
_BURST: Final = "512kb"
_QUEUE: Final = "16mb"
_PROBE_BYTES_PER_S: Final = 125e6
"""1 Gbit/s; any rate shows whether a namespace can be set up."""
_TIMEOUT_S: Final = 10.0
"""Far more than setting up a namespace takes."""
_MIN_BYTES_PER_S: Final = 1e6
"""Below it a job's own handshakes would take seconds. Chosen."""
_INSTEAD: Final = 'with the link "loopback" none is emulated'


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *_ADMIN_FOLDERS))


def _missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]


def _set_up(total_bytes_per_s: float, then: str) -> list[str]:
    """The command that enters a new namespace, shapes its loopback and then runs a shell command."""
    rate = f"{round(8 * total_bytes_per_s)}bit"
    script = (
        f"export PATH={shlex.quote(_path())}; ip link set lo up && ip link set lo mtu 9000 && "
        f"tc qdisc add dev lo root tbf rate {rate} burst {_BURST} limit {_QUEUE} && {then}"
    )
    return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]


def probe_link_emulation() -> str | None:
    """None if a link can be emulated on this machine, else why not."""
    missing = _missing_tools()
    if missing:
        return f"missing: {', '.join(missing)} (packages util-linux and iproute2)"
    try:
        completed = subprocess.run(
            _set_up(_PROBE_BYTES_PER_S, "true"), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"setting up a network namespace took more than {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"unshare could not be started: {error}"
    return (
        None
        if completed.returncode == 0
        else _first_line(completed.stderr) or f"unshare ended with {completed.returncode}"
    )


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def _read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """What an unbuffered pipe brings up to its first newline, or to its end.

    Raises:
        TimeoutError: if neither has come in time.
    """
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        byte = os.read(pipe.fileno(), 1)
        if not byte:
            break
        line += byte
    return line


class EmulatedLink:
    """A namespace with a shaped loopback, held by a process that ends when we do."""

    def __init__(self, bytes_per_s: float, num_ranks: int) -> None:
        """Sets it up.

        Raises:
            BackendError: if the rate is impossible or the machine refuses.
        """
        if not _MIN_BYTES_PER_S <= bytes_per_s < float("inf"):
            raise BackendError(
                f"an emulated link of {bytes_per_s / GBIT_PER_S:g} Gbit/s: must be finite and at least "
                f"{_MIN_BYTES_PER_S / GBIT_PER_S:g} Gbit/s"
            )
        missing = _missing_tools()
        if missing:
            raise BackendError(f"cannot emulate a link: missing {', '.join(missing)}; {_INSTEAD}")
        # The holder reads its stdin, a pipe of ours: it ends with us, however we end.
        self._holder = subprocess.Popen(
            _set_up(bytes_per_s * num_ranks, "echo ready && exec cat"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._wait_until_set_up()
        except BaseException:
            self.close()
            raise

    def _wait_until_set_up(self) -> None:
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        try:
            reply = _read_line(self._holder.stdout, _TIMEOUT_S)
        except TimeoutError:
            raise BackendError(f"setting up a network namespace took more than {_TIMEOUT_S:g} s; {_INSTEAD}") from None
        if reply != b"ready\n":
            self._kill()
            reason = _first_line(self._holder.stderr.read().decode(errors="replace"))
            raise BackendError(f"cannot emulate a link on this machine: {reason}; {_INSTEAD}")

    @property
    def prefix(self) -> list[str]:
        """What to put before a command so that it runs inside."""
        target = str(self._holder.pid)
        return ["nsenter", "--preserve-credentials", "--user", "--net", "--target", target, "--"]

    def close(self) -> None:
        """Frees the namespace; safe to call twice."""
        self._kill()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()

    def _kill(self) -> None:
        """Ends the holder and whatever tool it waits for; they are a session of their own."""
        if self._holder.poll() is None:
            os.killpg(self._holder.pid, signal.SIGKILL)
            self._holder.wait()
