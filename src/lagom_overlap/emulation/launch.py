"""A job's command on emulated GPUs: its environment, its processes, and that nothing of them stays behind.

What is set for the command:

    LAGOM_EMULATION_SOCKET, _GPU, _LAUNCH_NS, _NCCL   where the device finds coordinator, GPUs, host costs, NCCL's model
    LD_LIBRARY_PATH, LD_PRELOAD                       the emulated driver, runtime, BLAS, CUPTI and NCCL
    PYTHONPATH                                        the boot folder first, whose sitecustomize arms `hook.py`
    LAGOM_EMULATION_SYMMETRIC_HOSTS                   how many hosts there are of which only the first runs

Of several hosts each runs the command, on this machine and under its name, with a GPU file of its own and

    PET_NNODES, _NODE_RANK, _MASTER_ADDR, _MASTER_PORT   what torchrun takes for its options where they are not given
    NCCL_HOSTID                                          for a real NCCL, which tells hosts apart by their name

The command runs in sessions of its own, and what it leaves is adopted by us (PR_SET_CHILD_SUBREAPER), so that also
workers of a launcher that was killed are found and ended.
"""

import contextlib
import ctypes
import os
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

import lagom_overlap
from lagom_overlap.emulation.processes import descendants
from lagom_overlap.emulation.settings import SYMMETRIC_HOSTS_VARIABLE, EmulationSettings
from lagom_overlap.errors import JobError, MissingDependencyError
from lagom_overlap.hardware import Cluster, LinkKind

_PR_SET_CHILD_SUBREAPER: Final = 36
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
    for folder in lagom_overlap.__path__:
        path = Path(folder) / "emulated_gpu"
        if (path / "libcuda.so.1").is_file():
            return path
    raise MissingDependencyError("the emulated device is not built; run: pip install lagom-overlap")


def refuse_real_gpus() -> None:
    """Raises JobError on a machine with a GPU's driver: a job there would mix the two."""
    for path in _REAL_DRIVERS:
        if Path(path).exists():
            raise JobError(f"this machine has a real GPU ({path} exists); lagom emulate is for machines without one")


def gpu_text(cluster: Cluster, num_devices: int, host: int = 0) -> bytes:
    """The file of LAGOM_EMULATION_GPU: what the device shows of itself on that host.

    Raises:
        JobError: if CUDA has no such GPU, or we do not know its generation.
    """
    gpu, link = cluster.gpu, cluster.intra
    found = [value for prefix, value in _GENERATIONS.items() if gpu.name.upper().startswith(prefix)]
    if not found:
        raise JobError(f"cluster {cluster.name} has {gpu.name} GPUs; emulated are {', '.join(_GENERATIONS)}")
    capability, generation = found[0]
    switched = link.kind is LinkKind.NVLINK and "A40" not in gpu.name.upper()
    fields = {
        "name": f"NVIDIA {gpu.name}",
        "num_sms": gpu.num_sms,
        "memory_bytes": gpu.memory_bytes,
        "l2_bytes": gpu.l2_bytes,
        "compute_capability": capability,
        "num_devices": num_devices,
        "host_index": host,
        "link": "nvswitch" if switched else "pcie" if link.kind is LinkKind.PCIE else "nvlink_pairs",
        "pcie_generation": generation,
        "pcie_width": 16,
    }
    return msgspec.json.encode(fields)


_GENERATIONS: Final = {
    "B200": ("10.0", 5),
    "H200": ("9.0", 5),
    "H100": ("9.0", 5),
    "A100": ("8.0", 4),
    "A40": ("8.6", 4),
    "A10G": ("8.6", 4),
}
"""Compute capability and PCIe generation by the name's beginning: CUDA C++ Programming Guide, NVIDIA's datasheets."""


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


class Job:
    """The command as children, one for each host's environment; `end` leaves no process of it.

    Where it has failed on a host, what is left of it there and on the others has some seconds to end by itself.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], *, quiet_stdout: bool
    ) -> None:
        self._mark = f"LAGOM_EMULATION_SOCKET={environments[0]['LAGOM_EMULATION_SOCKET']}".encode()
        self._seen: set[int] = set()
        self._failure, self._failed_s = 0, inf
        self._processes: list[subprocess.Popen[bytes]] = []
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            for environment in environments:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=2 if quiet_stdout else None,
                        start_new_session=True,
                    )
                )
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
        for process in self._processes:
            process.wait()
        self._running()
        return self._failure

    def end(self) -> None:
        """Ends whatever is left of the command: asks, then kills."""
        self._tell(self._running(), signal.SIGTERM)
        until_s = monotonic() + _GRACE_S
        while self._running() and monotonic() < until_s:
            sleep(0.02)
        self._tell(self._running(), signal.SIGKILL)
        for process in self._processes:
            process.wait()
        # What it left, such as workers in sessions of their own, is ours since it has gone.
        until_s = monotonic() + _GRACE_S
        while (left := self._left()) and monotonic() < until_s:
            for pid in left:
                _signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            sleep(0.02)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        """The hosts' commands that have not ended; notes the first failure among the others."""
        running = [process for process in self._processes if process.poll() is None]
        if not self._failure:
            codes = (process.returncode for process in self._processes)
            self._failure = next((code for code in codes if code), 0)
            self._failed_s = monotonic() if self._failure else inf
        return running

    @staticmethod
    def _tell(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
        for process in processes:
            _signal(process.pid, number, whole_group=True)

    def _left(self) -> list[int]:
        """Processes below us that have the job's socket in their environment, or have ended and had."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._seen.add(pid)
        self._seen &= set(descendants(os.getpid()))
        return sorted(self._seen)


def _signal(pid: int, number: signal.Signals, *, whole_group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if whole_group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
