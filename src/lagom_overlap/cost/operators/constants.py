"""Constants of operators and of training frameworks, as data: TOML files in `data/`, each with how it was fitted."""

import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

from lagom_overlap.cost.operators.gemm import GemmConstants
from lagom_overlap.cost.operators.links import LinkConstants
from lagom_overlap.errors import UnknownNameError

FALLBACK: Final = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConstants:
    """What one GPU does with one operator at a time.

    `stream_bytes_per_s` and `reduction_bytes_per_s` are the bandwidths of memory-bound kernels by `Access`;
    `touch_s` is what such a kernel costs without bytes. `attention_flops` is the rate of a flash attention;
    `peak_flops` the datasheet's dense 2-byte rate, which only the MFU refers to.
    """

    name: str
    fitted_on: str
    gemm: GemmConstants
    stream_bytes_per_s: float
    reduction_bytes_per_s: float
    touch_s: float
    attention_flops: float
    peak_flops: float
    links: LinkConstants

    def __post_init__(self) -> None:
        for field in ("stream_bytes_per_s", "reduction_bytes_per_s", "touch_s", "attention_flops", "peak_flops"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ValueError(f"operators of {self.name!r}: {field} is {value}, must be positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """What a training framework adds to the kernels.

    The host needs `launch_s` to issue one kernel; a pass that the GPU finishes earlier takes the host's time, blended
    by `launch_norm` (p of a p-norm). `memory_efficiency` is what the framework's memory-bound kernels reach of the
    GPU's bandwidths. `optimizer_bytes` is the memory traffic per parameter of the optimizer step,
    `gradient_pass_bytes` that of unscaling, checking and clipping. `data_bytes_per_s` limits what the framework's
    data-parallel collectives reach between nodes, where it is not the wire (0: the wire).
    """

    name: str
    fitted_on: str
    launch_s: float
    launch_norm: float
    memory_efficiency: float
    optimizer_bytes: float
    gradient_pass_bytes: float
    data_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("launch_s", "optimizer_bytes", "gradient_pass_bytes", "data_bytes_per_s"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ValueError(f"framework {self.name!r}: {field} is {value}, must be finite and not negative")
        if not 0 < self.memory_efficiency <= 1:
            raise ValueError(f"framework {self.name!r}: memory_efficiency is {self.memory_efficiency}, must be in (0, 1]")
        if self.launch_norm < 1:
            raise ValueError(f"framework {self.name!r}: launch_norm is {self.launch_norm}, must be at least 1")


def _folder(kind: str) -> Traversable:
    return resources.files(__package__) / "data" / kind


def _names(kind: str) -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _folder(kind).iterdir() if entry.name.endswith(".toml"))


def load_operators(gpu_name: str) -> OperatorConstants:
    """The constants of the GPU whose file's name begins `gpu_name` ("A100-SXM4-80GB" -> a100), else of the fallback."""
    names = [name for name in _names("gpus") if gpu_name.lower().startswith(name)]
    chosen = max(names, key=len) if names else FALLBACK
    text = (_folder("gpus") / f"{chosen}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), OperatorConstants)


def load_framework(name: str) -> FrameworkConstants:
    """The framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in _names("frameworks"):
        raise UnknownNameError.among("framework", name, _names("frameworks"))
    text = (_folder("frameworks") / f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), FrameworkConstants)
