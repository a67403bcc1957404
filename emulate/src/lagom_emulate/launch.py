"""A job's command on emulated GPUs: its environment, its processes, and that nothing of them stays behind.

What is set for the command:

    LAGOM_EMULATION_SOCKET, _GPU, _LAUNCH_NS, _NCCL   where the device finds coordinator, GPUs, host costs, NCCL's model
    LD_LIBRARY_PATH, LD_PRELOAD                       the emulated driver, runtime, BLAS, CUPTI and NCCL
    PYTHONPATH, LAGOM_HOOKS                           the boot folder first, whose sitecustomize arms `hook.py`
    LAGOM_EMULATION_SYMMETRIC_HOSTS                   how many hosts there are of which only the first runs

Of several hosts each runs the command, on this machine and under its name, with a GPU file of its own and

    PET_NNODES, _NODE_RANK, _MASTER_ADDR, _MASTER_PORT   what torchrun takes for its options where they are not given
    NCCL_HOSTID                                          for a real NCCL, which tells hosts apart by their name

On each host the command is the child of a keeper (`keeper.py`), which ends it and all that it started, also workers of
a launcher that was killed, when the job ends or when we do: SIGKILL leaves us no time for it.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import msgspec

import lagom_emulate
from lagom_emulate.keeper import Order, become_subreaper, keeper_command
from lagom_emulate.processes import descendants
from lagom_emulate.settings import SYMMETRIC_HOSTS_VARIABLE, EmulationSettings
from lagom_overlap.cost.nccl.machines import nccl_of
from lagom_overlap.errors import JobError, MissingDependencyError
from lagom_overlap.hardware import Cluster, LinkKind
from lagom_overlap.hardware.gpu_file import names_with, table_of
from lagom_overlap.toml_tables import from_table
from lagom_overlap.trace.gpu_trace import EMULATED_GPU

_GRACE_S: Final = 10.0
"""What a command has to end by itself: after SIGTERM, or after its failure on another host."""
_REAL_DRIVERS: Final = ("/dev/nvidia0", "/proc/driver/nvidia")
PRELOADED: Final = ("libcuda.so.1", "libcudart", "libcublasLt", "libcublas", "libcupti", "libnvidia-ml.so.1", "libnccl")
"""In front of what PyTorch's own RPATH would find."""


def emulated_libraries() -> Path:
    """The folder of the emulated libraries.

    Raises:
        MissingDependencyError: if this installation has none.
    """
    for folder in lagom_emulate.__path__:
        path = Path(folder) / "lib"
        if (path / "libcuda.so.1").is_file():
            return path
    raise MissingDependencyError("the emulated device is not built; run: pip install lagom-emulate")


def refuse_real_gpus() -> None:
    """Raises JobError on a machine with a GPU's driver: a job there would mix the two."""
    for path in _REAL_DRIVERS:
        if Path(path).exists():
            raise JobError(f"this machine has a real GPU ({path} exists); lagom emulate is for machines without one")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaDevice:
    compute_capability: str
    pcie_generation: int


def gpu_text(cluster: Cluster, num_devices: int, host: int = 0) -> bytes:
    """The file of LAGOM_EMULATION_GPU: what the device shows of itself on that host.

    Raises:
        JobError: if CUDA has no such GPU, or we do not know its generation.
    """
    gpu, link = cluster.gpu, cluster.intra
    own = table_of(gpu, "cuda")
    if own is None:
        known = ", ".join(names_with("cuda"))
        raise JobError(f"cluster {cluster.name} has {gpu.name} GPUs, whose file has no [cuda]; emulated are {known}")
    cuda = from_table(own[0], _CudaDevice, own[1], "cuda.")
    switched = link.kind is LinkKind.NVLINK and nccl_of(gpu).nvswitch
    fields = {
        "name": f"NVIDIA {gpu.name}{EMULATED_GPU}",
        "num_sms": gpu.num_sms,
        "memory_bytes": gpu.memory_bytes,
        "l2_bytes": gpu.l2_bytes,
        "compute_capability": cuda.compute_capability,
        "num_devices": num_devices,
        "host_index": host,
        "link": "nvswitch" if switched else "pcie" if link.kind is LinkKind.PCIE else "nvlink_pairs",
        "pcie_generation": cuda.pcie_generation,
        "pcie_width": 16,
    }
    return msgspec.json.encode(fields)


