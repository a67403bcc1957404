"""Whether a copy to the host is a checkpoint's: contents to be kept, by which nobody decides what comes next."""

import sys
from typing import Final

_SAVERS: Final = (
    "torch.serialization",
    "torch.distributed.checkpoint",
    "torch.distributed._state_dict_utils",
    "torch.distributed.fsdp._state_dict_utils",
    "safetensors",
    "megatron.core.dist_checkpointing",
    "deepspeed.checkpoint",
    "deepspeed.runtime.checkpoint_engine",
)
"""Modules, and packages with all that is in them, that copy tensors in order to write them away."""


def is_saving() -> bool:
    """Whether one of them is among the callers. By its frames, since a job may have imported any function by name."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_SAVERS) and any(name == each or name.startswith(f"{each}.") for each in _SAVERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return False
