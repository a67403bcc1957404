"""Commands that pages show: each is one of ours, with flags that it has; what needs nothing but the repository runs.

A block marked `sh` holds nothing else. Commands that take longer, want ranks or a GPU have tests of their own.
"""

import argparse
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.cli.main import full_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUICK = {"analyze", "init", "list", "runs", "show", "simulate"}
"""Verbs that end within a second, but for `simulate --model`, which simulates dozens of layouts."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _commands(text: str) -> list[list[str]]:
    """The words behind `lagom` of each line that begins with it, a prompt or variables before it or not.

    A line that begins with a blank is output.
    """
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        start = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*lagom (?=[a-z-]+(?:\s|$))", line)
        if start:
            try:
                found.append(shlex.split(line[start.end() :], comments=True))
            except ValueError:  # output that begins with the name, with a quote in it
                continue
    return found


def _shown(page: Path) -> list[list[str]]:
    """Commands in blocks and in the running text."""
    text = page.read_text(encoding="utf-8")
    plain = BLOCK.sub("", text)
    inline = re.findall(r"`(lagom [a-z][^`]*)`", plain.replace("\n", " "))
    indented = [line.strip() for line in plain.splitlines() if line.startswith("    lagom ")]
    return _commands("\n".join([*(block for _, block in BLOCK.findall(text)), *inline, *indented]))


@cache
def _flags() -> dict[str, frozenset[str]]:
    """The flags of each verb."""
    _, verbs = full_parser()
    return {
        name: frozenset(flag for action in parser._actions for flag in action.option_strings)
        for name, parser in verbs.choices.items()
        if isinstance(parser, argparse.ArgumentParser)
    }


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_that_a_page_shows_is_one_of_ours(page: Path):
    wrong = []
    for verb, *words in _shown(page):
        if verb not in _flags():
            wrong.append(verb)
            continue
        ours = words[: words.index("--")] if "--" in words else words
        given = {word.partition("=")[0].rstrip(",.;:") for word in ours if word.startswith("--")}
        wrong += [f"{verb} {flag}" for flag in sorted(given - _flags()[verb])]
        wrong += [
            word for word in words if word.startswith("examples/") and not (ROOT / word.partition(":")[0]).exists()
        ]
    assert wrong == []


def _needs_nothing_else(words: list[str], made: set[str]) -> bool:
    """Whether a command reads only what the repository has, or what one before it on its page wrote."""
    verb, *rest = words
    if verb not in QUICK or any(re.search(r"[A-Z]{2}|\.\.\.", word) for word in rest):
        return False
    if verb in ("analyze", "simulate", "show"):
        return rest[:1] == ["--example"] or any(word in made or (ROOT / word).is_file() for word in rest[:1])
    return verb == "runs" or any(not word.startswith("-") for word in rest[:1])


QUICK_ON = {page: [words for words in _shown(page) if words[0] in QUICK] for page in PAGES}


@pytest.mark.parametrize("page", [page for page, shown in QUICK_ON.items() if shown], ids=_name)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    marked = [
        words
        for kind, block in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == "sh"
        for words in _commands(block)
    ]
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    made, ran = set(), []
    for words in QUICK_ON[page]:
        made |= {after for before, after in pairwise(words) if before == "--out"}
        if words in ran or not _needs_nothing_else(words, made):
            continue
        assert main(words) == 0, words
        assert capsys.readouterr().out.strip(), words
        ran.append(words)
    assert [words for words in marked if words not in ran] == []


def _outputs(page: Path) -> list[tuple[list[str], list[str]]]:
    """Commands behind a prompt that need nothing else, each with the lines below it in its block."""
    found = list[tuple[list[str], list[str]]]()
    for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, *lines = part.splitlines()
            words = _commands(typed)
            if words and lines and _needs_nothing_else(words[0], set()):
                found.append((words[0], lines))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if _outputs(page)], ids=_name)
def test_output_that_a_page_shows_is_what_the_command_prints(page: Path, tmp_path: Path, monkeypatch, capsys):
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for words, lines in _outputs(page):
        assert main(words) == 0
        printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
        assert [line for line in lines if line not in ("", "...") and line.rstrip() not in printed] == [], words


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_scripts_and_make_targets_that_a_page_shows_are_there(page: Path):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = [f"make {name}" for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE) if name not in targets]
    for script, rest in re.findall(r"\b((?:examples|benchmarks)/[\w/]+\.py)(?![:\w])([^`\n#]*)", text):
        path = ROOT / script
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        wrong += [script] * (not source)
        wrong += [f"{script} {flag}" for flag in re.findall(r"\s(--[a-z][\w-]*)", rest) if f'"{flag}"' not in source]
    assert wrong == []
