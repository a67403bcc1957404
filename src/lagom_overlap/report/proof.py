"""The one page of a proof, and its writer and reader: proof.json and report.html in the run's folder."""

import shlex
from math import isfinite
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.errors import BundleError, in_words
from lagom_overlap.record import read_regular, write_private
from lagom_overlap.report.bars import BARS_WIDTH, Bar, time_ticks
from lagom_overlap.report.render import render
from lagom_overlap.report.style import BAD, GOOD
from lagom_overlap.results.base import decoded, encoded
from lagom_overlap.results.proof import ProofResult
from lagom_overlap.units import format_percent, format_seconds

PROOF_NAME: Final = "proof.json"
PAGE_NAME: Final = "report.html"
_MAX_BYTES: Final = 1 << 24
"""Chosen: a proof has some KB."""


def write_proof(folder: Path, result: ProofResult) -> None:
    """Writes both; the JSON first, so that a full disk costs the page alone.

    Raises:
        OutputError: if one cannot be written.
    """
    write_private(folder / PROOF_NAME, msgspec.json.format(encoded(result), indent=2) + b"\n")
    write_private(folder / PAGE_NAME, render_proof(result).encode())


def read_proof(run: Path) -> ProofResult | None:
    """The proof in the folder of a run; None where nothing was proven.

    Raises:
        BundleError: if it cannot be read or is damaged.
    """
    path = run / PROOF_NAME
    if not path.is_file():
        return None
    try:
        return decoded(ProofResult, msgspec.json.decode(read_regular(path, _MAX_BYTES)))
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BundleError(f"{str(path)!r} is damaged: {in_words(str(error))}") from None


def render_proof(result: ProofResult) -> str:
    """The whole page; the same result gives the same page."""
    pairs = [
        [str(number), format_seconds(default_s), format_seconds(configured_s), f"{default_s / configured_s:.4f}×"]
        for number, (default_s, configured_s) in enumerate(zip(result.default_s, result.configured_s, strict=False), 1)
    ]
    longest_s = max((*result.default_s, *result.configured_s), default=0.0)
    return render(
        "proof.html.j2",
        result=result,
        test=_test(result),
        where=_where(result),
        pairs=pairs,
        bars=_bars(result, longest_s),
        ticks=time_ticks(longest_s),
        colours=((GOOD, "configured is faster"), (BAD, "default is faster")),
        width=BARS_WIDTH,
    )


def _bars(result: ProofResult, longest_s: float) -> list[Bar]:
    """A bar for each pair, between its two step times."""
    unit = BARS_WIDTH / longest_s if longest_s else 0.0
    bars = []
    for row, (default_s, configured_s) in enumerate(zip(result.default_s, result.configured_s, strict=False)):
        is_faster = configured_s < default_s
        title = f"pair {row + 1}: default {format_seconds(default_s)}, configured {format_seconds(configured_s)}"
        width = max(1.0, unit * abs(default_s - configured_s))
        bars.append(Bar(unit * min(default_s, configured_s), width, row, GOOD if is_faster else BAD, title))
    return bars


def _test(result: ProofResult) -> list[list[str]]:
    blocks = "a whole run, median step" if result.steps_per_block is None else f"{result.steps_per_block} steps"
    rows = [["what is proven", result.kind], ["way", result.way], ["block", blocks]]
    judgement = result.judgement
    if judgement is None:
        return [*rows, ["pairs", "fewer than two: nothing can be said"]]
    high = f"{judgement.high:.4f}×" if isfinite(judgement.high) else "not ruled out"
    return [
        *rows,
        ["pairs", str(judgement.num_pairs)],
        ["default over configured, median", f"{judgement.ratio:.4f}×"],
        ["interval, from", f"{judgement.low:.4f}×" if judgement.low else "not ruled out"],
        ["interval, to", high],
        ["error rate, each side", format_percent(judgement.alpha, 0)],
        ["least gain that counts", format_percent(judgement.min_effect)],
        [
            "noise, default against itself",
            "not measured" if judgement.noise is None else format_percent(judgement.noise, 2),
        ],
    ]


def _where(result: ProofResult) -> list[list[str]]:
    known = [*result.machine.items(), *result.versions.items()]
    return [["command", shlex.join(result.command)], *([name, value] for name, value in known)]
