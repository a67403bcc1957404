import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted_table import Fitted

WORDS = st.text("abcdefgh", min_size=1, max_size=40)
NUMBERS = st.sampled_from(["79.0 us", "1.23 ms", "+185.4 %", "0.998 to 1.002", "12.34 GiB", "-", ""])


def printed(table: Table, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(Fitted(table))
    return console.export_text()


@given(st.lists(st.tuples(WORDS, WORDS, *[NUMBERS] * 4), min_size=1, max_size=5), st.integers(30, 120), st.booleans())
def test_no_terminal_cuts_a_number_or_drops_a_column(rows, width, has_edge):
    table = Table(box=None, width=80, pad_edge=has_edge)
    table.add_column("name", overflow="fold", ratio=1)
    table.add_column("text", overflow="fold", ratio=1)
    for header in ("before", "after", "change", "95 % interval"):
        table.add_column(header, justify="right", no_wrap=True, min_width=8)
    for row in rows:
        table.add_row(*map(Text, row))
    text = printed(table, width)
    assert max(map(cell_len, text.splitlines())) <= width
    for number in {number for _, _, *numbers in rows for number in numbers} - {"", "-"}:
        shown = sum(row.count(number) for row in rows)
        assert text.count(number) == shown, (number, text)
    letters = "".join(char for row in rows for word in row[:2] for char in word)
    assert len(re.findall("[a-h]", text)) >= len(letters)


@pytest.mark.parametrize("width", [24, 40, 60, 79])
def test_a_narrow_terminal_has_each_value_after_its_name(width):
    table = Table(box=None, width=80, title="Times")
    table.add_column("collective", overflow="fold")
    for header in ("time alone", "in the overlap", "change", "of the whole iteration", "bandwidth"):
        table.add_column(header, no_wrap=True)
    table.add_row("all_gather", "79.0 us", "81.5 us", "+3.2 %", "12.5 %", "20.1 GB/s")
    text = printed(table, width)
    words = " ".join(text.split())
    assert words.startswith("Times collective all_gather time alone 79.0 us")
    for item in ("in the overlap 81.5 us", "change +3.2 %", "of the whole iteration 12.5 %", "bandwidth 20.1 GB/s"):
        assert item in words


def test_a_wide_terminal_has_the_table_as_it_is():
    table = Table(box=None, width=80)
    table.add_column("name", ratio=1)
    table.add_column("value", no_wrap=True)
    table.add_row("a", "1")
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    assert printed(table, 200) == console.export_text()
