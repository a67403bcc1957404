"""The ranks of the nccl backend: rank 0 leads, the others follow; each has a plug-in and a record of its own."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.nccl.backend import NcclBackend, follow
from lagom_overlap.backends.nccl.device import CudaDevice
from lagom_overlap.backends.nccl.launched import RankPlace
from lagom_overlap.backends.nccl.session import NcclSession, PluginFiles
from lagom_overlap.nccl_plugin.library import installed_library

LEAST_TIMEOUT_S: Final = 300.0
"""How long a rank waits for the others: NCCL's first collective on many nodes alone may take a minute."""


def lead(launched: RankPlace, request: BackendRequest) -> NcclBackend:
    """Rank 0's backend.

    Raises:
        BackendError: if this rank has no GPU, or the ranks do not meet.
        MissingDependencyError: if this installation lacks the plug-in.
    """
    device = CudaDevice(launched.local_rank)
    session = _session(device, launched, max(request.timeout_s, LEAST_TIMEOUT_S))
    return NcclBackend(request, session, num_ranks=launched.num_ranks, description=device.description)


def follow_rank_0(launched: RankPlace) -> None:
    """The life of another rank.

    Raises:
        BackendError: if this rank has no GPU, or the ranks do not meet.
        MissingDependencyError: if this installation lacks the plug-in.
    """
    session = _session(CudaDevice(launched.local_rank), launched, LEAST_TIMEOUT_S)
    follow(session)
    session.close()


def _session(device: CudaDevice, launched: RankPlace, timeout_s: float) -> NcclSession:
    library = installed_library()
    folder = Path(tempfile.mkdtemp(prefix=f"lagom-nccl-{launched.rank}-"))
    atexit.register(_remove, folder, os.getpid())
    files = PluginFiles(library=library, record=folder / "record.bin")
    return NcclSession(device, files, rank=launched.rank, num_ranks=launched.num_ranks, timeout_s=timeout_s)


def _remove(folder: Path, pid: int) -> None:
    """At exit, but not of a forked child: the folder is its parent's."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
