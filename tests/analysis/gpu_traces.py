"""Traces built without a file: rows of (role, start, end) in nanoseconds."""

from collections.abc import Sequence

import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.event_columns import EventColumns
from lagom_overlap.trace.gpu_trace import NO_TIME, ROLE_CODES, CommCall, EventRole, GpuTrace, KnobReach, ProfilerStep

Row = tuple[EventRole, int, int]


def gpu_trace(
    rows: Sequence[Row],
    *,
    names: Sequence[str] | None = None,
    launches: Sequence[int | None] | None = None,
    streams: Sequence[int] | None = None,
    shapes: Sequence[int] | None = None,
    grids: Sequence[tuple[int, int, int]] | None = None,
    steps: Sequence[tuple[int, int, int]] = (),
    calls: Sequence[dict[str, object]] | None = None,
    **fields: object,
) -> GpuTrace:
    """A trace; `calls` are fields of the collectives in order of start, all-reduces of 1 MiB unless they say other."""
    columns = EventColumns()
    for index, (role, start, end) in enumerate(rows):
        columns.add(
            start_ns=start,
            end_ns=end,
            name=names[index] if names else role.value,
            device=0,
            stream=streams[index] if streams else ROLE_CODES[role],
            role=ROLE_CODES[role],
            memory_op=int(role is EventRole.MEMORY),
            shape=shapes[index] if shapes else -1,
            grid=grids[index] if grids else (1, 1, 1),
            block=(64, 1, 1),
        )
    launch = np.array([NO_TIME if at is None else at for at in launches or [None] * len(rows)], dtype=np.int64)
    events, _ = columns.build(launch, columns.column("shape"))
    comm = events.rows(EventRole.COMM).tolist()
    held = []
    for row, given in zip(comm, calls or [{}] * len(comm), strict=True):
        base: dict[str, object] = {
            "event": row,
            "op": "all_reduce",
            "kind": CollectiveKind.ALL_REDUCE,
            "communicator": "dp",
            "reach": KnobReach.TUNER,
            "duration_ns": int(events.end_ns[row] - events.start_ns[row]),
            "num_ranks": 8,
            "num_bytes": 1 << 20,
            "num_channels": 16,
            "num_threads": 512,
        }
        held.append(CommCall(**(base | given)))
    base_fields: dict[str, object] = {"file": "t.json", "format": "test", "rank": 0}
    return GpuTrace(
        events=events,
        calls=tuple(held),
        steps=tuple(ProfilerStep(number=n, start_ns=a, end_ns=b) for n, a, b in steps),
        **(base_fields | fields),
    )
