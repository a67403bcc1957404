"""libnccl.so.2 through ctypes: one release of NCCL apart from the one that torch has loaded, or that one itself."""

import ctypes
import os
from pathlib import Path
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.loaded import SONAME
from lagom_overlap.nccl_plugin.support import NcclVersion

FIRST_WITH_SHARED_GPUS: Final = (2, 30, 3)
"""Several ranks on one GPU: NCCL_MULTI_RANK_GPU_ENABLE."""
BFLOAT16, SUM = 9, 0  # ncclBfloat16, ncclSum
_UNDEF_INT: Final = -(2**31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC: Final = 0xCAFEBEEF
"""NCCL_CONFIG_INITIALIZER's (nccl.h): a struct without it is refused."""
_HEAD = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")
_MIDDLE = ("split_share", "traffic_class")
_TAIL = (
    "collnet_enable",
    "cta_policy",
    "shrink_share",
    "nvls_ctas",
    "num_channels_per_net_peer",
    "nvlink_centric_sched",
    "graph_usage_mode",
    "num_rma_ctx",
    "max_p2p_peers",
    "graph_stream_ordering",
)


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.30.x; `size` tells other releases how much of theirs is meant."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in _HEAD),
        ("net_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in _MIDDLE),
        ("comm_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in _TAIL),
    )


def make_config(version: int, num_channels: int | None) -> Config:
    """A config that pins the number of channels, if it is given; everything else at NCCL's default."""
    config = Config()
    for name in _HEAD + _MIDDLE + _TAIL:
        setattr(config, name, _UNDEF_INT)
    config.size, config.magic, config.version = ctypes.sizeof(Config), _MAGIC, version
    if num_channels is not None:
        config.min_ctas = config.max_ctas = num_channels
    return config


class NcclLibrary:
    """The library's calls, with their return codes turned into `BackendError`."""

    def __init__(self, path: Path | None) -> None:
        """Loads a file by its absolute path, or takes the library that this process has loaded (torch's).

        A bare name would find torch's own whatever the path says, and without RTLD_DEEPBIND the two would call each
        other's functions.

        Raises:
            BackendError: if there is none, or it is no NCCL.
        """
        try:
            if path is None:
                self._lib = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            else:
                self._lib = ctypes.CDLL(str(path.resolve(strict=True)), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
            self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            where = (
                "torch has loaded no libnccl.so.2; name one with --library" if path is None else f"{path} is no NCCL"
            )
            raise BackendError(f"{where}: {error}") from error
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.code = version.value

    @property
    def version(self) -> NcclVersion:
        """Its release."""
        return self.code // 10000, self.code // 100 % 100, self.code % 100

    def call(self, name: str, *arguments: object) -> None:
        """Calls `name`.

        Raises:
            BackendError: unless it returns ncclSuccess.
        """
        if status := getattr(self._lib, name)(*arguments):
            raise BackendError(f"{name}: {self._lib.ncclGetErrorString(status).decode()}")

    def collective(
        self, *, kind: CollectiveKind, source: int, target: int, count: int, comm: ctypes.c_void_p, stream: int
    ) -> None:
        """One rank's call in bf16; sums, and rank 0 is the root. `count` is that of NCCL's own signature.

        Raises:
            BackendError: if NCCL refuses it.
        """
        ends = ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_size_t(count), ctypes.c_int(BFLOAT16)
        add, root, last = ctypes.c_int(SUM), ctypes.c_int(0), (comm, ctypes.c_void_p(stream))
        match kind:
            case CollectiveKind.ALL_GATHER:
                self.call("ncclAllGather", *ends, *last)
            case CollectiveKind.REDUCE_SCATTER:
                self.call("ncclReduceScatter", *ends, add, *last)
            case CollectiveKind.ALL_REDUCE:
                self.call("ncclAllReduce", *ends, add, *last)
            case CollectiveKind.BROADCAST:
                self.call("ncclBroadcast", *ends, root, *last)
            case CollectiveKind.REDUCE:
                self.call("ncclReduce", *ends, add, root, *last)
            case _:
                raise ValueError(f"{kind} never reaches a tuner")
