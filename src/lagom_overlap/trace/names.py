"""Which kernels communicate, and what their names and NCCL's metadata say.

A kernel communicates if its metadata names a collective, if its function's name matches a known library, or if the
user's own pattern matches its whole name. Known names come from the libraries' sources: NCCL and RCCL (`ncclKernel_*`,
`ncclDevKernel_*`, `ncclSymkDevKernel_*`), MSCCL++, NVSHMEM, DeepEP (`deep_ep::`), PyTorch's symmetric memory
(`multimem_*`, `one_shot_*`, `two_shot_*`), vLLM's and TensorRT-LLM's own all-reduces, Transformer Engine's userbuffers,
HCCL and oneCCL. Only the function's name is matched, not its template arguments: a softmax instantiated with a
`WarpAllReduce` computes.

Reach (NCCL 2.30.7, enqueue.cc): a tuner sees AllReduce, AllGather, ReduceScatter, Broadcast and Reduce; send, receive
and all-to-all obey `NCCL_MAX_P2P_NCHANNELS` only; symmetric kernels and everything outside NCCL obey nothing of NCCL's.
"""

import re
from functools import lru_cache
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import KnobReach

NCCL_PREFIXES: Final = ("nccl:", "nccl2:")
"""Before the name of a CPU event around a collective: ProcessGroupNCCL's, and that of torch 2.14 on (torchcomms)."""

