"""Lines judged over what the paper does not say: the sweep changes what it says, and regions are told right."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lagom_overlap.cost import Collectives
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.papers.reproduce.figure3 import lines as lines_of_figure3
from lagom_overlap.papers.reproduce.figure8 import patterns
from lagom_overlap.papers.reproduce.ground import ASSUMED, DEFAULT, PROFILES, Assumed, model_of
from lagom_overlap.papers.reproduce.result import Line, ReproducedVerdict
from lagom_overlap.papers.reproduce.unknowns import (
    FIRST,
    assumed_in,
    described,
    everywhere,
    one_at_a_time,
    regions,
    swept,
)
from lagom_overlap.workload import Gemm
from lagom_overlap.workload.precision import DType

LINE = Line(
    figure="fig8",
    profile="plausible",
    what="a",
    published="1.35x",
    ours="1.01x",
    verdict=ReproducedVerdict.NOT,
    why="",
    taken="",
    gap=-0.25,
)
SHORT = ("1024 tokens", *FIRST[1:])
HALF = (*FIRST[:3], "half", *FIRST[4:])


def test_every_combination_and_each_deviation_alone() -> None:
    assert len(set(everywhere())) == 4 * 2 * 2 * 2 * 2 * 2
    assert len(set(one_at_a_time())) == 1 + 3 + 1 + 1 + 1 + 1 + 1
    assert everywhere()[0] == one_at_a_time()[0] == FIRST
    assert assumed_in(FIRST) is ASSUMED
    last = assumed_in(everywhere()[-1])
    assert last == Assumed(
        seq_len=512, precision=DType.FP32, kernels=0.5, links=0.5, release=Collectives.NCCL, persistent=True
    )


def test_what_is_assumed_is_what_the_model_and_the_step_have() -> None:
    """Half the rate: twice as long but for the launch; fp32: twice the bytes; half the wire: twice as long."""
    usual, half = model_of("a40_nvlink", "plausible", 1), model_of("a40_nvlink", "plausible", 1, Assumed(kernels=0.5))
    work = Gemm(4096, 2560, 2560)
    slower = half.kernel_seconds(half.kernel(work)) / usual.kernel_seconds(usual.kernel(work))
    assert slower == pytest.approx(2, rel=0.05)
    (gather,) = patterns()[0].comms
    (wide,) = patterns(Assumed(precision=DType.FP32))[0].comms
    assert wide.collective.num_bytes == 2 * gather.collective.num_bytes
    links = model_of("a40_nvlink", "plausible", 1, Assumed(links=0.5))
    took = links.collective(gather.collective, DEFAULT).seconds()
    assert took == pytest.approx(2 * usual.collective(gather.collective, DEFAULT).seconds(), rel=0.1)
    assert patterns(Assumed(seq_len=1024))[0].computations[0] != patterns()[0].computations[0]


@pytest.mark.parametrize("figure", ["fig3", "fig5", "fig8", "convergence"])
def test_the_first_setting_of_the_sweep_is_what_reproduce_says(figure: str) -> None:
    for profile in PROFILES:
        ((setting, lines),) = swept(figure, profile, 1, settings=[FIRST])
        assert setting == FIRST
        assert tuple(lines) == run_reproduce(figure, profiles=[profile]).lines


def test_fig5_is_decided_by_the_sequence_that_the_paper_does_not_give() -> None:
    """Where communication is the longer part, tuning the larger collective shortens the whole more (section 3.3)."""
    report = run_reproduce("fig5", profiles=["plausible"], unknowns=True)
    assert {line.verdict for line in report.lines} == {ReproducedVerdict.NOT}
    assert all(region.best is ReproducedVerdict.DIRECTION for region in report.regions)
    assert len(report.regions) == len(report.lines)


def test_fig3_is_of_the_sequence_that_is_assumed_and_of_products_that_run_on_every_sm() -> None:
    """A persistent product has its pass lost to the first channels: 32 cost no more than 8 (section 3.2's knee)."""
    assert lines_of_figure3("plausible", Assumed(seq_len=512)) != lines_of_figure3("plausible")
    losses = {}
    for persistent in (False, True):
        (line,) = (
            line
            for line in lines_of_figure3("plausible", Assumed(persistent=persistent))
            if line.what.startswith("3b: NC > 8")
        )
        losses[persistent] = float(line.ours.split("is ")[1].split("x")[0])
    assert losses[True] < 1.1
    assert losses[False] > 2


def test_an_interrupt_keeps_what_was_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **more: object) -> Iterator[object]:
        yield FIRST, [LINE]
        raise KeyboardInterrupt

    monkeypatch.setattr("lagom_overlap.papers.reproduce.swept", interrupted)
    report = run_reproduce("fig5", profiles=["plausible"], unknowns=True)
    assert report.is_interrupted
    assert report.chapters == ("fig5",)
    assert [region.what for region in report.regions] == ["a"]


def test_what_has_nothing_to_sweep_is_refused_in_a_line() -> None:
    with pytest.raises(UnknownNameError, match="'hidden'"):
        run_reproduce("hidden", unknowns=True)


def test_a_line_holds_where_it_is_reproduced_and_not_means_nowhere() -> None:
    better = replace(LINE, ours="1.2x", gap=-0.11)
    (nowhere,) = regions([(FIRST, [LINE]), (SHORT, [better]), (HALF, [LINE])])
    assert nowhere.where == "not reproduced in any of 3"
    assert nowhere.needed == "closest: sequence 1024 tokens (1.2x, 11 % short)"
    there = replace(LINE, verdict=ReproducedVerdict.REPRODUCED, ours="1.34x", gap=-0.007)
    some = replace(LINE, verdict=ReproducedVerdict.DIRECTION)
    (region,) = regions([(FIRST, [LINE]), (SHORT, [there]), (HALF, [some])])
    assert region.where == "reproduced: 1 of 3 (sequence 1024 tokens, links as stated); direction only: 1 of 3 " + (
        "(sequence 4096 tokens, links half)"
    )
    assert region.needed == ""
    assert described([FIRST, SHORT], [FIRST, SHORT]) == "all 2"
