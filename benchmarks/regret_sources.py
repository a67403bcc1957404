"""Where a tuner's regret on the second family of groups comes from: noise, knobs, the shape of what it asks for.

    python benchmarks/regret_sources.py --seed 1001 --groups 40 [--tuner ours] [--num-comms 1,4,8] [--json]

Percent of the oracle's makespan, means over the groups of `measured_generator.py`, without the noise of what was told:

    exact, core, core + tails, all   the tuner with parts of the noise (2 %): none; no tails, no ramps; no ramps; all
    asked                            under all noise, the best that it measured: the rest of `all` is choosing wrongly
    channels, chunk, kind            what one knob, set alike for all collectives, would still gain
    one setting, two settings        the best there is with one setting for all collectives; with one for the first and
                                     one for the rest (pairs of the ten best)
    twelve best                      the default and the eleven best equal settings, by the truth, measured once each
                                     under all noise; the fastest told is taken: perfect questions, no model
    list, list told                  the eleven equal settings that serve another seed's groups best, with the default:
                                     the best of them; and the fastest as told. Who knows the family, but does not adapt
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

import measured_generator
from lagom_overlap.tuners.problem import Assignment
from measured_generator import MeasuredGroup, draw_group
from overlap_generator import CHANNELS, CHUNKS, CONFIGS, DEFAULT, PLACE
from search_quality import build_tuner, count, numbers

NOISE = 0.02
NUM_MEASURED = 12
OTHER_SEED = 77_000
NUM_BEST = 10
Row = dict[str, float]


def told(group: MeasuredGroup, assignment: Assignment, rng: Random, noise: float) -> float:
    """The makespan of one measurement."""
    return group.measure(assignment, rng, noise).makespan_s


def searched(name: str, group: MeasuredGroup, noise: float) -> tuple[Assignment, list[Assignment]]:
    """What a search ends with, and all that it asked."""
    tuner, rng, key = (
        build_tuner(name, group, 0),
        Random(f"sources/{group.problem.group.name}"),
        group.problem.group.name,
    )
    asked = []
    while (trial := tuner.ask()) is not None:
        asked.append(trial.assignments[key])
        tuner.tell(trial, {key: group.measure(asked[-1], rng, noise)})
    return tuner.recommend()[key], asked


def alike(group: MeasuredGroup) -> list[float]:
    """The makespan of every setting, the same for all collectives."""
    return [group.exact((config,) * group.num_comms).makespan_s for config in CONFIGS]


def family_list(num_comms: int, num_groups: int) -> list[int]:
    """Greedily, the settings whose best is nearest to the best equal one in the mean over another seed's groups."""
    rows = [alike(draw_group(OTHER_SEED, index, num_comms)) for index in range(num_groups)]
    chosen = [PLACE[DEFAULT]]
    while len(chosen) < NUM_MEASURED:
        best = min(
            range(len(CONFIGS)), key=lambda place: sum(min(row[i] for i in (*chosen, place)) / min(row) for row in rows)
        )
        chosen.append(best)
    return chosen


def chosen_by_telling(group: MeasuredGroup, places: Sequence[int], true_s: Sequence[float]) -> float:
    """The truth of the fastest as told."""
    rng = Random(f"sources/told/{group.problem.group.name}")
    times = {place: told(group, (CONFIGS[place],) * group.num_comms, rng, NOISE) for place in places}
    return true_s[min(times, key=times.__getitem__)]


def knob(group: MeasuredGroup, found: Assignment, name: str) -> float:
    """The best makespan with one knob set alike for all."""
    values = {"num_channels": CHANNELS, "chunk_bytes": CHUNKS, "protocol": tuple({c.protocol for c in CONFIGS})}[name]
    tried = [tuple(replace(config, **{name: value}) for config in found) for value in values]  # type: ignore[arg-type]
    allowed = [one for one in tried if all(config in PLACE for config in one)]
    return min(group.exact(one).makespan_s for one in allowed)


def two_settings(group: MeasuredGroup, true_s: Sequence[float]) -> float:
    """The best of pairs, the first setting up to a place in the stream."""
    best = sorted(range(len(CONFIGS)), key=true_s.__getitem__)[:NUM_BEST]
    best += [PLACE[replace(DEFAULT, num_channels=n)] for n in (1, 2, 4)]
    num = group.num_comms
    pairs = [(a, b, at) for a in best for b in best if a != b for at in range(1, num)]
    split = [(CONFIGS[a],) * at + (CONFIGS[b],) * (num - at) for a, b, at in pairs]
    return min([min(true_s), *(group.exact(one).makespan_s for one in split)])


def row_of(name: str, group: MeasuredGroup, family: Sequence[int]) -> Row:
    """One group."""
    best_s, tails, ramp = group.oracle()[1], measured_generator.TAIL, group._ramp
    found: Row = {}

    def regret(makespan_s: float) -> float:
        return makespan_s / best_s - 1

    found["default"] = regret(group.exact(group.problem.default).makespan_s)
    for words, noise, tail, ramps in (
        ("exact", 0.0, 0.0, False),
        ("core", NOISE, 0.0, False),
        ("core + tails", NOISE, tails, False),
        ("all", NOISE, tails, True),
    ):
        measured_generator.TAIL, group._ramp = tail, ramp if ramps else (0, ramp[1])
        end, asked = searched(name, group, noise)
        found[words] = regret(group.exact(end).makespan_s)
    found["measurements"] = len(asked) / 100
    found["asked"] = regret(min(group.exact(one).makespan_s for one in asked))
    for words, knob_name in (("channels", "num_channels"), ("chunk", "chunk_bytes"), ("kind", "protocol")):
        found[words] = found["all"] - regret(knob(group, end, knob_name))
    true_s = alike(group)
    found["one setting"], found["two settings"] = regret(min(true_s)), regret(two_settings(group, true_s))
    perfect = [PLACE[DEFAULT], *sorted(range(len(CONFIGS)), key=true_s.__getitem__)[: NUM_MEASURED - 1]]
    found["twelve best"] = regret(chosen_by_telling(group, perfect, true_s))
    found["list"] = regret(min(true_s[place] for place in family))
    found["list told"] = regret(chosen_by_telling(group, family, true_s))
    return found


def main() -> None:
    """Prints a row for each number of collectives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1001)
    parser.add_argument("--groups", type=count, default=40)
    parser.add_argument("--num-comms", type=numbers(int, 1), default=[1, 4, 8])
    parser.add_argument("--tuner", default="ours")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    for num_comms in chosen.num_comms:
        family = family_list(num_comms, chosen.groups)
        rows = [row_of(chosen.tuner, draw_group(chosen.seed, i, num_comms), family) for i in range(chosen.groups)]
        means = {words: fmean(row[words] for row in rows) for words in rows[0]}
        if chosen.json:
            print(json.dumps({"num_comms": num_comms, **means}), flush=True)
            continue
        print(
            f"{num_comms} collectives:",
            ", ".join(f"{words} {100 * mean:.2f}" for words, mean in means.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
