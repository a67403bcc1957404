"""Traces without names: what may tell whose job this is becomes a number, every figure stays.

Done before the analysis, so that nothing later has ever seen a name. Taken away:

- file names (and with them host names, user names, paths): `rank 3`, or `trace 2` where no rank is known;
- kernel names: their class and a number (`gemm kernel 12`), of communication the kind (`ncclKernel all_reduce 1`);
- communicators and process groups: `group 4`; kept are PyTorch's own `default_pg` and the streams' numbers, and that a
  group is a pipeline's (`pp group 2`), which a piece of advice depends on;
- of the GPU's name every word that is not a maker's or a product's, of NCCL's version all but its numbers;
- in warnings, everything in quotation marks and every path.

Kept: times, sizes, counts, ranks, steps, streams' numbers, grids, the kind of each collective, frameworks by name.
Equal names become equal numbers over all traces given to one `Anonymiser`, different ones different numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from lagom_overlap.analysis.hta import HtaKind, hta_kind
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.trace.gpu_trace import ROLE_CODES, CommCall, EventRole, GpuEvents, GpuTrace, SlowLaunch

KERNEL_WORDS: Final = {
    **{found: found.value for found in KernelClass},
    KernelClass.REDUCTION: "softmax",
    KernelClass.NORMALISATION: "norm",
    KernelClass.CONVOLUTION: "conv",
}
"""A word of each class that `kernel_class` puts into that class again."""
_COMPUTE: Final = ROLE_CODES[EventRole.COMPUTE]
_COMM: Final = ROLE_CODES[EventRole.COMM]
_STREAM: Final = re.compile(r"stream \d{1,19}")
_PIPELINE: Final = re.compile(r"pp|pipeline", re.IGNORECASE)
_VERSION: Final = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}")
_GPU_WORD: Final = re.compile(
    r"NVIDIA|AMD|Intel|Tesla|GeForce|Quadro|Radeon|Instinct|Graphics|Ada|Ti|RTX|GTX|NVL|PCIe|PCIE|OAM"
    r"|\(emulated\)|SXM\d?|HBM\d?e?|\d{1,3}GB|(GB|GH|MI|RTX|[ABHLPTV])\d{1,4}[XASL]?"
)
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_LAUNCH: Final = re.compile(
    r"(cuda|cu|hip)[A-Z][A-Za-z]*Launch[A-Za-z]*|(cuda|cu|hip)Launch[A-Za-z]*|nccl[A-Z][A-Za-z]{1,40}"
)
_PATH: Final = re.compile(r"\S*[/\\]\S*")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Names by the order in which they were first met."""

    given: dict[str, str] = field(default_factory=dict)

    def name(self, real: str, word: Callable[[int], str]) -> str:
        if real not in self.given:
            self.given[real] = word(len(self.given) + 1)
        return self.given[real]


@dataclass(frozen=True, slots=True)
class Anonymiser:
    """Renames traces; keep one for all traces that are shown together."""

    _kernels: _Numbers = field(default_factory=_Numbers)
    _groups: _Numbers = field(default_factory=_Numbers)
    _files: _Numbers = field(default_factory=_Numbers)

    def trace(self, trace: GpuTrace) -> GpuTrace:
        """The trace without names."""
        if trace.rank is not None:
            file = f"rank {trace.rank}"
        else:
            file = self._files.name(trace.file, lambda number: f"trace {number}")
        ops = {call.event: call.op for call in trace.calls}
        return replace(
            trace,
            file=file,
            events=self._events(trace.events, ops),
            calls=tuple(self._call(call) for call in trace.calls),
            gpu_name=" ".join(word for word in re.split(r"[\s\-]+", trace.gpu_name) if _GPU_WORD.fullmatch(word)),
            nccl_version=version[0] if (version := _VERSION.match(trace.nccl_version)) else "",
            marked=tuple(replace(event, name=self._kernel(event.name, None)) for event in trace.marked),
            slow_launches=tuple(replace(call, name=self._launch(call)) for call in trace.slow_launches),
            warnings=tuple(_PATH.sub("…", _QUOTED.sub("…", text.replace(trace.file, file))) for text in trace.warnings),
        )

    def _call(self, call: CommCall) -> CommCall:
        return replace(call, communicator=self._group(call.communicator), dtype="")

    def _launch(self, call: SlowLaunch) -> str:
        """A launch's name where it is CUDA's, HIP's or NCCL's own, which everybody has."""
        return call.name if _LAUNCH.fullmatch(call.name) else "collective" if call.is_collective else "launch"

    def _group(self, name: str) -> str:
        if name == "default_pg" or _STREAM.fullmatch(name):
            return name
        kind = "pp " if _PIPELINE.search(name) else ""
        return self._groups.name(name, lambda number: f"{kind}group {number}")

    def _events(self, events: GpuEvents, ops: dict[int, str]) -> GpuEvents:
        roles: dict[int, tuple[int, int]] = {}
        for row, (name, role) in enumerate(zip(events.name.tolist(), events.role.tolist(), strict=True)):
            roles.setdefault(name, (role, row))
        names = []
        for index, real in enumerate(events.names):
            role, row = roles.get(index, (_COMPUTE, -1))
            names.append(self._kernel(real, ops.get(row, "unknown") if role == _COMM else None))
        streams = tuple(
            name if _STREAM.fullmatch(name) else f"stream {index}" for index, name in enumerate(events.streams)
        )
        return replace(events, names=tuple(names), streams=streams)

    def _kernel(self, real: str, op: str | None) -> str:
        """A name of the same class, and of the same kind in HTA's eyes."""

        def word(number: int) -> str:
            match hta_kind(real):
                case HtaKind.COMM:
                    return f"ncclKernel {op or 'unknown'} {number}"
                case HtaKind.MEMORY:
                    return f"{'Memset' if real.startswith('Memset') else 'Memcpy'} {number}"
                case HtaKind.OTHER:
                    return f"{KERNEL_WORDS[kernel_class(real)]} Sync {number}"
            return f"{op or KERNEL_WORDS[kernel_class(real)]} kernel {number}"

        return self._kernels.name(real, word)