_MAX_SOCKET_PATH: Final = 107
"""Bytes of a unix socket's path (unix(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """A private folder below the system's temporary one: the socket, the hosts' GPU files, NCCL's model."""

    path: Path

    @property
    def socket(self) -> Path:
        """Where the coordinator listens."""
        return self.path / "clock"

    def gpu(self, host: int = 0) -> Path:
        """What the device shows of itself on a host."""
        return self.path / f"gpu{host}.json"

    @property
    def refusal(self) -> Path:
        """Why a process of the command ended before it used a GPU (`hook.REFUSAL`), if one did."""
        return self.path / "refusal"

    @property
    def nccl(self) -> Path:
        """NCCL's model of the cluster."""
        return self.path / "nccl"


@contextlib.contextmanager
def job_folder() -> Iterator[JobFolder]:
    """A fresh folder (mode 0700), removed with all it holds at the end; in /tmp where TMPDIR is too long for it."""
    prefix = "lagom-emulate-"
    longest = JobFolder(path=Path(tempfile.gettempdir(), prefix + "x" * 8)).socket
    parent = "/tmp" if len(os.fsencode(longest)) > _MAX_SOCKET_PATH else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        yield JobFolder(path=Path(name))


def job_environment(
    environment: Mapping[str, str],
    folder: JobFolder,
    settings: EmulationSettings,
    *,
    libraries: Path | None,
    boot: Path,
    symmetric_hosts: int | None = None,
) -> dict[str, str]:
    """The command's environment on the first host; without `libraries` (a job with its own) none is put in front.

    Of `symmetric_hosts` only that host runs.
    """
    prepared = dict(environment) | {
        "LAGOM_EMULATION_SOCKET": str(folder.socket),
        "LAGOM_EMULATION_GPU": str(folder.gpu()),
        "LAGOM_EMULATION_LAUNCH_NS": str(round(settings.launch_s * 1e9)),
        "LAGOM_EMULATION_PYTHON_CLOCK": settings.python_clock,
        "LAGOM_HOOKS": "lagom_emulate.hook",
        "PYTHONPATH": _joined(str(boot), environment.get("PYTHONPATH", "")),
    }
    if symmetric_hosts is not None:
        prepared[SYMMETRIC_HOSTS_VARIABLE] = str(symmetric_hosts)
    if folder.nccl.exists():
        prepared["LAGOM_EMULATION_NCCL"] = str(folder.nccl)
    if libraries is not None:
        prepared["LD_LIBRARY_PATH"] = _joined(str(libraries), environment.get("LD_LIBRARY_PATH", ""))
        found = [str(path) for word in PRELOADED for path in sorted(libraries.glob(f"{word}*"))]
        prepared["LD_PRELOAD"] = _joined(*found, environment.get("LD_PRELOAD", ""))
    return prepared


