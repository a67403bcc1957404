"""`lagom docs` shows the pages of this version, and what is printed names pages by it: a wheel has no folder docs/."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lagom_overlap.cli import main

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("src", "emulate/src") for path in (ROOT / folder).rglob("*.py"))


@cache
def _said(source: Path) -> list[str]:
    """The strings of a module that names a page, but its docstrings."""
    text = source.read_text(encoding="utf-8")
    if ".md" not in text and "lagom docs" not in text:  # parsing all modules would take seconds
        return []
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


def test_nothing_that_is_printed_names_a_file_of_a_checkout() -> None:
    found = [
        (path.name, text)
        for path in SOURCES
        for text in _said(path)
        if re.search(r"\b(docs|guides)/\w+(/\w+)?\.md", text)
    ]
    assert found == []


def test_every_page_that_is_named_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    named = {
        name for path in SOURCES for text in _said(path) for name in re.findall(r"\blagom docs ([a-z][\w/]*)", text)
    }
    assert {"accuracy", "formats", "support"} <= named
    for name in sorted(named):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out.startswith("# ")


def test_without_a_page_it_lists_all_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    out = capsys.readouterr().out
    assert "howto/no_gain " in out
    assert "Why is there no gain?" in out
    assert out.rstrip().splitlines()[-1].startswith("Next: lagom docs ")


def test_a_page_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "acuracy"]) == 2
    assert "unknown page 'acuracy' (did you mean 'accuracy'?)" in capsys.readouterr().err
