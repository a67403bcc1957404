"""Which NCCL a process has loaded, and which one it would load."""

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Final

from lagom_overlap.nccl_plugin.support import NcclVersion

SONAME: Final = "libnccl.so.2"


def loaded_nccl() -> NcclVersion | None:
    """The release of the NCCL in this process, whichever file it is from; None: none that says so.

    `torch.cuda.nccl.version()` is what PyTorch was compiled with: a preloaded or replaced library is another one.
    """
    return _version_of(SONAME, os.RTLD_NOLOAD | os.RTLD_NOW)


def installed_nccl() -> NcclVersion | None:
    """The release of the NCCL that this Python would load, or None."""
    candidates = [SONAME]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        candidates.append(str(Path(folder) / "nccl" / "lib" / SONAME))
    return next((version for name in candidates if (version := _version_of(name, os.RTLD_NOW))), None)


def _version_of(name: str, mode: int) -> NcclVersion | None:
    code = ctypes.c_int(0)
    try:
        if ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(code)):
            return None
    except (OSError, AttributeError):
        return None
    return code.value // 10000, code.value // 100 % 100, code.value % 100
