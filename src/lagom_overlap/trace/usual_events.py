"""Events as Kineto usually writes them, decoded straight into the few fields that matter.

Most of a trace is CPU operators, Python frames and flows, of which next to nothing is kept. Here the category decides
which fields are decoded: of a flow none, of a launch its correlation and time. What does not fit (a category that is
not known here, a text where a number belongs, metadata without a category) does not decode, and the block that holds it
is decoded again by `chrome_reader.py`, which takes anything. Both ways end in the same trace.
"""

from functools import reduce
from operator import or_
from typing import Any, ClassVar, Final, Literal

import msgspec

from lagom_overlap.trace.gpu_trace import UNKNOWN

LAUNCH_CATEGORIES: Final = (
    *("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime", "runtime"),
    *("xpu_runtime", "xpu_driver", "mtia_runtime", "glow_runtime", "privateuse1_runtime", "privateuse1_driver"),
)
"""Calls of an accelerator's runtime or driver (kineto, libkineto/include/ActivityType.h, and older spellings)."""


class CollectiveArgs(msgspec.Struct, gc=False):
    """What any event may say of a collective; types differ between tools, so they are checked where used."""

    collective_name: Any = msgspec.field(default=None, name="Collective name")
    in_nelems: Any = msgspec.field(default=None, name="In msg nelems")
    out_nelems: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    pg_name: Any = msgspec.field(default=None, name="Process Group Name")
    pg_description: Any = msgspec.field(default=None, name="Process Group Description")
    pg_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    seq: Any = msgspec.field(default=None, name="Seq")
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")

    def kept(self) -> "CollectiveArgs":
        """Itself, with copies of what would hold the whole block of the file in memory."""
        self.input_dims, self.input_type = self.input_dims.copy(), self.input_type.copy()
        return self


class CpuArgs(CollectiveArgs, gc=False):
    """Of an operator: shapes by `External id`."""

    stream: Any = None
    correlation: Any = None
    external_id: int = msgspec.field(default=UNKNOWN, name="External id")
    external_id_old: int = msgspec.field(default=UNKNOWN, name="external id")


class _GpuArgs(CollectiveArgs, gc=False, kw_only=True):
    device: int
    stream: int
    correlation: int
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    external_id: int = msgspec.field(default=UNKNOWN, name="External id")
    external_id_old: int = msgspec.field(default=UNKNOWN, name="external id")


class LaunchArgs(msgspec.Struct, gc=False):
    """Of a launch, or of anything that carries a stream number."""

    correlation: int = UNKNOWN
    stream: Any = None


class _Event(msgspec.Struct, gc=False, kw_only=True):
    ph: Literal["X"]
    name: str
    ts: int | float
    dur: int | float


class GpuEvent(_Event, gc=False, kw_only=True):
    """A kernel (`memory_op` 0), a copy (1) or a set (2)."""

    memory_op: ClassVar[int] = 0
    pid: int | str | None = None
    args: _GpuArgs


class _Copy(GpuEvent, gc=False, kw_only=True):
    memory_op: ClassVar[int] = 1


class _Set(GpuEvent, gc=False, kw_only=True):
    memory_op: ClassVar[int] = 2


class CpuEvent(_Event, gc=False, kw_only=True):
    """An operator or annotation."""

    pid: int | str | None = None
    tid: int | str | None = None
    args: CpuArgs | None = None


class LaunchEvent(_Event, gc=False, kw_only=True):
    """A call of the CUDA or HIP runtime."""

    pid: int | str | None = None
    tid: int | str | None = None
    args: LaunchArgs | None = None


class OtherEvent(_Event, gc=False, kw_only=True):
    """Any other event of some length; kept only if it carries a stream number."""

    args: LaunchArgs | None = None


class SyncArgs(LaunchArgs, gc=False):
    """Of a synchronisation: the stream that is waited for, and the launch up to which."""

    wait_on_stream: Any = None
    wait_on_event: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class SyncEvent(OtherEvent, gc=False, kw_only=True):
    """A synchronisation; a wait of one stream for another names both."""

    args: SyncArgs | None = None


class _Passed(msgspec.Struct, gc=False):
    """A flow or a Python frame: nothing of it is decoded."""


UsualEvent = GpuEvent | CpuEvent | LaunchEvent | OtherEvent | SyncEvent | _Passed
_CATEGORIES: Final[dict[type[msgspec.Struct], tuple[str, ...]]] = {
    GpuEvent: ("kernel", "Kernel"),
    _Copy: ("gpu_memcpy", "Memcpy"),
    _Set: ("gpu_memset", "Memset"),
    CpuEvent: ("cpu_op", "Operator", "user_annotation"),
    LaunchEvent: LAUNCH_CATEGORIES,
    OtherEvent: ("gpu_user_annotation", "overhead", "Trace"),
    SyncEvent: ("cuda_sync",),
    _Passed: ("ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "forward_backward", "python_function", "Python"),
}
_TAGGED: Final = {
    msgspec.defstruct(f"{base.__name__}_{category}", (), bases=(base,), tag_field="cat", tag=category, gc=False): base
    for base, categories in _CATEGORIES.items()
    for category in categories
}
GPU_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if issubclass(base, GpuEvent))
CPU_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if base is CpuEvent)
LAUNCH_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if base is LaunchEvent)
OTHER_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if base is OtherEvent)
SYNC_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if base is SyncEvent)
PASSED_TYPES: Final = frozenset(held for held, base in _TAGGED.items() if base is _Passed)

MarkedArgs = CpuArgs | LaunchArgs
USUAL_EVENTS: Final[msgspec.json.Decoder[list[UsualEvent]]] = msgspec.json.Decoder(list[reduce(or_, _TAGGED)])  # type: ignore[misc]  # made above
