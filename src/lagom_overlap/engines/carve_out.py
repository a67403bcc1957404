"""Torch's SM carve-out: the one knob of the computation's side that a running process can turn.

`torch._C._set_sm_carveout_experimental(n)` (pytorch#147966; in torch 2.13 still "a temporary experimental mitigation")
sets a number in the process's global context. It is read when a kernel is launched, by the launching thread, so it
holds for kernels launched after it, on every stream and device, and for none that is queued already. What heeds it, by
torch's sources (cuBLASLt's products were seen to on an H100); cuBLAS itself only from pytorch#183330 on:

    cuBLASLt (addmm with bias, scaled_mm; mm where torch prefers cuBLASLt)   CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET
    CUTLASS row-wise scaled and grouped products                             the number of SMs they are given
    FlashAttention 3 (torch.nn.attention)                                    sm_margin
    Inductor's persistent Triton templates                                   NUM_SMS, when they are compiled

On Hopper (9.x) cuBLASLt's grids follow it; on later GPUs NVIDIA calls it a heuristic's input (pytorch#183330) and the
supported way is a green context; on earlier ones products are no persistent kernels. What was compiled or captured in a
CUDA graph keeps the carve-out it was made with. ROCm ignores it (pytorch#149280).

Green contexts (`torch.cuda.green_contexts.GreenContext.create(num_sms=)`) bound every kernel, whoever wrote it, but a
stream belongs to one context: the job's own code would have to run on the context's stream. That is no setting that can
be made in a running job, so only their presence is reported.
"""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from lagom_overlap.errors import BackendError

HEEDING_MAJOR = 9
"""Compute capability (major) on which cuBLASLt's grids are known to follow the carve-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarveOutSupport:
    """What this process's torch can do: `why_not` is empty where a carve-out reaches kernels, `caveat` what to know.

    `green_contexts` says in words where torch has them.
    """

    why_not: str
    caveat: str
    green_contexts: str
    num_sms: int | None


def green_contexts() -> str:
    """Where this torch has green contexts, and what they need: up to 2.13 its own library, later NVIDIA's bindings."""
    if not hasattr(torch.cuda, "GreenContext"):
        return "not in this torch"
    if hasattr(torch._C, "_CUDAGreenContext"):
        return "torch.cuda.GreenContext, in torch's own library"
    has_bindings = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
    missing = "" if has_bindings else ", which is not installed (pip install cuda-bindings)"
    return f"torch.cuda.GreenContext, over the package cuda-bindings{missing}"


def carve_out_support() -> CarveOutSupport:
    """What torch and the current device offer; starts CUDA where there is some."""
    green = green_contexts()
    if not hasattr(torch._C, "_set_sm_carveout_experimental"):
        return _none("this torch has no SM carve-out (2.7 or newer has)", green)
    if torch.version.hip is not None:
        return _none("ROCm ignores torch's SM carve-out", green)
    if not torch.cuda.is_available():
        return _none(f"torch {torch.__version__} sees no CUDA device: no kernel would heed a carve-out", green)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    caveat = ""
    if device.major > HEEDING_MAJOR:
        caveat = f"on {device.name} cuBLAS takes a carve-out as a hint only; green contexts are the supported way"
    elif device.major < HEEDING_MAJOR:
        caveat = f"on {device.name} most products are plain kernels, which need no carve-out"
    return CarveOutSupport(why_not="", caveat=caveat, green_contexts=green, num_sms=int(device.multi_processor_count))


def _none(why_not: str, green: str) -> CarveOutSupport:
    return CarveOutSupport(why_not=why_not, caveat="", green_contexts=green, num_sms=None)


class TorchCarveOut:
    """The flag of this process, and its value before us.

    Raises:
        BackendError: if nothing here would heed it.
    """

    def __init__(self) -> None:
        support = carve_out_support()
        if support.why_not:
            raise BackendError(support.why_not)
        self.num_sms = support.num_sms or 0
        self.caveat = support.caveat
        self._before: int | None = torch._C._get_sm_carveout_experimental()

    def set(self, num_sms: int | None) -> None:
        """Leaves that many SMs free from the next launch on; None: as many as before us.

        Raises:
            BackendError: if it leaves no SM.
        """
        if num_sms is not None and not 0 <= num_sms < self.num_sms:
            raise BackendError(f"a carve-out of {num_sms} SMs must lie in 0..{self.num_sms - 1} on this device")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that the function is experimental: said above
            torch._C._set_sm_carveout_experimental(self._before if num_sms is None else num_sms)
