"""Searches and verdicts on a taped job instead of the running one: no process, no other load, many seeds in minutes.

    LAGOM_CUDA_PYTHON=PYTHON PYTHON benchmarks/emulated_tuning/replayed.py [NAME ...]
        [--tuners lagom,ours] [--seeds 10] [--noise 0.02] [--toy] [--tapes FOLDER]

`run.py` tunes the emulated job itself. Here its tape is run again for every window of the search, with other noise:
groups, problems, probation, the study and its verdict are those of online tuning, and so are the numbers of steps.
Leader, member, plug-in and timers have no part. A tape is of four steps and is made once (`--tapes` keeps it).
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from replay import NUM_TAPED, Decider, Place, Ran, Replay, best_of
from run import SETUPS, emulated, prices_of, searched

from lagom_emulate.clock import Operation
from lagom_emulate.settings import EmulationSettings
from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.problems import JobProblems, job_problems
from lagom_overlap.online.program import groups_of, median_times, program_of, times_of
from lagom_overlap.online.ranks.messages import Report, merged
from lagom_overlap.online.routes.base import CallRecord, StepRecord
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.problem import Failure, Measurement, Outcome
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import NS

PROBATION_STEPS, NUM_MEASURED = 3, 2
OPTIONS = OnlineOptions()


@dataclass(frozen=True, slots=True)
class Calls:
    """A rank's taped steps: for each, where its calls are issued, run, and waited for, as places on the tape."""

    rank: int
    steps: tuple[tuple[tuple[Place, int, int, int | None], ...], ...]
    bounds: tuple[tuple[int, int], ...]


def calls_of(replay: Replay, rank: int, main: int) -> Calls:
    """By what waits for what: the main stream joins a call where it waits for an event behind it."""
    last: dict[int, int | None] = {}
    behind: dict[int, int | None] = {}
    joined: dict[int, int] = {}
    own: list[tuple[Place, int, int]] = []
    marks, before, previous = [], {}, 0
    for at, (owner, op) in enumerate(replay.tape.ops):
        if owner != rank:
            continue
        text = replay.tape.texts[rank, op.desc_id] if op.desc_id else b""
        if b'"step"' in text:
            marks.append(op.op_id)
        if at in replay.places_at:
            own.append((replay.places_at[at], op.op_id, previous))
            last[op.stream] = op.op_id
        if op.stream == main:
            call = behind.get(op.after_op)
            if call is not None and call not in joined:
                joined[call] = op.op_id
                before[op.op_id] = previous
            previous = op.op_id
        behind[op.op_id] = last.get(op.stream)
    bounds = tuple(pairwise(marks))
    steps = tuple(
        tuple((place, call, issued, joined.get(call)) for place, call, issued in own if begin < call < end)
        for begin, end in bounds
    )
    return Calls(rank, steps, bounds)


class TapedJob:
    """A job as the online tuner meets it, out of its tape."""

    def __init__(self, replay: Replay, decider: Decider, spaces: Mapping[tuple[str, int], ConfigSpace]) -> None:
        self.replay, self._decider, self._spaces = replay, decider, spaces
        ranks = sorted({number for number, *_ in replay.tape.hellos})
        self._calls = [calls_of(replay, rank, _main_stream(replay, rank)) for rank in ranks]
        records = self._records({}, None)
        self._programs = [
            program_of(steps, [self._spaces.get((str(c.key.kind), c.key.num_bytes)) for c in steps[0].calls])
            for steps in records
        ]
        self.job: JobProblems = job_problems(self._programs)

    def settings(self, assignments: Mapping[str, Any]) -> dict[Place, Ran]:
        """What NCCL makes of the assignments."""
        found = {}
        for row in self.job.settings(assignments):
            call = row.site.call
            names = (call.num_ranks, call.creation_order, str(call.kind), call.num_bytes, row.site.occurrence)
            place = Place(*names)
            found[place] = self._decider.ran(place, row.config)
        return found

    def window(
        self, settings: Mapping[Place, Ran], noise: EmulationSettings | None
    ) -> tuple[float, dict[str, Measurement]]:
        """The mean step of a window, and each group's times as rank 0 hears of them."""
        records = self._records(settings, noise)
        reports = []
        for number, (program, steps) in enumerate(zip(self._programs, records, strict=True)):
            groups = [group for group in groups_of(program) if group.name in self.job.groups]
            times = median_times([times_of(program, groups, step) for step in steps[-NUM_MEASURED:]])
            step_s = fmean(step.duration_s for step in steps)
            reports.append(Report(rank=number, num_steps=0, times=times, step_s=step_s))
        found = merged(reports)
        return found.step_s, found.times

    def _records(self, settings: Mapping[Place, Ran], noise: EmulationSettings | None) -> list[list[StepRecord]]:
        times: dict[tuple[int, int], Operation] = {}
        self.replay.run(settings, lambda op: times.update({(op.owner, op.op_id): op}), noise)
        return [
            # The first step after the start differs from those that follow.
            [_record(calls.rank, step, bounds, times) for step, bounds in zip(calls.steps, calls.bounds, strict=True)][
                1:
            ]
            for calls in self._calls
        ]


