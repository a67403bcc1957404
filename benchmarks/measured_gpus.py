"""The preset of an NVIDIA GPU by the names that tables give it."""

import re
from typing import Final

from measured_rows import BadRowError, NotModelledError

PRESETS: Final = {
    "A100": "a100_dgx", "A10G": "a10g_g5", "H100": "h100_dgx", "H200": "h200", "B200": "b200", "B300": "b300",
    "GB200": "gb200", "GB300": "gb300", "H100 HBM2E": "h100_hbm2e",
}  # fmt: skip
_WITHOUT: Final = (
    "V100", "A40", "L40S", "H20", "H800", "A800", "GH200", "VR200", "RTX 4090", "RTX PRO 6000",
    "A100 40GB", "A100 PCIE", "H100 PCIE", "H100 NVL", "H200 NVL",
)  # fmt: skip
"""GPUs that such tables name and no preset of a server describes."""
_SAME: Final = re.compile(
    r"^(NVIDIA|DGX|HGX|SXM\d?|NVLINK|NVL72|NV18|80GB|95GB|141GB|180GB|192GB|288GB|HBM3E?|TENSOR|CORE|GPUS?|\d+W)$"
)
"""Words that say nothing else: forms, and the memory that the presets have. PCIe, NVL and 40 GB are other GPUs."""


def preset_of(text: str) -> str:
    """The preset of that GPU; what stands in parentheses is where it was rented.

    Raises:
        BadRowError: if the GPU is not known.
        NotModelledError: if it is, and no preset describes it.
    """
    words = re.split(r"[\s_-]+", re.sub(r"(\d) GB", r"\1GB", re.sub(r"\(.*?\)", " ", text).upper()).strip())
    name = " ".join(word for word in words if word and not _SAME.match(word))
    if name in _WITHOUT:
        raise NotModelledError(f"no preset for {name}")
    if name not in PRESETS:
        raise BadRowError(f"unknown GPU {text[:60]!r}; known here: {', '.join(sorted((*PRESETS, *_WITHOUT)))}")
    return PRESETS[name]
