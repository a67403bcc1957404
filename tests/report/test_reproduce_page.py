"""The page of a reproduction: every line is there, names are data, nothing is loaded."""

import html
from dataclasses import replace

import pytest

from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.papers.reproduce.page import headline, render_reproduction
from lagom_overlap.papers.reproduce.result import ReproducedVerdict, ReproduceReport


@pytest.fixture(scope="module")
def report() -> ReproduceReport:
    return run_reproduce("fig3")


def test_every_line_is_on_the_page_with_its_verdict(report: ReproduceReport) -> None:
    page = render_reproduction(report)
    for line in report.lines:
        assert line.verdict.value in page
        assert line.ours.replace(">", "&gt;") in page
        assert html.escape(line.taken).replace("&#x27;", "&#39;") in page
    assert page.count('data-figure="') == 4


def test_texts_are_data_and_the_page_loads_nothing(report: ReproduceReport) -> None:
    evil = replace(report.lines[0], what="<script>alert(1)</script>")
    page = render_reproduction(replace(report, lines=(evil, *report.lines[1:])))
    assert "<script>alert(1)" not in page
    assert "default-src 'none'" in page
    assert 'src="http' not in page


def test_the_headline_counts_verdicts(report: ReproduceReport) -> None:
    held = tuple(replace(report.lines[0], verdict=verdict) for verdict in ReproducedVerdict)
    assert headline(replace(report, lines=held)) == (
        "4 lines of the papers against the simulator: 1 reproduced, 1 direction only, 1 built in, 1 not reproduced."
    )