def _main_stream(replay: Replay, rank: int) -> int:
    """The stream of the step's marks: the job's current one."""
    return next(
        op.stream
        for owner, op in replay.tape.ops
        if owner == rank and op.desc_id and b'"step"' in replay.tape.texts[rank, op.desc_id]
    )


def _record(
    rank: int,
    calls: Sequence[tuple[Place, int, int, int | None]],
    bounds: tuple[int, int],
    times: Mapping[tuple[int, int], Operation],
) -> StepRecord:
    def at(number: int, *, is_start: bool = False) -> float:
        one = times[rank, number]
        return max(0.0, ((one.start_ns if is_start else one.end_ns) - begin_ns) * NS)

    begin_ns, end_ns = (times[rank, number].end_ns for number in bounds)
    rows = []
    for place, call, issued, joined in calls:
        name = CommunicatorId(
            description="taped", ranks=tuple(range(place.num_ranks)), creation_order=place.creation_order
        )
        key = ConfigKey(
            communicator=name, kind=CollectiveKind(place.kind), num_bytes=place.num_bytes, occurrence=place.occurrence
        )
        # A join's own start is when the stream came to it, its end when the call was over.
        waits = None if joined is None or joined > bounds[1] else joined
        resumed_s = None if waits is None else at(waits)
        arrived_s = None if waits is None else min(at(_before(waits, rank, times)), resumed_s or 0.0)
        rows.append(
            CallRecord(
                key=key,
                issued_s=at(issued),
                begun_s=at(call, is_start=True),
                ended_s=at(call),
                joined_s=arrived_s,
                resumed_s=resumed_s,
                issue_place=call,
                join_place=waits,
            )
        )
    return StepRecord(duration_s=(end_ns - begin_ns) * NS, calls=tuple(rows))


