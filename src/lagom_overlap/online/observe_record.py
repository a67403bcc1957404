"""What the plug-in's record says of a job that is only watched: its call sites, and what NCCL offers and prefers there.

The times are NCCL's own predictions from its cost tables, not measurements; they rank the sites.
"""

from collections import Counter, defaultdict
from statistics import median
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.nccl_plugin.record_log import Flag, RecordedDecision, RecordLog
from lagom_overlap.units import format_bytes, format_seconds

MOST_SITES: Final = 8
"""Sites that are named; the rest is counted."""

_Site = tuple[int, int, CollectiveKind, int]


def record_lines(log: RecordLog, most: int = MOST_SITES) -> list[str]:
    """The call sites by NCCL's predicted time, for people; empty if NCCL asked nothing."""
    ranks = {communicator.comm_id: communicator for communicator in log.communicators}
    sites: dict[_Site, list[RecordedDecision]] = defaultdict(list)
    for decision in log.decisions:
        if Flag.NOT_COUNTED not in decision.flags and decision.comm_id in ranks:
            known = ranks[decision.comm_id]
            sites[known.num_ranks, known.creation_order, decision.kind, decision.num_bytes].append(decision)
    if not sites:
        return []
    total_s = {site: sum(_predicted_s(decision) for decision in found) for site, found in sites.items()}
    ordered = sorted(sites, key=lambda site: (-total_s[site], site))
    lost = f", {log.num_lost} older entries were overwritten" if log.num_lost else ""
    lines = [f"NCCL asked the tuner about {len(sites)} call sites on {len(ranks)} communicators{lost}; largest first:"]
    lines += [f"  {_words(site, sites[site])}" for site in ordered[:most]]
    if len(ordered) > most:
        lines.append(f"  and {len(ordered) - most} more")
    return lines


def _predicted_s(decision: RecordedDecision) -> float:
    return min(decision.offered_s.values(), default=0.0)


def _words(site: _Site, decisions: list[RecordedDecision]) -> str:
    num_ranks, order, kind, num_bytes = site
    where = f"{kind} {format_bytes(num_bytes)} on {num_ranks} ranks" + (f" #{order}" if order else "")
    preferred = Counter(min(d.offered_s, key=lambda way: d.offered_s[way]) for d in decisions if d.offered_s)
    if not preferred:
        return f"{where}, {len(decisions)} calls (NCCL 2.21 tells no costs)"
    (algorithm, protocol), _ = preferred.most_common(1)[0]
    others = len({way for decision in decisions for way in decision.offered_s}) - 1
    predicted = format_seconds(median(_predicted_s(decision) for decision in decisions))
    return (
        f"{where}, {len(decisions)} calls: {algorithm}/{protocol}, predicted {predicted}; {others} other ways on offer"
    )
