"""Merged reports: the same whatever the tree, and no larger for more ranks."""

from random import Random

import pytest

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey
from lagom_overlap.online.ranks.messages import (
    MODULUS,
    MOST_CALLS,
    Calls,
    Report,
    balance_of,
    calls_of,
    encode,
    merged,
    shape_of,
    wires_of,
)
from lagom_overlap.online.routes.base import CallRecord, StepRecord
from lagom_overlap.tuners.problem import Measurement


def balance(name: str, digests: list[str], size: int | None = None) -> int:
    size = size or len(digests)
    return sum(balance_of(name, place, size, digest) for place, digest in enumerate(digests)) % MODULUS


def report(rank: int, num_ranks: int, *, digest: str = "same") -> Report:
    """All ranks share one communicator, neighbours share another, and each two ranks that far apart a third."""
    half = num_ranks // 2
    names = {"world": (rank, num_ranks), f"pair{rank // 2}": (rank % 2, 2), f"far{rank % half}": (rank // half, 2)}
    rng = Random(rank)
    return Report(
        rank=rank,
        num_steps=7,
        calls={name: Calls(rank=rank, digest=digest, num_ranks=1, size=size) for name, (_, size) in names.items()},
        balance=sum(balance_of(name, place, size, digest) for name, (place, size) in names.items()) % MODULUS,
        programs=("first",) if rank < half else ("second",),
        shapes=shape_of(rank, "first" if rank < half else "second"),
        times={"g": Measurement(makespan_s=rng.random(), comp_s=rng.random(), comm_s=(rng.random(), rng.random()))},
        step_s=rng.random(),
        steps_s=(rng.random(), rng.random()),
        stepped_s=rng.random(),
        exchange_s=rng.random(),
        journal_lines=rank % 5,
        journal_rank=rank,
    )


def by_tree(reports: list[Report], fan: int) -> Report:
    if len(reports) <= fan:
        return merged(reports)
    size = -(-len(reports) // fan)
    return merged([by_tree(reports[begin : begin + size], fan) for begin in range(0, len(reports), size)])


@pytest.mark.parametrize("fan", [2, 3, 7])
def test_reports_merge_to_the_same_in_any_tree_and_nothing_is_open_at_the_root(fan: int) -> None:
    reports = [report(rank, 48) for rank in range(48)]
    whole = merged(reports)
    assert by_tree(reports, fan) == whole
    assert (whole.rank, whole.num_ranks, whole.calls, whole.balance) == (0, 48, {}, 0)
    assert {whole.disagreement, whole.void, whole.stop} == {""}
    assert whole.programs == ("first", "second")
    assert whole.times["g"].comm_s[1] == max(each.times["g"].comm_s[1] for each in reports)
    assert whole.steps_s == tuple(max(each.steps_s[i] for each in reports) for i in range(2))
    assert (whole.journal_lines, whole.journal_rank) == (4, 4)


def test_a_rank_that_calls_something_else_is_named_with_the_communicator() -> None:
    reports = [report(rank, 48, digest="other" if rank == 31 else "same") for rank in range(48)]
    found = by_tree(reports, 3)
    assert found.disagreement in {
        f"ranks {one} and 31 made different calls on communicator {name}"
        for one, name in ((0, "world"), (30, "pair15"), (7, "far7"))
    } | {f"ranks {one} and 31 made different calls on communicator world" for one in range(31)}
    assert found.balance != 0


def test_a_difference_that_no_merged_report_has_room_for_is_found_by_the_balance() -> None:
    num_ranks = 8 * MOST_CALLS
    reports = [report(rank, num_ranks) for rank in range(num_ranks)]
    odd = num_ranks - 3
    name = f"far{odd % (num_ranks // 2)}"
    calls = dict(reports[odd].calls) | {name: Calls(rank=odd, digest="other", num_ranks=1, size=2)}
    change = balance_of(name, 1, 2, "other") - balance_of(name, 1, 2, "same")
    changed = Report(rank=odd, num_steps=7, calls=calls, balance=(reports[odd].balance + change) % MODULUS)
    found = by_tree([*reports[:odd], changed, *reports[odd + 1 :]], 4)
    assert not found.disagreement
    assert found.balance != 0
    assert by_tree(reports, 4).balance == 0


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_balance_is_nothing_for_equal_digests_only(size: int) -> None:
    assert balance("c", ["a"] * size) == 0
    assert balance("c", ["b"] + ["a"] * (size - 1)) != 0
    assert balance("c", ["a"] * (size - 1), size) != 0, "a rank is missing"
    assert balance("c", list("abcdefgh"[:size])) != 0


def test_who_had_which_program_tells_two_divisions_apart() -> None:
    assert (shape_of(0, "a") + shape_of(1, "b")) % MODULUS != (shape_of(0, "b") + shape_of(1, "a")) % MODULUS


def test_different_steps_name_two_ranks_and_the_first_wish_is_kept() -> None:
    reports = [
        Report(rank=rank, num_steps=5 + (rank > 2), void=f"rank {rank}: late" if rank > 1 else "") for rank in range(5)
    ]
    found = by_tree(reports, 2)
    assert found.disagreement == "the ranks are at different steps (rank 0: 5, rank 3: 6)"
    assert found.void == "rank 2: late"


def test_a_merged_report_does_not_grow_with_the_ranks() -> None:
    sizes = [len(encode(by_tree([report(rank, num) for rank in range(num)], 16))) for num in (64, 512, 4096)]
    assert max(sizes) <= min(sizes) + 40, "but for the digits of larger numbers"
    halves = [merged([report(rank, num) for rank in range(num // 2)]) for num in (256, 2048)]
    assert max(len(half.calls) for half in halves) == MOST_CALLS


def test_nothing_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="no report"):
        merged([])


def by_wire(wire: str, *, order: int = 0, num_bytes: int = 1 << 20) -> StepRecord:
    """A call on a communicator of three ranks that the route knows by its size alone, and by the run's own id."""
    name = CommunicatorId(description="nccl on 1 node", ranks=(0, 1, 2), creation_order=order)
    key = ConfigKey(communicator=name, kind=CollectiveKind.ALL_GATHER, num_bytes=num_bytes)
    call = CallRecord(key=key, issued_s=0.0, begun_s=0.0, ended_s=0.0)
    return StepRecord(duration_s=1.0, calls=(call,), wires={name: wire})


@pytest.mark.parametrize(
    ("odd", "agree"),
    [({}, True), ({"num_bytes": 1 << 21}, False), ({"order": 1}, False)],
    ids=["alike", "other call", "other role"],
)
def test_communicators_that_only_an_id_tells_apart_balance_over_their_own_ranks(
    odd: dict[str, int], agree: bool
) -> None:
    """Six ranks, two communicators of three; what the second one's ranks call is none of the first one's business."""
    places = [2, 0, 1, 1, 2, 0]
    records = [by_wire("a" if rank < 3 else "b", num_bytes=(1 + rank // 3) << 20) for rank in range(6)]
    records[1] = by_wire("a", **odd)
    total, open_ = 0, []
    for rank, record in enumerate(records):
        (wire,) = wires_of([record]).values()
        calls, balance = calls_of([record], rank, 6, {wire: places[rank]})
        total += balance
        open_.append(Report(rank=rank, num_steps=1, calls=calls, balance=balance))
    assert (total % MODULUS == 0) is agree
    assert (merged(open_).disagreement == "") is agree


def test_a_communicator_that_more_ranks_than_the_job_has_is_not_balanced() -> None:
    record = by_wire("a")
    (wire,) = wires_of([record]).values()
    assert calls_of([record], 0, 2, {wire: 0})[1] == 0
