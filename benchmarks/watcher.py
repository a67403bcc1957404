"""How often the online tuner's watcher raises a false alarm, and how late it finds a real change of the step time.

    python benchmarks/watcher.py --seed 1 --hours 200 --changes 200 --json

Step times of 1 s on average are drawn from a form of noise; the watcher (`runtime/watcher.py`) sees them as the leader
does, in windows of `watch_steps`, with its default options. *False alarms per hour*: of steps that never change, the
watcher made anew after each alarm. *Delay*: steps from the change to the end of the window in which it alarms; the
change comes 200 to 400 steps after the job settled and stays. *Missed*: no alarm within 500 steps.
An alarm before the change counts for neither.

    gaussian_1 .. gaussian_5   1, 2, 5 % of white noise
    bimodal     one step in three is 15 % longer (2 % noise)
    runs        a neighbour: 10 % longer in runs of 5 to 40 steps, a tenth of all (2 % noise)
    stragglers  one step in eight is 20 to 60 % longer (2 % noise)
    saved       one step in fifty takes three times as long: a checkpoint (2 % noise)
    correlated  2 % noise whose neighbours are alike (an autoregression of 0.8), as from a machine's temperature
    warm_up     the first 30 steps begin 30 % longer and come down (2 % noise)
    slow_drift  a swing of 2 % up and down within an hour (2 % noise)
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

from lagom_overlap.runtime.options import OnlineOptions
from lagom_overlap.runtime.watcher import Watcher
from search_quality import percentile_95

SHIFTS = (1.05, 1.1, 1.2, 1.5)
SETTLED_STEPS = (200, 400)
GIVEN_UP = 500
STEPS_PER_HOUR = 3600
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


def runs(rng: Random) -> Iterator[float]:
    """A neighbour that comes and goes."""
    while True:
        for _ in range(round(rng.expovariate(1 / 200))):
            yield exp(rng.gauss(0, 0.02))
        for _ in range(rng.randint(5, 40)):
            yield 1.1 * exp(rng.gauss(0, 0.02))


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
    "runs": runs,
    "stragglers": stragglers,
    "saved": saved,
    "correlated": correlated,
    "warm_up": warm_up,
    "slow_drift": slow_drift,
}


def false_alarms(form: Form, seed: str, num_steps: int) -> int:
    """Alarms in so many steps that do not change."""
    options, rng, num = OnlineOptions(), Random(seed), 0
    steps, watcher = form(rng), Watcher(OnlineOptions().drift_ratio)
    for _ in range(num_steps // options.watch_steps):
        if watcher.see(list(islice(steps, options.watch_steps))):
            num += 1
            steps, watcher = form(rng), Watcher(options.drift_ratio)
    return num


def delay(form: Form, seed: str, shift: float) -> int | None:
    """Steps from a change to the alarm; None if there is none in time, 0 if it came before."""
    options, rng = OnlineOptions(), Random(seed)
    steps, watcher = form(rng), Watcher(options.drift_ratio)
    change = rng.randint(*SETTLED_STEPS)
    number = 0
    while number < change + GIVEN_UP:
        window = [
            step_s * (shift if number + place >= change else 1.0)
            for place, step_s in enumerate(islice(steps, options.watch_steps))
        ]
        number += options.watch_steps
        if watcher.see(window):
            return max(0, number - change)
    return None


def row_of(name: str, seed: int, hours: int, num_changes: int) -> dict[str, object]:
    """One form of noise."""
    form, num_steps = FORMS[name], STEPS_PER_HOUR
    alarms = sum(false_alarms(form, f"watch/{seed}/{name}/{hour}", num_steps) for hour in range(hours))
    row: dict[str, object] = {"noise": name, "false_alarms_per_hour": alarms / hours}
    for shift in SHIFTS:
        found = [delay(form, f"shift/{seed}/{name}/{shift}/{index}", shift) for index in range(num_changes)]
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
    parser.add_argument("--changes", type=int, default=50, help="changes per form and size")
    parser.add_argument("--noise", default=",".join(FORMS), help="forms by comma")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    rows = [row_of(name, args.seed, args.hours, args.changes) for name in args.noise.split(",")]
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
