"""Our script draws every figure of a page, in a real browser."""

import re
import shutil
import subprocess

import pytest

from lagom_overlap.report.tune.page import render_tuning

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_every_figure_that_is_shown_is_drawn_with_numbers(report, tmp_path):
    text = render_tuning(report)
    (tmp_path / "page.html").write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    page = (tmp_path / "page.html").as_uri()
    drawn = subprocess.run(
        [CHROMIUM, *flags, profile, "--dump-dom", page], capture_output=True, text=True, timeout=50, check=True
    ).stdout
    num = text.count('class="plot"')
    assert num >= 4
    plots = re.findall(r'<div class="plot".*?</div>', drawn, re.DOTALL)
    assert len(plots) == num
    for plot in plots:
        marks = re.findall(r"<(?:rect|circle|path|polygon|line) [^>]*>", plot)
        assert len(marks) > 5
        assert not [mark for mark in marks if "NaN" in mark or "undefined" in mark]
        assert 'class="tick"' in plot
    assert "data-hover" in drawn