def _before(number: int, rank: int, times: Mapping[tuple[int, int], Operation]) -> int:
    """The operation before on the same stream."""
    stream = times[rank, number].stream
    return next(n for n in range(number - 1, 0, -1) if (rank, n) in times and times[rank, n].stream == stream)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What became of one search."""

    gain: float
    regret: float
    is_adopted: bool
    num_measured: int
    num_steps: int
    num_slower: int
    mean_step: float
    channels: tuple[int, ...]


def tune(job: TapedJob, tuner: str, options: Mapping[str, Any], *, seed: int, noise: float, best_s: float) -> Tuned:
    """One study, as `online.ranks.leader` runs it."""
    problems = cast("Problems", job.job.problems)
    search = make_tuner(tuner, problems, seed=seed, options=dict(options), guarded=True)
    study = Study(problems, search, seed=seed, num_pairs=OPTIONS.num_pairs)
    held, num_steps, default_s, num_window = dict(job.job.default), 0, job.replay.step_s({}), 0
    spread: list[float] = []
    while (step := study.next()) is not None:
        rest = study.num_verdict_steps * OPTIONS.window_steps
        if step.kind is StepKind.SEARCH and num_steps + rest + 2 * OPTIONS.window_steps > OPTIONS.max_steps:
            study.stop_search()
            continue
        held |= step.assignments
        num_window += 1
        disturbed = EmulationSettings(noise=noise, seed=(seed + 1) * 100_003 + num_window) if noise else None
        step_s, times = job.window(job.settings(held), disturbed)
        is_default = held == job.job.default
        if step.kind is StepKind.VERDICT:
            num_steps += OPTIONS.window_steps
            spread += [step_s / default_s] * OPTIONS.window_steps
            study.report(step, {}, step_s=step_s)
            continue
        is_abandoned = not is_default and step_s > OPTIONS.max_slowdown * default_s
        took = PROBATION_STEPS if is_abandoned else OPTIONS.window_steps + (0 if is_default else PROBATION_STEPS - 1)
        num_steps += took
        spread += [step_s / default_s] * took
        outcomes: dict[str, Outcome] = {}
        for name in step.assignments:
            outcomes[name] = Failure("abandoned", times[name]) if is_abandoned else times[name]
        study.report(step, outcomes)
    in_force = job.settings(study.chosen) if study.verdict is not None and study.verdict.adopted else {}
    step_s = job.replay.step_s(in_force)
    return Tuned(
        gain=default_s / step_s - 1,
        regret=step_s / best_s - 1,
        is_adopted=bool(in_force),
        num_measured=study.num_measurements,
        num_steps=num_steps,
        num_slower=sum(each > 1 + max(noise, 0.01) for each in spread),
        mean_step=fmean(spread),
        channels=tuple(sorted({way[2] for way in in_force.values()})),
    )


def taped(name: str, folder: Path, *, is_toy: bool) -> tuple[Replay, Decider, list[dict[str, Any]]]:
    """The job's tape, made where there is none."""
    path = folder / f"{name}{'-toy' if is_toy else ''}.tape"
    if not path.is_file():
        setup = SETUPS[name]
        words = (name, *setup.size, "--steps", str(NUM_TAPED), "--seeds", "0", "--tuner", "default")
        with tempfile.TemporaryDirectory(prefix="lagom-tape-") as out:
            settings = EmulationSettings(noise=0.02, seed=1)
            tape, _ = emulated(setup, words, settings, Path(out), is_toy=is_toy)
            text = (Path(out) / "tunings.jsonl").read_text(encoding="utf-8")
        path.write_bytes(pickle.dumps((tape.hellos, tape.texts, tape.ops, text)))
    hellos, texts, ops, text = pickle.loads(path.read_bytes())  # this script wrote it
    cluster, prices = prices_of(SETUPS[name], is_toy=is_toy)
    tape = cast("Any", SimpleNamespace(hellos=hellos, texts=texts, ops=ops))
    return Replay(tape, prices), Decider(cluster), [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Every job that was named with every tuner that was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETUPS)}")
    parser.add_argument(
        "--tuners", default="ours", help="by comma; lagom:paper is mode = paper, lagom:printed as printed"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--tapes", type=Path)
    arguments = parser.parse_args()
    os.environ["NCCL_TUNER_PLUGIN"] = str(installed_library())
    print(
        "| job | best gain | tuner | regret: median, worst | adopted | false | measured | steps; slower | mean step |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="lagom-tapes-") as own:
        for name in arguments.names or SETUPS:
            replay, decider, rows = taped(name, arguments.tapes or Path(own), is_toy=arguments.toy)
            spaces = {
                (places[0].kind, places[0].num_bytes): space
                for group in searched(rows[0]["groups"], replay.places)
                for places, space in zip(group.places, group.spaces, strict=True)
            }
            job = TapedJob(replay, decider, spaces)
            best = best_of(replay, decider, searched(rows_of(job.job), replay.places))
            for words in arguments.tuners.split(","):
                tuner, _, mode = words.partition(":")
                options = {"mode": mode} if mode else {}
                found = [
                    tune(job, tuner, options, seed=seed, noise=arguments.noise, best_s=best.step_s)
                    for seed in range(arguments.seeds)
                ]
                print(row_of(name, words, replay.step_s({}) / best.step_s - 1, found), flush=True)


def rows_of(job: JobProblems) -> list[dict[str, Any]]:
    """The groups in the form of jobs.py."""
    rows = [{"name": n, "sites": group.sites, "spaces": group.problem.spaces} for n, group in job.groups.items()]
    return cast("list[dict[str, Any]]", msgspec.to_builtins(rows))


def row_of(name: str, tuner: str, best_gain: float, found: Sequence[Tuned]) -> str:
    """One row of Markdown."""
    regrets = [100 * each.regret for each in found]
    adopted = [each for each in found if each.is_adopted]
    return (
        f"| {name} | {100 * best_gain:.2f} % | {tuner} | {median(regrets):.2f}, {max(regrets):.2f} % | "
        f"{len(adopted)} of {len(found)} | {sum(each.gain <= 0 for each in adopted)} | "
        f"{median(each.num_measured for each in found):.0f} | {median(each.num_steps for each in found):.0f}; "
        f"{median(each.num_slower for each in found):.0f} | {fmean(each.mean_step for each in found):.3f} | "
        f"{sorted({c for each in adopted for c in each.channels})} |"
    )


if __name__ == "__main__":
    main()
