"""What modelling terms are worth: published steps predicted with each term at its neutral value, one at a time.

    python benchmarks/switched_off.py FILE.csv [NAME ...]

A term that moves the mean error of all rows by less than 0.1 point, and that of its best group by at most 0.5, is not
worth its lines and goes. What builds the operators of a step that users can ask for stays, whatever it is worth here.
Each term is switched off in a process of its own, where its field has the neutral value in every object.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

from iteration_time import evaluate
from lagom_overlap.cost.operators.gemm import GemmConstants
from lagom_overlap.cost.operators.operator_constants import FrameworkConstants, OperatorConstants
from lagom_overlap.workload.step.rules import IssueRules
from lagom_overlap.workload.step.traffic import Casts, Mixture, Traffic

NEUTRAL: Final[Mapping[str, tuple[type, Any]]] = {
    "keeps_weights": (Casts, False),
    "by_columns": (Casts, 0),
    "fuses_latent": (Traffic, True),
    "scaled_rotary": (Traffic, None),
    "repeats_keys": (Traffic, False),
    "joins_sums": (Traffic, False),
    "router_launches": (Mixture, 1),
    "casts_before_gathers": (IssueRules, False),
    "stops_recompute": (IssueRules, False),
    "further_launch_s": (FrameworkConstants, None),
    "eager_launch_s": (FrameworkConstants, None),
    "memory_efficiency": (FrameworkConstants, 1.0),
    "attention_exp_width": (OperatorConstants, 0),
    "rearranged_share": (OperatorConstants, 1.0),
    "sustained_share": (OperatorConstants, 1.0),
    "chunk_flops": (OperatorConstants, inf),
    "fp4_gain": (OperatorConstants, 1.0),
    "block_share": (OperatorConstants, 1.0),
    "wide_flops": (OperatorConstants, inf),
    "narrow_attention_gain": (OperatorConstants, 1.0),
    "least_window": (OperatorConstants, 0),
    "attention_share": (OperatorConstants, 1.0),
    "quantisation": (GemmConstants, 0.0),
}
"""A field, whose it is, and the value with which it says nothing."""
ALL_POINTS: Final = 0.1
GROUP_POINTS: Final = 0.5
"""Points of mean error from which on a term stays: over all rows, or in its best group."""


def switch_off(name: str) -> None:
    """From now on every object of the term's class has the neutral value.

    Raises:
        KeyError: if there is no such term.
    """
    owner, value = NEUTRAL[name]
    setattr(owner, name, _Neutral(value))


class _Neutral:
    """In place of a field's slot: its value, whatever a constructor or a decoder stores."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> object:
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        pass


def errors_of(path: Path, name: str | None) -> dict[str, float]:
    """Mean absolute errors (%) by group of rows, and of all rows (`""`), with a term switched off or none."""
    if name is not None:
        switch_off(name)
    found: Any = evaluate(path)
    errors = {group: float(one["mean_abs_error_pct"]) for group, one in found["groups"].items()}
    return {"": float(found["mean_abs_error_pct"]), **errors}


def verdict(on: Mapping[str, float], off: Mapping[str, float]) -> tuple[float, str, float, bool]:
    """(points of all rows, the group that loses most without the term, its points, whether the term stays)."""
    points = {group: off[group] - error for group, error in on.items() if group in off}
    best = max((group for group in points if group), key=points.__getitem__)
    return points[""], best, points[best], points[""] >= ALL_POINTS or points[best] > GROUP_POINTS


def main() -> None:
    """Prints a table, a row for each term as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]  # not under -OO
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"terms (default: all): {', '.join(NEUTRAL)}")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(errors_of(arguments.file, arguments.one)))
        return
    unknown = [name for name in arguments.names if name not in NEUTRAL]
    if unknown:
        parser.error(f"unknown term {unknown[0]!r}; allowed: {', '.join(NEUTRAL)}")
    on = errors_of(arguments.file, None)
    print(f"All terms on: {on['']:.2f} %\n")
    print("| term | switched off | points | best group, points | |\n|---|---|---|---|---|", flush=True)
    for name in arguments.names or NEUTRAL:
        command = [sys.executable, __file__, str(arguments.file), "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        off = json.loads(done.stdout)
        points, group, most, stays = verdict(on, off)
        word = "stays" if stays else "goes"
        print(f"| {name} | {off['']:.2f} % | {points:+.2f} | {group}, {most:+.2f} | {word} |", flush=True)


if __name__ == "__main__":
    main()
