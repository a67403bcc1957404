"""The changes that `benchmarks/mutations.py` makes: each is Python, says something else, and is the seed's."""

import ast
from pathlib import Path

import pytest

from mutations import Change, Imports, count, drawn, places

SOURCE = '''"""A module."""

LIMIT: int = 3


def most(values: list[int], *, more: bool = True) -> int:
    """The largest."""
    if not values or len(values) > LIMIT:
        raise ValueError("none")
    total = max(values[0], -values[1])
    return total + pow(2, 3, mod=5) if more else 0
'''
CHANGED = {
    ("off by one", "3", "(3 + 1)"),
    ("constant", "True", "False"),
    ("negated", "not values or len(values) > LIMIT", "(not (not values or len(values) > LIMIT))"),
    ("and, or", "not values or len(values) > LIMIT", "((not values) and (len(values) > LIMIT))"),
    ("dropped condition", "not values or len(values) > LIMIT", "((not values))"),
    ("dropped sign", "not values", "(values)"),
    ("comparison", "len(values) > LIMIT", "(len(values) >= LIMIT)"),
    ("deleted", 'raise ValueError("none")', "pass"),
    ("min, max", "max(values[0], -values[1])", "min(values[0], -values[1])"),
    ("swapped arguments", "pow(2, 3, mod=5)", "pow(3, 2, mod=5)"),
    ("dropped argument", "pow(2, 3, mod=5)", "pow(2, 3)"),
    ("arithmetic", "total + pow(2, 3, mod=5)", "((total) - (pow(2, 3, mod=5)))"),
    ("returned constant", "total + pow(2, 3, mod=5) if more else 0", "0"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "lagom_overlap"
    (package / "sim").mkdir(parents=True)
    (tmp_path / "tests" / "sim").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (package / "sim" / "sizes.py").write_text(SOURCE)
    (package / "verb.py").write_text("from lagom_overlap.sim.sizes import most\n")
    tests = tmp_path / "tests"
    (tests / "test_verb.py").write_text("from lagom_overlap.verb import most\n")
    (tests / "sim" / "test_sizes.py").write_text("import lagom_overlap.sim.sizes\n")
    (tests / "sim" / "test_ranks.py").write_text("import lagom_overlap.sim.sizes\npytestmark = [pytest.mark.gloo]\n")
    (tests / "test_other.py").write_text("import os\n")
    return tmp_path


def text_of(tree: Path, change: Change) -> tuple[str, str]:
    whole = (tree / change.path).read_bytes()
    changed = whole[: change.start] + change.after.encode() + whole[change.end :]
    return whole[change.start : change.end].decode(), changed.decode()


def test_each_kind_of_change_is_made_where_it_makes_sense(tree: Path) -> None:
    made = {(change.kind, text_of(tree, change)[0], change.after) for place in places(tree) for change in place}
    assert made >= CHANGED
    assert not any("A module" in before or "largest" in before or before == "int" for _, before, _ in made)


def test_every_change_is_python_and_another_program(tree: Path) -> None:
    own = ast.dump(ast.parse(SOURCE))
    for place in places(tree):
        for change in place:
            assert ast.dump(ast.parse(text_of(tree, change)[1])) != own, change


def test_the_first_changes_of_a_seed_are_the_first_of_more(tree: Path) -> None:
    assert drawn(tree, 5, 4) == drawn(tree, 5, 9)[:4]
    assert drawn(tree, 5, 9) != drawn(tree, 6, 9)


def test_tests_that_reach_a_module_come_nearest_first_and_those_with_ranks_not_at_all(tree: Path) -> None:
    (change, *_) = drawn(tree, 1, 1)
    assert Imports(tree).tests(change) == ["tests/sim/test_sizes.py", "tests/test_verb.py"]


def test_shares_are_counted_at_first_and_at_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = '{"path": "p", "start": %d, "end": 2, "kind": "k", "after": "a", "before": "b", "line": 1, "outcome": "%s", '
    row += '"number": %d, "tests": 3}\n'
    rows = [(1, "died", 0), (2, "survived", 1), (3, "hung", 2), (4, "survived", 3), (2, "died", 1)]
    (tmp_path / "results.jsonl").write_text("".join(row % each for each in rows))
    count(tmp_path)
    out = capsys.readouterr().out
    assert "at first: 2 of 4 noticed (50 %)" in out
    assert "at last: 3 of 4 noticed (75 %)" in out
    assert "3 p:1 k, survived, tests: 3\n    - b\n    + a\n" in out
