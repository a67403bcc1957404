"""The stand-in injectors of standin.cu: SMs held in idle spin, and channel copies, paced or not.

A run holds its SMs from `start` until the memset that `stop_after` puts behind the victim's last kernel.
"""

import ctypes
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lagom_overlap.cost.measured_surface import InjectorSetting

SOURCE = Path(__file__).with_name("standin.cu")
SHARED_BYTES = 200 * 1024  # of 227 KB a block may have on sm_90: no GEMM block fits next to it
NUM_SLOTS = 8  # NCCL_STEPS
DEADLINE_NS = 2_000_000_000
RESIDENT_TIMEOUT_S = 5.0
REPORT_WORDS = 5  # start_ns, end_ns, num_chunks, sm, reached_deadline
FIFO_BYTES = 256
WINDOW_BYTES = 64 << 20  # user memory per block; 2 blocks already exceed the L2


class StandInError(RuntimeError):
    """A CUDA call failed, or the injector did not become resident."""


def build_library(folder: Path) -> Path:
    """Compile standin.cu for sm_90 with nvcc into `folder`; return the shared library."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libstandin.so"
    command = ["nvcc", "-arch=sm_90", "-O3", "-Xcompiler", "-fPIC", "-shared", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """What the injector did while the victim ran."""

    covered: bool
    bytes_per_s: float | None
    num_held_sms: int | None


class StandIn:
    """One stand-in injector, bound to a setting and to a high-priority stream."""

    def __init__(self, library: Path, setting: InjectorSetting, stream: torch.cuda.Stream) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.standin_error.restype = ctypes.c_char_p
        self._setting, self._stream = setting, stream
        blocks = setting.num_blocks
        device = torch.device("cuda")
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._resident = torch.zeros(blocks, dtype=torch.int32).pin_memory()
        self._reports = torch.zeros(blocks, REPORT_WORDS, dtype=torch.int64, device=device)
        self._moves_data = setting.chunk_bytes is not None
        if self._moves_data:
            assert setting.chunk_bytes is not None
            if WINDOW_BYTES % setting.chunk_bytes or setting.chunk_bytes % 16:
                raise ValueError(
                    f"chunk_bytes {setting.chunk_bytes}: need a multiple of 16 that divides {WINDOW_BYTES}"
                )
            num_pairs = (blocks + 1) // 2
            self._user = torch.randint(0, 256, (blocks * WINDOW_BYTES,), dtype=torch.uint8, device=device)
            self._slots = torch.zeros(num_pairs * NUM_SLOTS * setting.chunk_bytes, dtype=torch.uint8, device=device)
            self._fifos = torch.zeros(num_pairs * FIFO_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()  # made on the default stream, used on others

    def start(self) -> None:
        """Launch and return once every block holds an SM."""
        with torch.cuda.stream(self._stream):
            self._stop.zero_()
            self._reports.zero_()
            if self._moves_data:
                self._fifos.zero_()
        self._stream.synchronize()
        self._resident.zero_()
        self._check(self._launch())
        give_up = time.monotonic() + RESIDENT_TIMEOUT_S
        while (num_resident := int(self._resident.sum())) < self._setting.num_blocks:
            if time.monotonic() > give_up:
                self._stop.fill_(1)
                raise StandInError(f"{num_resident} of {self._setting.num_blocks} blocks became resident")

    def stop_after(self, victim_stream: torch.cuda.Stream) -> None:
        """Make the injector stop when everything now on `victim_stream` has run."""
        with torch.cuda.stream(victim_stream):
            self._stop.fill_(1)

    def finish(self, victim_end: torch.cuda.Event) -> Cover:
        """Wait for the injector; covered means that no block ran into its deadline."""
        del victim_end  # covered by construction: the stop comes after it
        self._stream.synchronize()
        reports = self._reports.cpu()
        elapsed_s = (reports[:, 1] - reports[:, 0]).double() * 1e-9  # ns, from the device's timer
        covered = not bool(reports[:, 4].any())
        held = int(reports[:, 3].unique().numel())
        if not self._moves_data:
            return Cover(covered=covered, bytes_per_s=0.0, num_held_sms=held)
        chunk_bytes = self._setting.chunk_bytes or 0
        # each chunk is read once and written once
        rate = float((2.0 * chunk_bytes * reports[:, 2].double() / elapsed_s).sum())
        return Cover(covered=covered, bytes_per_s=rate, num_held_sms=held)

    def _launch(self) -> int:
        setting = self._setting
        flags = [self._stop, self._resident, self._reports]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in flags]
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        deadline = ctypes.c_ulonglong(DEADLINE_NS)
        shape = [ctypes.c_int(v) for v in (setting.num_blocks, setting.num_threads or 512, SHARED_BYTES)]
        if not self._moves_data:
            return int(self._lib.standin_spin(*pointers, *shape, deadline, stream))
        buffers = [ctypes.c_void_p(t.data_ptr()) for t in (self._user, self._slots, self._fifos)]
        block_rate = (setting.target_bytes_per_s or 0.0) / (2 * setting.num_blocks)  # a chunk is two transfers
        work = [ctypes.c_size_t(WINDOW_BYTES), ctypes.c_size_t(setting.chunk_bytes or 0), ctypes.c_int(NUM_SLOTS)]
        return int(
            self._lib.standin_channel(*pointers, *buffers, *work, ctypes.c_double(block_rate), *shape, deadline, stream)
        )

    def _check(self, status: int) -> None:
        if status:
            raise StandInError(f"CUDA error {status}: {self._lib.standin_error(status).decode()}")


class Spin:
    """One launch of the spinner that ends by itself: its blocks hold their SMs for `duration_s` each."""

    def __init__(self, library: Path, setting: InjectorSetting, stream: torch.cuda.Stream, duration_s: float) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.standin_error.restype = ctypes.c_char_p
        self._num_blocks, self._duration_ns, self.stream = setting.num_blocks, int(duration_s * 1e9), stream
        device = torch.device("cuda")
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._resident = torch.zeros(self._num_blocks, dtype=torch.int32).pin_memory()
        self._reports = torch.zeros(self._num_blocks, REPORT_WORDS, dtype=torch.int64, device=device)
        torch.cuda.synchronize()  # made on the default stream, used on another

    def launch(self) -> None:
        """Enqueue it; does not wait."""
        flags = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (self._stop, self._resident, self._reports)]
        shape = [ctypes.c_int(value) for value in (self._num_blocks, 512, SHARED_BYTES)]
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        status = int(self._lib.standin_spin(*flags, *shape, ctypes.c_ulonglong(self._duration_ns), stream))
        if status:
            raise StandInError(f"CUDA error {status}: {self._lib.standin_error(status).decode()}")

    def first_start_ns(self) -> int:
        """When its first block began, by the device's timer; it must have ended."""
        return int(self._reports.cpu()[:, 0].min())

    def last_start_ns(self) -> int:
        """When its last block began: the spinner held all its SMs."""
        return int(self._reports.cpu()[:, 0].max())
