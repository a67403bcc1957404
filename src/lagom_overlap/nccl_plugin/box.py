"""Which box this is to NCCL: its GPUs' name, their number and their wiring, by NVML and without a context."""

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Final

NVML: Final = "libnvidia-ml.so.1"
_NAME_ROOM: Final = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_MAX_LINKS: Final = 18  # NVML_NVLINK_MAX_LINKS
_P2P_READ, _P2P_NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t
_DIGITS: Final = 16
"""Hex digits of a topology's digest: 64 bits, which no two boxes share by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One node's GPUs; `topology` is a hash that boxes of one kind share: no bus or serial numbers in it."""

    gpu: str
    num_gpus: int
    topology: str


@cache
def this_box() -> Box | None:
    """The GPUs of this node, whichever of them this process may use; None where NVML says nothing."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():
            return None
        return _box(nvml)
    except (OSError, AttributeError):
        return None


def _box(nvml: ctypes.CDLL) -> Box | None:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
        return None
    devices = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            return None
        devices.append(device)
    names = [_name(nvml, device) for device in devices]
    lines = [f"{name} {_num_links(nvml, device)}" for name, device in zip(names, devices, strict=True)]
    lines += [
        f"{i} {j} " + " ".join(_between(nvml, devices[i], devices[j])) for i, j in combinations(range(len(devices)), 2)
    ]
    topology = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]
    return Box(gpu=names[0], num_gpus=len(devices), topology=topology)


def _name(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_NAME_ROOM)
    return text.value.decode("utf-8", "replace") if not nvml.nvmlDeviceGetName(device, text, _NAME_ROOM) else "?"


def _num_links(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> int:
    """Its active NVLinks."""
    is_active, num = ctypes.c_int(), 0
    for link in range(_MAX_LINKS):
        num += not nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(is_active)) and is_active.value == 1
    return num


def _between(nvml: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p) -> list[str]:
    """How far up their common ancestor is, and whether they read each other directly and over NVLink."""
    value = ctypes.c_int()
    kinds = []
    if hasattr(nvml, "nvmlDeviceGetTopologyCommonAncestor"):
        error = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other, ctypes.byref(value))
        kinds.append("?" if error else str(value.value))
    for capability in (_P2P_READ, _P2P_NVLINK):
        error = nvml.nvmlDeviceGetP2PStatus(one, other, capability, ctypes.byref(value))
        kinds.append("?" if error else str(value.value))
    return kinds