def host_environments(prepared: Mapping[str, str], folder: JobFolder, num_hosts: int) -> list[dict[str, str]]:
    """The command's environment on each host; one host gets what was prepared, and nothing of torchrun's."""
    if num_hosts == 1:
        return [dict(prepared)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"PET_NNODES": str(num_hosts), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return [
        dict(prepared)
        | shared
        | {
            "LAGOM_EMULATION_GPU": str(folder.gpu(host)),
            "PET_NODE_RANK": str(host),
            "NCCL_HOSTID": f"lagom-emulated-{host}",
        }
        for host in range(num_hosts)
    ]


def _joined(*parts: str) -> str:
    return os.pathsep.join(filter(None, parts))


class _Host:
    """The command on one host, below a keeper of its own."""

    def __init__(self, order: Order) -> None:
        self.code: int | None = None
        ours, theirs = os.pipe()
        try:
            self.keeper = subprocess.Popen(
                keeper_command(theirs), stdin=subprocess.PIPE, pass_fds=(theirs,), start_new_session=True
            )
        finally:
            os.close(theirs)
        self._reports = os.fdopen(ours, "rb", buffering=0)
        self._unread = b""
        assert self.keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.keeper.stdin.write(order.encoded())
            self.keeper.stdin.flush()
        word, number = self._report()
        if word != "started":
            self.end()
            raise OSError(number, os.strerror(number) if word else f"its keeper ended with code {self.code}")

    def poll(self, timeout_s: float | None = 0.0) -> int | None:
        """How the command ended; None: it has not, so far."""
        has_report = b"\n" in self._unread
        if self.code is None and (has_report or select.select([self._reports], [], [], timeout_s)[0]):
            word, number = self._report()
            self.code = number if word == "ended" else self.keeper.wait() or 1
        return self.code

    def tell_to_end(self) -> None:
        """The keeper ends the command and itself."""
        assert self.keeper.stdin is not None
        if not self.keeper.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.keeper.stdin.write(b"end\n")
                self.keeper.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self.keeper.stdin.close()

    def end(self) -> None:
        """Waits for the keeper, which was told to end."""
        self.tell_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(3 * _GRACE_S)
        self.keeper.kill()
        self.keeper.wait()
        self.poll()
        self._reports.close()

    def _report(self) -> tuple[str, int]:
        """The next one; an empty word where the keeper has gone."""
        while b"\n" not in self._unread:
            data = self._reports.read(1 << 12)
            if not data:
                return "", 0
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        word, _, number = line.decode().partition(" ")
        return word, int(number)


class LaunchedJob:
    """The command as children, one for each host's environment; `end` leaves no process of it, nor does our own end.

    Where it has failed on a host, what is left of it there and on the others has some seconds to end by itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        folder: JobFolder,
        *,
        quiet_stdout: bool,
    ) -> None:
        self._mark = f"LAGOM_EMULATION_SOCKET={environments[0]['LAGOM_EMULATION_SOCKET']}".encode()
        self._seen: set[int] = set()
        self._failure, self._failed_s = 0, inf
        self._hosts: list[_Host] = []
        become_subreaper()
        try:
            for environment in environments:
                order = Order(
                    verb=os.getpid(),
                    command=list(command),
                    environment=dict(environment),
                    folder=str(folder.path),
                    quiet_stdout=quiet_stdout,
                    grace_s=_GRACE_S,
                )
                self._hosts.append(_Host(order))
        except OSError as error:
            self.end()
            raise JobError(f"cannot run {command[0]!r}: {error.strerror}") from None

    def is_running(self) -> bool:
        """Whether the command has not ended on all hosts."""
        running = self._running()
        if monotonic() - self._failed_s >= _GRACE_S:
            self._failed_s = inf
            self.end()
            return False
        return bool(running)

    @property
    def exit_code(self) -> int:
        """The command's, of the host that failed first; negative for the signal that ended it. Waits for all."""
        for host in self._hosts:
            host.poll(None)
        self._running()
        return self._failure

    def end(self) -> None:
        """Ends whatever is left of the command: asks, then kills."""
        hosts = [host for host in self._hosts if host.keeper.returncode is None]
        for host in hosts:
            host.tell_to_end()
        for host in hosts:
            host.end()
        # What a keeper left that was killed itself is ours, now that it has gone.
        until_s = monotonic() + _GRACE_S
        while (left := self._left()) and monotonic() < until_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            sleep(0.02)

    def _running(self) -> list[_Host]:
        """The hosts where the command has not ended; notes the first failure among the others."""
        running = [host for host in self._hosts if host.poll() is None]
        if not self._failure:
            self._failure = next((host.code for host in self._hosts if host.code), 0)
            self._failed_s = monotonic() if self._failure else inf
        return running

    def _left(self) -> list[int]:
        """Processes below us that have the job's socket in their environment, or have ended and had."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._seen.add(pid)
        self._seen &= set(descendants(os.getpid()))
        return sorted(self._seen)
