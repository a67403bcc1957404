"""How often the online tuner's watcher raises a false alarm, and how late it finds a real change of the step time.

    python benchmarks/watcher.py --seed 1 --hours 100 --changes 100 --detectors watcher,watcher:30,cusum:20 --json

Step times of 1 s on average are drawn from a form of noise; a detector sees them as the leader shows them to the
watcher (`online/watcher.py`), in windows of `watch_steps`, with its default options or `--ratio`. *False alarms per
hour*: of steps that never change for good; after each alarm a new watcher begins, which knows the slow phases known so
far, as in a job. *Slow phases per hour*: those that the watcher tells as over by themselves. *Delay*: steps from the
change to the end of the window in which it alarms; the change comes 200 to 400 steps after the job settled and stays.
*Missed*: no alarm within 500 steps. An alarm before the change counts for neither.

`watcher:N` waits N steps (`drift_steps`); the peers in `watcher_peers.py` are named with their threshold.

    gaussian_1 .. gaussian_5   1, 2, 5 % of white noise
    bimodal     one step in three is 15 % longer (2 % noise)
    runs        a neighbour: 10 % longer in runs of 5 to 40 steps, a tenth of all (2 % noise)
    stragglers  one step in eight is 20 to 60 % longer (2 % noise)
    saved       one step in fifty takes three times as long: a checkpoint (2 % noise)
    correlated  2 % noise whose neighbours are alike (an autoregression of 0.8), as from a machine's temperature
    warm_up     the first 30 steps begin 30 % longer and come down (2 % noise)
    slow_drift  a swing of 2 % up and down within an hour (2 % noise)
    long_runs   a neighbour: 10 % longer in runs of 20 to 200 steps, a tenth of all (2 % noise)
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import islice
from math import exp, pi, sin, sqrt
from random import Random
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.watcher import SlowPhases, Watcher
from search_quality import percentile_95
from watcher_peers import PEERS, Detector

SHIFTS = (1.03, 1.05, 1.1, 1.2)
SETTLED_STEPS = (200, 400)
GIVEN_UP = 500
STEPS_PER_HOUR = 3600
WINDOW = OnlineOptions().watch_steps
Form = Callable[[Random], Iterator[float]]


def gaussian(sigma: float) -> Form:
    """White noise."""

    def steps(rng: Random) -> Iterator[float]:
        while True:
            yield exp(rng.gauss(0, sigma))

    return steps


def bimodal(rng: Random) -> Iterator[float]:
    """A slow mode."""
    while True:
        yield exp(rng.gauss(0, 0.02)) * (1.15 if rng.random() < 1 / 3 else 1.0)


def neighbour(mean_gap: float, least: int, most: int) -> Form:
    """A neighbour that comes and goes."""

    def steps(rng: Random) -> Iterator[float]:
        while True:
            for _ in range(round(rng.expovariate(1 / mean_gap))):
                yield exp(rng.gauss(0, 0.02))
            for _ in range(rng.randint(least, most)):
                yield 1.1 * exp(rng.gauss(0, 0.02))

    return steps


def stragglers(rng: Random) -> Iterator[float]:
    """Late ranks."""
    while True:
        yield exp(rng.gauss(0, 0.02)) * (rng.uniform(1.2, 1.6) if rng.random() < 1 / 8 else 1.0)


def saved(rng: Random) -> Iterator[float]:
    """Checkpoints."""
    while True:
        yield exp(rng.gauss(0, 0.02)) * (3.0 if rng.random() < 1 / 50 else 1.0)


def correlated(rng: Random) -> Iterator[float]:
    """Noise with a memory."""
    state = 0.0
    while True:
        state = 0.8 * state + sqrt(1 - 0.8**2) * rng.gauss(0, 0.02)
        yield exp(state)


def warm_up(rng: Random) -> Iterator[float]:
    """The first steps are longer."""
    number = 0
    while True:
        yield exp(rng.gauss(0, 0.02)) * (1 + 0.3 * max(0.0, 1 - number / 30))
        number += 1


def slow_drift(rng: Random) -> Iterator[float]:
    """A slow swing."""
    number = rng.randrange(STEPS_PER_HOUR)
    while True:
        yield exp(rng.gauss(0, 0.02) + 0.02 * sin(2 * pi * number / STEPS_PER_HOUR))
        number += 1


FORMS: dict[str, Form] = {
    "gaussian_1": gaussian(0.01),
    "gaussian_2": gaussian(0.02),
    "gaussian_5": gaussian(0.05),
    "bimodal": bimodal,
    "runs": neighbour(200, 5, 40),
    "stragglers": stragglers,
    "saved": saved,
    "correlated": correlated,
    "warm_up": warm_up,
    "slow_drift": slow_drift,
    "long_runs": neighbour(990, 20, 200),
}


Begin = Callable[[], Detector]
"""Makes a detector for the job as it is set now; those of one job share what they know of slow phases."""


def detector(name: str, ratio: float, phases: SlowPhases) -> Begin:
    """A detector by its name and, after a colon, its patience or threshold."""
    kind, _, value = name.partition(":")
    if kind == "watcher":
        patience = int(value) if value else OnlineOptions().drift_steps
        return lambda: Watcher(ratio, patience, phases)
    peer, threshold = PEERS[kind], float(value)
    return lambda: peer(ratio, threshold)


def false_alarms(form: Form, seed: str, num_steps: int, name: str, ratio: float) -> tuple[int, int]:
    """Alarms in that many steps that do not change, and slow phases told."""
    rng, phases, num = Random(seed), SlowPhases(), 0
    begin = detector(name, ratio, phases)
    steps, found = form(rng), begin()
    for _ in range(num_steps // WINDOW):
        if found.see(list(islice(steps, WINDOW))):
            num += 1
            steps, found = form(rng), begin()
    return num, phases.num_over


def delay(form: Form, seed: str, shift: float, name: str, ratio: float) -> int | None:
    """Steps from a change to the alarm; None if there is none in time, 0 if it came before."""
    rng = Random(seed)
    steps, found = form(rng), detector(name, ratio, SlowPhases())()
    change = rng.randint(*SETTLED_STEPS)
    number = 0
    while number < change + GIVEN_UP:
        window = [
            step_s * (shift if number + place >= change else 1.0) for place, step_s in enumerate(islice(steps, WINDOW))
        ]
        number += WINDOW
        if found.see(window):
            return max(0, number - change)
    return None


def row_of(name: str, noise: str, given: argparse.Namespace) -> dict[str, object]:
    """One detector under one form of noise."""
    form, seed = FORMS[noise], given.seed
    num_steps = given.job_hours * STEPS_PER_HOUR
    told = [
        false_alarms(form, f"watch/{seed}/{noise}/{number}", num_steps, name, given.ratio)
        for number in range(given.hours // given.job_hours)
    ]
    hours = len(told) * given.job_hours
    row: dict[str, object] = {
        "detector": name,
        "noise": noise,
        "false_alarms_per_hour": sum(alarms for alarms, _ in told) / hours,
        "slow_phases_per_hour": sum(phases for _, phases in told) / hours,
    }
    for shift in SHIFTS if given.changes else ():
        seeds = [f"shift/{seed}/{noise}/{shift}/{index}" for index in range(given.changes)]
        found = [delay(form, each, shift, name, given.ratio) for each in seeds]
        delays = [steps for steps in found if steps]
        percent = round(100 * (shift - 1))
        row |= {
            f"missed_{percent}": fmean(steps is None for steps in found),
            f"median_delay_{percent}": median(delays) if delays else None,
            f"p95_delay_{percent}": percentile_95([float(steps) for steps in delays]) if delays else None,
        }
    return row


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=int, default=50, help="hours of unchanged steps per form of noise")
    parser.add_argument("--job-hours", type=int, default=1, help="hours of one job; the next knows nothing of it")
    parser.add_argument("--changes", type=int, default=50, help="changes per form and size; 0: false alarms alone")
    parser.add_argument("--detectors", default="watcher", help="names by comma, each with :patience or :threshold")
    parser.add_argument("--ratio", type=float, default=OnlineOptions().drift_ratio, help="what counts as a change")
    parser.add_argument("--noise", default=",".join(FORMS), help="forms by comma")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    rows = [row_of(name, noise, args) for noise in args.noise.split(",") for name in args.detectors.split(",")]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    table = Table(title="the watcher: false alarms, shares missed, delays in steps")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=240).print(table)


if __name__ == "__main__":
    main()
