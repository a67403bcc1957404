"""What may be tried for one collective through the tuner plug-in: what NCCL offers, with channels and chunks.

The first subspace leaves algorithm and protocol to NCCL. A communicator's limit of channels is not told to a tuner:
NCCL caps what exceeds it, and only a capability map of the box knows. Chunks reach up to the largest that the buffer of
algorithm and protocol holds (docs/formats_plugin.md); NCCL 2.30.7 on an H100 clamped Simple
chunks of trees, of broadcast and of reduce to 512 KiB.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.errors import SpaceError
from lagom_overlap.nccl_plugin.capability import CapabilityMap
from lagom_overlap.nccl_plugin.record_log import Implementation
from lagom_overlap.nccl_plugin.table_layout import GRAIN_BYTES, MAX_CHANNELS
from lagom_overlap.units import KIB, MIB

CHANNELS: Final = (1, 2, 4, 8, 16, 32)
"""Channel counts of the default space. Chosen: powers of two up to what NCCL uses on one node."""
CHUNKS: Final = {
    Protocol.LL: (8 * KIB, 16 * KIB, 32 * KIB),
    Protocol.LL128: (64 * KIB, 128 * KIB, 256 * KIB, 576000),
    Protocol.SIMPLE: (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB),
}
NVLS_CHUNKS: Final = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
"""Up to NCCL_NVLS_CHUNKSIZE's default by halving, as far down as 16 KiB. Chosen, not measured."""
ONE_STEP_BYTES: Final = 512 * KIB
"""The largest Simple chunk where a chunk is one of the buffer's eight steps: trees, broadcast and reduce."""
FIRST_VERSION_WITH_CHUNKS: Final = 6
"""The first version of the tuner interface with getChunkSize."""
_SWITCHED: Final = (Algorithm.NVLS, Algorithm.NVLS_TREE)


def tuner_space(
    offered: Collection[Implementation],
    tuner_version: int,
    *,
    kind: CollectiveKind,
    capabilities: CapabilityMap | None = None,
    algorithms: Sequence[Algorithm] | None = None,
    protocols: Sequence[Protocol] | None = None,
    num_channels: Sequence[int] | None = None,
    chunk_bytes: Sequence[int] | None = None,
) -> ConfigSpace:
    """The space within the limits given (None: our own values); a limit on algorithms or protocols names them all.

    No channels at all (an empty limit) are NCCL's own. What this box's capability map refuses is left out; without a
    map nothing is.

    Raises:
        SpaceError: if nothing is left, or a limit asks for what no tuner can set.
    """
    channels: tuple[int | None, ...] = tuple(num_channels) if num_channels is not None else CHANNELS
    if wrong := [count for count in channels if count is not None and count > MAX_CHANNELS]:
        raise SpaceError(f"tune.space.num_channels holds {wrong[0]}, NCCL has at most {MAX_CHANNELS}")
    if chunk_bytes is not None and tuner_version < FIRST_VERSION_WITH_CHUNKS:
        raise SpaceError("tune.space.chunk_bytes: this NCCL asks no tuner for the chunk (2.30.3 and later do)")
    channels = channels or (None,)
    ways: list[tuple[Algorithm | None, Protocol | None]] = []
    if algorithms is None and protocols is None:
        ways.append((None, None))
    ways += [
        (algorithm, protocol)
        for algorithm, protocol in sorted(offered)
        if algorithm in (algorithms or (algorithm,)) and protocol in (protocols or (protocol,))
    ]
    kept = [
        Subspace(algorithm=algorithm, protocol=protocol, num_channels=channels, chunk_bytes=chunks)
        for algorithm, protocol in ways
        if (chunks := _chunks(kind, (algorithm, protocol), tuner_version, chunk_bytes))
        and (algorithm, channels, chunks) != (None, (None,), (None,))  # nothing to set
    ]
    if capabilities is not None:
        kept = [within for each in kept if (within := _allowed(each, kind, capabilities)) is not None]
    if not kept:
        words = ", ".join(f"{algorithm}/{protocol}" for algorithm, protocol in sorted(offered)) or "nothing"
        allows = "" if capabilities is None else " and this box's capability map allows"
        raise SpaceError(f"tune.space leaves nothing of what NCCL offers{allows}: {words}")
    return ConfigSpace(tuple(kept))


def _allowed(space: Subspace, kind: CollectiveKind, capabilities: CapabilityMap) -> Subspace | None:
    """The subspace without what a map refuses; None if nothing is left."""

    def allows(*, num_channels: int | None = None, chunk_bytes: int | None = None) -> bool:
        config = CommConfig(
            algorithm=space.algorithm, protocol=space.protocol, num_channels=num_channels, chunk_bytes=chunk_bytes
        )
        return capabilities.refuses(kind, config) is None

    channels = tuple(count for count in space.num_channels if allows(num_channels=count))
    chunks = tuple(size for size in space.chunk_bytes if allows(chunk_bytes=size))
    return replace(space, num_channels=channels, chunk_bytes=chunks) if channels and chunks else None


def _chunks(
    kind: CollectiveKind,
    way: tuple[Algorithm | None, Protocol | None],
    tuner_version: int,
    limit: Sequence[int] | None,
) -> tuple[int | None, ...]:
    algorithm, protocol = way
    if tuner_version < FIRST_VERSION_WITH_CHUNKS:
        return (None,)
    own = NVLS_CHUNKS if algorithm in _SWITCHED else CHUNKS[protocol or Protocol.SIMPLE]
    if protocol in (None, Protocol.SIMPLE) and (algorithm is Algorithm.TREE or kind.traits.is_rooted):
        own = tuple(size for size in own if size <= ONE_STEP_BYTES)
    if limit is None:
        return own
    least = GRAIN_BYTES[protocol or Protocol.SIMPLE]
    return tuple(size for size in limit if least <= size <= own[-1])
