"""NCCL's environment variables, policies and profilers that take a knob away from tuning, or its measurement.

Source: NCCL 2.30.7 (src/init.cc, src/graph/tuning.cc, src/enqueue.cc): the environment goes before a communicator's
configuration and before a tuner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lagom_overlap.record import read_regular


@dataclass(frozen=True, slots=True)
class Conflict:
    """A variable that is set, and what it does to tuning."""

    variable: str
    value: str
    why: str


_ALWAYS: Final = {
    "NCCL_ALGO": "fixes the algorithms that NCCL offers; a decision for another one is not applied",
    "NCCL_PROTO": "fixes the protocols that NCCL offers; a decision for another one is not applied",
    "NCCL_MIN_CTAS": "is a floor of channels; from NCCL 2.31 on of every call",
    "NCCL_MAX_CTAS": "caps the channels of every communicator",
    "NCCL_MIN_NCHANNELS": "is a floor of the channels of every communicator",
    "NCCL_MAX_NCHANNELS": "caps the channels of every communicator (but not of all-to-all: NCCL_MAX_P2P_NCHANNELS)",
    "NCCL_NVLS_NCHANNELS": "fixes the channels of NVLS",
    "NCCL_NTHREADS": "fixes the threads of rings and trees",
    "NCCL_LL128_NTHREADS": "fixes the threads of LL128",
    "NCCL_THREAD_THRESHOLDS": "moves the size from which NCCL uses all its channels",
    "NCCL_BUFFSIZE": "changes the largest chunk of Simple",
    "NCCL_LL_BUFFSIZE": "changes the largest chunk of LL",
    "NCCL_LL128_BUFFSIZE": "changes the largest chunk of LL128",
    "NCCL_CGA_CLUSTER_SIZE": "fixes how blocks are clustered; counts that are no multiple of it run otherwise",
    "NCCL_CTA_POLICY": "is CTA_POLICY_EFFICIENCY switched off by any tuner that is loaded; ZERO bypasses tuners",
    "NCCL_TUNER_CONFIG_FILE": "is read by NVIDIA's example tuner: as the chained one it answers 1 channel by default",
    "NCCL_PROFILER_PLUGIN": "is the user's own profiler: it stays, and measured steps are timed by PyTorch's",
    "CUDA_DEVICE_MAX_CONNECTIONS": "at 1 kernels start in launch order: right for Megatron's tensor parallelism only",
    "TORCH_NCCL_ENABLE_TIMING": "records events around every collective, which costs overlap",
}
_ONLY: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": ("1",), "NCCL_CTA_POLICY": ("1", "2", "EFFICIENCY", "ZERO")}
"""The values that matter, where not all do."""


def conflicts(environment: Mapping[str, str]) -> tuple[Conflict, ...]:
    """The variables in an environment that stand in the way, in a fixed order."""
    return tuple(
        Conflict(name, value, f"{name} {why}")
        for name, why in _ALWAYS.items()
        if (value := environment.get(name)) and value in _ONLY.get(name, (value,))
    )


_MAX_BYTES: Final = 1 << 20
"""Chosen: such a file has some lines."""
SYSTEM_FILE: Final = Path("/etc/nccl.conf")


def with_conf_files(environment: Mapping[str, str], system: Path = SYSTEM_FILE) -> dict[str, str]:
    """The environment as NCCL has it once it has read its files; a file that cannot be read sets nothing.

    NCCL reads the file that NCCL_CONF_FILE names, else `~/.nccl.conf`, and then `/etc/nccl.conf`; each line is
    NAME=value, a line that begins with # is a comment, and what is set already stays (param.cc, 2.30.7). So a tuner
    that such a file names would be lost in silence behind the NCCL_TUNER_PLUGIN of ours.
    """
    if named := environment.get("NCCL_CONF_FILE"):
        files = [Path(named), system]
    else:
        home = environment.get("HOME")
        files = [*([Path(home) / ".nccl.conf"] if home else []), system]
    variables = dict(environment)
    for path in files:
        try:
            lines = read_regular(path, _MAX_BYTES).decode(errors="replace").split("\n")
        except OSError:
            continue
        for line in lines:
            name, is_set, value = line.removesuffix("\r").partition("=")
            if is_set and name and not name.startswith("#"):
                variables.setdefault(name, value)
    return variables
