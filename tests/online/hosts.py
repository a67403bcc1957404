"""Machines for a test: Linux namespaces with a network, a name and an /etc/hosts of their own, joined by one switch.

Nothing of it outlives the test: a machine is a `cat` that ends with the pipe to this process, and with it go its
namespaces, their cables, and the switch. Needs `unshare`, `nsenter` and `ip`, and the right to use them: root, or user
namespaces where the system lets anybody make them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DEVICE = "net0"
_USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
_ENTER_USER = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")


def ipv4(number: int) -> str:
    """A machine's address."""
    return f"10.77.0.{number + 1}"


def ipv6(number: int) -> str:
    """The same in the other protocol."""
    return f"fd77::{number + 1}"


@dataclass
class Machine:
    """One set of namespaces."""

    holder: subprocess.Popen[bytes]

    @classmethod
    def boot(cls, within: "Machine | None" = None) -> "Machine":
        """A machine; `within` another one, whose user namespace owns it."""
        prefix = within.prefix if within is not None else ()
        user = () if within is not None else _USER
        command = [*prefix, "unshare", *user, "--net", "--uts", "--mount", "sh", "-c", "echo up; exec cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            words = holder.communicate()[1].decode().strip()
            raise OSError(words or "unshare said nothing")
        return cls(holder)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What starts a command there; it takes the place of the process, which so keeps its id."""
        enter = ("nsenter", "--target", str(self.holder.pid), *_ENTER_USER, "--net", "--uts", "--mount", "--")
        return (*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()))

    def run(self, *scripts: str) -> None:
        """Runs lines of shell as its root."""
        command = [*self.prefix, "sh", "-ec", "\n".join(scripts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip() or f"{scripts} failed")

    def kill_all(self) -> None:
        """Kills every process there, whatever session it is in (torchrun's ranks are in one each)."""
        mine = _network_of(self.holder.pid)
        while others := [pid for pid in _pids() if pid != self.holder.pid and _network_of(pid) == mine]:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def shut_down(self) -> None:
        """Ends it; processes in it would keep its namespaces until they end."""
        self.holder.kill()
        self.holder.communicate()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _network_of(pid: int) -> str:
    """The network namespace of a process that is alive; empty for one that is not, or is not ours to look at."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


@dataclass
class Network:
    """`machines[n]` is called `node<n>` and has `ipv4(n)` and `ipv6(n)` on `DEVICE`; `switch` joins them."""

    switch: Machine
    machines: list[Machine]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, number: int, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """A process on a machine; it is killed, with all others there, when the network is taken down."""
        process = subprocess.Popen([*self.machines[number].prefix, *command], **how)
        self.started.append(process)
        return process

    def unplug(self, number: int) -> None:
        """Pulls a machine's cable: nothing arrives, and nobody is told."""
        self.switch.run(f"ip link set port{number} down")

    def plug_in(self, number: int) -> None:
        """Puts it back."""
        self.switch.run(f"ip link set port{number} up")

    def num_resent(self, number: int) -> int:
        """Segments that a machine has sent again, for want of an answer."""
        command = [*self.machines[number].prefix, "cat", "/proc/net/snmp"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def slow_down(self, number: int, mbit_per_s: float) -> None:
        """Limits what a machine may send, and not what it receives."""
        limit = f"tbf rate {mbit_per_s}mbit burst 32kb latency 400ms"
        self.machines[number].run(f"tc qdisc replace dev {DEVICE} root {limit}")

    def take_down(self) -> None:
        """Ends every process and machine."""
        for machine in self.machines:
            machine.kill_all()
        for process in self.started:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for machine in (*self.machines, self.switch):
            machine.shut_down()


def network(
    folder: Path,
    num_machines: int,
    *,
    has_ipv4: bool = True,
    has_ipv6: bool = True,
    resolves: bool = True,
    own_is_loopback: bool = False,
) -> Network:
    """Machines on one switch; with `resolves` False nobody's name leads to an address.

    `own_is_loopback`: a machine's own name leads to 127.0.1.1 there, as Debian installs it.

    Raises:
        OSError: if the system does not allow it.
    """
    switch = Machine.boot()
    built = Network(switch, [])
    try:
        switch.run("ip link set lo up", "ip link add bridge0 type bridge", "ip link set bridge0 up")
        for number in range(num_machines):
            built.machines.append(Machine.boot(switch))
            _wire(built, number, has_ipv4=has_ipv4, has_ipv6=has_ipv6)
            hosts = _hosts(folder, number, num_machines if resolves else 0, has_ipv4, own_is_loopback)
            _name(built.machines[number], number, hosts)
    except BaseException:
        built.take_down()
        raise
    return built


def _wire(built: Network, number: int, *, has_ipv4: bool, has_ipv6: bool) -> None:
    pid = built.machines[number].holder.pid
    built.switch.run(
        f"ip link add port{number} type veth peer name {DEVICE} netns {pid}",
        f"ip link set port{number} master bridge0",
        f"ip link set port{number} up",
    )
    lines = ["ip link set lo up", f"ip link set {DEVICE} up"]
    if has_ipv4:
        lines.append(f"ip address add {ipv4(number)}/24 dev {DEVICE}")
    if has_ipv6:
        lines.append(f"ip -6 address add {ipv6(number)}/64 dev {DEVICE} nodad")
    built.machines[number].run(*lines)


def _name(machine: Machine, number: int, hosts: Path) -> None:
    machine.run(f"hostname node{number}", f"mount --bind {hosts} /etc/hosts", "mount --bind /dev/null /etc/resolv.conf")


def _hosts(folder: Path, own: int, num_known: int, has_ipv4: bool, own_is_loopback: bool) -> Path:
    path = folder / f"hosts{own}"
    addresses = {number: ipv4(number) if has_ipv4 else ipv6(number) for number in range(num_known)}
    if own_is_loopback:
        addresses[own] = "127.0.1.1"
    lines = ["127.0.0.1 localhost", *(f"{address} node{number}" for number, address in addresses.items())]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@cache
def why_not() -> str:
    """Why this system makes no machines; empty where it does."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(name) is None]
    if missing:
        return f"no network namespaces: {', '.join(missing)} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            network(Path(folder), 1).take_down()
        except OSError as error:
            return f"no network namespaces: {str(error).splitlines()[0]}"
    return ""


@pytest.fixture
def networks(tmp_path: Path) -> Any:
    """Makes networks, `network` without its folder, and takes them down; skips where the system does not allow it."""
    if reason := why_not():
        pytest.skip(reason)
    built: list[Network] = []

    def make(num_machines: int, **how: bool) -> Network:
        built.append(network(tmp_path, num_machines, **how))
        return built[-1]

    maker: Callable[..., Network] = make
    try:
        yield maker
    finally:
        for each in built:
            each.take_down()
