"""The releases of PyTorch that were tested: one file, from which the table in the docs and doctor's words come."""

from pathlib import Path

import pytest

from lagom_overlap.engines.torch_versions import as_markdown, release_of, releases_tested

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
ROWS = releases_tested()


def test_the_table_of_the_docs_is_the_file():
    before, _, rest = SUPPORT.read_text().partition("<!-- torch versions: begin -->\n")
    assert before
    assert rest.partition("\n<!-- torch versions: end -->")[0].lstrip("\n") == as_markdown(ROWS)


def test_every_row_says_what_ran_and_when():
    assert len({row.torch for row in ROWS}) == len(ROWS) >= 4
    assert [row.release for row in ROWS] == sorted(row.release for row in ROWS)
    for row in ROWS:
        assert row.alone.num_passed > 400
        assert row.with_ranks.num_passed > 300
        assert all(ran.date.count("-") == 2 for ran in row.runs)


@pytest.mark.parametrize(("text", "release"), [("2.13.0+cpu", (2, 13)), ("2.16.0a0+gitabc", (2, 16))])
def test_a_release_is_major_and_minor(text, release):
    assert release_of(text) == release