_LIBRARY: Final = re.compile(
    r"""nccl(dev|symk\w*)?kernel | ^nccl | ncclsymk | ^rccl | ^mscclpp | ^msccl\w*kernel | mscclpp:: | ^hccl | ^oneccl
    | deep_ep:: | (^|::)(internode|intranode|internode_ll|hybrid_ep)::\w*(dispatch|combine|notify)
    | nvshmem
    | (^|::)symmetric_memory:: | symm_mem
    | multimem_(all|one_shot|reduce) | (one|two)_shot_all_?reduce | (one|two)shot_?all_?reduce
    | cross_device_reduce | quickreduce | allreduce_prototype | lamport\w*(all_?reduce|reduce)
    | userbuffers | ubuf_\w+ | (^|::)pplx
    | (?<!warp)(?<!warp_)(?<!block)(?<!block_)(?<!group)(?<!thread)
      (all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_HINTS: Final = (
    *("ccl", "deep_ep", "internode", "intranode", "hybrid_ep", "nvshmem", "multimem", "shot", "reduce", "ubuf"),
    *("userbuffers", "pplx", "gather", "scatter", "to_all", "toall", "p2p", "ptop", "peer", "symm"),
)
"""One of these stands in every name that communicates: a quick no for the thousands that do not."""
_NCCL: Final = re.compile(r"^(void )?[nr]ccl(dev)?kernel|^[nr]ccldevkernel", re.IGNORECASE)
GLOO_PREFIX: Final = "gloo:"
"""The same of gloo, of whose collectives torch 2.15's flight recorder makes a dump of its own."""
_PREFIX: Final = re.compile(rf"^(?:{'|'.join((*NCCL_PREFIXES, GLOO_PREFIX))})?(?:c10d::)?(?:nccl_)?")
_PEER_COPY: Final = re.compile(r"^Memcpy (PtoP|P2P)\b|Peer ?[Tt]o ?[Pp]eer", re.IGNORECASE)
_WITHOUT: Final = re.compile(r"\(anonymous namespace\)::|^void |^std::enable_if.*?::type ")

_KINDS: Final = (
    (re.compile(r"all_?to_?all|dispatch|combine", re.IGNORECASE), CollectiveKind.ALL_TO_ALL),
    (re.compile(r"reduce_?scatter", re.IGNORECASE), CollectiveKind.REDUCE_SCATTER),
    (re.compile(r"all_?gather", re.IGNORECASE), CollectiveKind.ALL_GATHER),
    (re.compile(r"all_?reduce|cross_device_reduce|quickreduce", re.IGNORECASE), CollectiveKind.ALL_REDUCE),
    (re.compile(r"broadcast", re.IGNORECASE), CollectiveKind.BROADCAST),
    (
        re.compile(r"send_?recv|\bi?send\b|\bi?recv\b|^(batch_)?isend|^i?recv|^i?send", re.IGNORECASE),
        CollectiveKind.SEND_RECV,
    ),
    (re.compile(r"(^|[^a-z])_?reduce", re.IGNORECASE), CollectiveKind.REDUCE),
)
_OTHER_OPS: Final = ("barrier", "gather", "scatter")
_DTYPE_BYTES: Final = {
    **dict.fromkeys(("double", "float64", "long", "int64", "long int", "complexfloat", "int64_t"), 8),
    **dict.fromkeys(("complexdouble",), 16),
    **dict.fromkeys(("float", "float32", "int", "int32", "uint32", "unsigned int"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "short", "int16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}


def function_name(kernel: str) -> str:
    """A kernel's function without return type, template arguments and parameters."""
    name = _WITHOUT.sub("", kernel)
    cut = len(name)
    for mark in "<(":
        at = name.find(mark)
        if 0 < at < cut:
            cut = at
    return name[:cut].strip()


def is_communication(kernel: str, pattern: re.Pattern[str] | None = None) -> bool:
    """Whether a kernel or copy communicates, by its name alone."""
    if pattern is not None and pattern.search(kernel):
        return True
    low = kernel.lower()
    if not any(hint in low for hint in _HINTS):
        return False
    return _LIBRARY.search(function_name(kernel)) is not None or _PEER_COPY.search(kernel) is not None


@lru_cache(maxsize=4096)
def kind_of(words: str) -> CollectiveKind | None:
    """The collective that a kernel's function name or NCCL's "Collective name" means; None where it is none of ours."""
    text = _PREFIX.sub("", words)
    if any(text.strip("_").lower().startswith(other) for other in _OTHER_OPS):
        return None
    return next((kind for pattern, kind in _KINDS if pattern.search(text)), None)


@lru_cache(maxsize=4096)
def op_of(words: str) -> str:
    """The collective in our words: a `CollectiveKind`, or NCCL's own word, or `"unknown"`."""
    kind = kind_of(words)
    if kind is not None:
        return kind.value
    text = _PREFIX.sub("", words).strip("_").lower()
    return next((other for other in _OTHER_OPS if text.startswith(other)), "unknown")


def reach_of(kernel: str, kind: CollectiveKind | None) -> KnobReach:
    """Which of NCCL's knobs reach a collective that ran as this kernel."""
    return reach_of_kind(kind) if _NCCL.match(kernel) else KnobReach.NONE


def reach_of_kind(kind: CollectiveKind | None) -> KnobReach:
    """Which of NCCL's knobs reach a collective that NCCL runs; none of what we do not know by name."""
    if kind is None:
        return KnobReach.NONE
    return KnobReach.P2P_CHANNELS if kind.traits.is_point_to_point else KnobReach.TUNER


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a PyTorch type (`"Float"`, `"c10::BFloat16"`, `"bf16"`); 0 where unknown."""
    name = dtype.rsplit("::", 1)[-1].strip().lower()
    return _DTYPE_BYTES.get({"bf16": "bfloat16", "f16": "half", "f32": "float"}.get(name, name), 0)


def whole_bytes(kind: CollectiveKind | None, in_bytes: int, out_bytes: int, num_ranks: int) -> int:
    """The bytes of the whole tensor, as `Collective.num_bytes` means it; 0 where unknown.

    The larger buffer is the whole one: torch 2.15 calls the outputs of an all-gather into a list its input.
    """
    if kind is not None and kind.traits.takes_part:
        return max(in_bytes, out_bytes) if out_bytes else in_bytes * num_ranks
    if kind is not None and kind.traits.leaves_part:
        return max(in_bytes, out_bytes) if in_bytes else out_bytes * num_ranks
    return in_bytes or out_bytes
