"""Reads a timeline file of ours back with plain JSON: what a viewer would see."""

import json

from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.units import NS


def timelines_from_chrome(data: bytes) -> dict[str, Timeline]:
    """The timelines of a file that `chrome_trace` wrote, to the nanosecond."""
    file = json.loads(data)
    assert file["otherData"]["format"] == "lagom-overlap timeline"
    processes, streams = {}, {}
    spans: dict[str, list[Span]] = {name: [] for name in file["otherData"]["timelines"]}
    for event in file["traceEvents"]:
        args = event.get("args", {})
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = args["timeline"], args.get("rank", 0)
        elif event["ph"] == "M" and event["name"] == "thread_name":
            streams[event["pid"], event["tid"]] = args["stream"]
    for event in file["traceEvents"]:
        if event["ph"] != "X":
            continue
        name, rank = processes[event["pid"]]
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        spans[name].append(
            Span(
                name=event["name"],
                kind=SpanKind(event["cat"]),
                stream=streams[event["pid"], event["tid"]],
                start_s=start * NS,
                end_s=(start + length) * NS,
                rank=rank,
            )
        )
    return {name: Timeline(tuple(held)) for name, held in spans.items()}
