"""A file of NCCL's own environment variables: what can be said of a whole process, without any plug-in.

    num_channels  NCCL_MAX_CTAS          caps every communicator; a count above NCCL's own is not reached
    algorithm     NCCL_ALGO              per kind from NCCL 2.24 on ("allreduce:ring;allgather:ring")
    protocol      NCCL_PROTO             the same
    num_threads   NCCL_NTHREADS          rings of LL and Simple
    chunk_bytes   NCCL_BUFFSIZE          rings of Simple alone: 8 steps of which a chunk has 4, so twice the chunk
    sm_carveout   LAGOM_SM_CARVEOUT      ours: `lagom run` hands it to torch; no variable of NCCL or torch sets it
    priority      TORCH_NCCL_HIGH_PRIORITY  torch's process groups; frameworks may make streams of their own

A variable is written only where all tuned calls (of the kind) agree and the run changed the knob: it holds for every
call of the process, also for those that were left untouched. Sources: NCCL's environment documentation; buffer and
chunk from enqueue.cc at 2.30.7.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, LaunchConfig, Protocol, StreamPriority
from lagom_overlap.export.deployment import Deployment, Exported
from lagom_overlap.export.nvidia_csv import KIND_WORDS

FILE_NAME: Final = "nccl.env"
CARVE_OUT_VARIABLE: Final = "LAGOM_SM_CARVEOUT"
"""SMs that the computation leaves free; read by the hooks of `lagom run`."""
BUFFER_PER_CHUNK: Final = 2
"""Bytes of the Simple buffer (8 steps) per byte of a ring's chunk (4 steps)."""
_ALGORITHM_WORDS: Final = {
    Algorithm.TREE: "tree",
    Algorithm.RING: "ring",
    Algorithm.COLLNET_DIRECT: "collnetdirect",
    Algorithm.COLLNET_CHAIN: "collnetchain",
    Algorithm.NVLS: "nvls",
    Algorithm.NVLS_TREE: "nvlstree",
    Algorithm.PAT: "pat",
}
_RINGS: Final = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def env_file(deployment: Deployment) -> Exported:
    """The file, `NAME=value` lines; source it with `set -a`, or give it to a container as an environment file."""
    tuned = [(key.kind, config) for key, config in deployment.table if key.kind in KIND_WORDS]
    lines: dict[str, str] = {}
    left_out = ["every variable holds for the whole process: calls that were left untouched take it, too"]
    left_out += [
        f"{kind}: its channels are capped by NCCL_MAX_P2P_NCHANNELS, not written" for kind in _beyond(deployment)
    ]
    channels = _agreed([config.num_channels for _, config in tuned])
    if not deployment.changes("num_channels"):
        pass
    elif channels is not None:
        lines["NCCL_MAX_CTAS"] = str(channels)
    elif any(config.num_channels for _, config in tuned):
        left_out.append("num_channels: the tuned calls differ, a process has one NCCL_MAX_CTAS")
    for name, knob, words in (
        ("NCCL_ALGO", "algorithm", _ALGORITHM_WORDS),
        ("NCCL_PROTO", "protocol", {protocol: protocol.upper() for protocol in Protocol}),
    ):
        if not deployment.changes(knob):
            continue
        value, lost = _per_kind(tuned, knob, words)  # type: ignore[arg-type]  # two enumerations, one way
        left_out += lost
        if value:
            lines[name] = value
    threads = _agreed([config.num_threads for _, config in tuned])
    if not deployment.changes("num_threads"):
        pass
    elif threads is not None:
        lines["NCCL_NTHREADS"] = str(threads)
    elif any(config.num_threads for _, config in tuned):
        left_out.append("num_threads: the tuned calls differ, a process has one NCCL_NTHREADS")
    buffer_bytes, why = _buffer_bytes(tuned)
    if deployment.changes("chunk_bytes"):
        lines |= {} if buffer_bytes is None else {"NCCL_BUFFSIZE": str(buffer_bytes)}
        left_out += why
    left_out += _computation(deployment.launch, lines)
    header = "# Written by lagom export: NCCL's own variables, for every collective of the process.\n"
    text = header + "".join(f"{name}={value}\n" for name, value in lines.items())
    return Exported(name=FILE_NAME, content=text.encode(), not_carried=tuple(left_out), is_empty=not lines)


def _computation(launch: LaunchConfig, lines: dict[str, str]) -> list[str]:
    """Adds what can be said of the computation's side; returns what cannot, and what to know."""
    notes = []
    if launch.sm_carveout is not None:
        lines[CARVE_OUT_VARIABLE] = str(launch.sm_carveout)
        notes.append(
            f"{CARVE_OUT_VARIABLE} is read by lagom run; without it the job itself calls "
            f"torch._C._set_sm_carveout_experimental({launch.sm_carveout})"
        )
    if launch.priority is StreamPriority.HIGH:
        lines["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    elif launch.priority is StreamPriority.NORMAL:
        notes.append("normal stream priority: it is what torch's process groups have unless they are told otherwise")
    if launch.order is not None:
        notes.append(f"launch order ({launch.order}): it is the order in which the framework issues its calls")
    return notes


def _beyond(deployment: Deployment) -> list[CollectiveKind]:
    return sorted({key.kind for key, config in deployment.table if key.kind not in KIND_WORDS and config.num_channels})


def _agreed(values: Iterable[int | None]) -> int | None:
    """The one value of all calls, or None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _per_kind(
    tuned: list[tuple[CollectiveKind, CommConfig]], knob: str, words: dict[str, str]
) -> tuple[str, list[str]]:
    """`allreduce:ring;allgather:ring`, and what of the knob is lost."""
    values: dict[CollectiveKind, set[str | None]] = defaultdict(set)
    for kind, config in tuned:
        values[kind].add(getattr(config, knob))
    lost, parts = [], []
    for kind, values_of_kind in values.items():
        if len(values_of_kind) > 1:
            lost.append(f"{knob}: the tuned calls of {kind} differ, a process has one choice per kind")
        elif (only := next(iter(values_of_kind))) is not None:
            parts.append(f"{KIND_WORDS[kind]}:{words[only]}")
    return ";".join(sorted(parts)), lost


def _buffer_bytes(tuned: list[tuple[CollectiveKind, CommConfig]]) -> tuple[int | None, list[str]]:
    chunks = {config.chunk_bytes for _, config in tuned}
    if chunks <= {None}:
        return None, []
    simple_rings = all(
        kind in _RINGS and (config.algorithm, config.protocol) == (Algorithm.RING, Protocol.SIMPLE)
        for kind, config in tuned
    )
    chunk = next(iter(chunks)) if len(chunks) == 1 else None
    if chunk is None or not simple_rings:
        return None, ["chunk_bytes: NCCL_BUFFSIZE sets it only where every tuned call is a Simple ring of one chunk"]
    return BUFFER_PER_CHUNK * chunk, []
