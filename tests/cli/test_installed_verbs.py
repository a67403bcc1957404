"""Verbs of other distributions: found by their entry point, named where one of ours is missing."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.cli.main import VERB_GROUP, _installed, _section

MODULE = """
def add_parser(verbs):
    parser = verbs.add_parser("greet", help="say good morning")
    parser.add_argument("--twice", action="store_true")
    parser.set_defaults(run=lambda arguments: 3 + arguments.twice)
"""


@pytest.fixture
def greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with the verb `greet`, one that cannot be loaded, and one that has a name of ours."""
    (tmp_path / "greeting.py").write_text(MODULE)
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{VERB_GROUP}]\ngreet = greeting:add_parser\nbroken = nowhere:add_parser\ndoctor = greeting:add_parser\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("greeting")
def test_a_verb_of_another_distribution_runs_with_its_own_flags() -> None:
    assert main(["greet"]) == 3
    assert main(["greet", "--twice"]) == 4


@pytest.mark.usefixtures("greeting")
def test_help_lists_it_and_says_what_could_not_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr()
    assert "say good morning" in told.out
    assert "broken" not in told.out
    assert told.err == (
        "lagom broken: nowhere:add_parser cannot be loaded: ModuleNotFoundError: No module named 'nowhere'\n"
    )


@pytest.mark.usefixtures("greeting")
def test_a_verb_of_ours_stays_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "say good morning" not in capsys.readouterr().out


def test_without_lagom_emulate_the_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["lagom_overlap.cli.main"], "_installed", lambda _: {})
    assert main(["emulate", "--cluster", "h100_dgx", "--", "true"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert (
        told.err
        == "lagom emulate: this verb is not installed; run: pip install ./emulate (in a clone of the repository)\n"
    )


@pytest.mark.usefixtures("greeting")
def test_one_that_cannot_be_loaded_is_the_users_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken"]) == 2
    assert capsys.readouterr().err.startswith("lagom broken: nowhere:add_parser cannot be loaded: ModuleNotFoundError")


@pytest.mark.usefixtures("greeting")
def test_what_is_found_without_importlib_metadata_is_what_that_finds() -> None:
    found = {entry.name: entry.value for entry in metadata.entry_points(group=VERB_GROUP)}
    assert {"greet", "reproduce"} <= found.keys()
    assert _installed("") == found


def test_only_the_lines_of_our_section_are_verbs() -> None:
    text = (
        f"[console_scripts]\na = b:c\n\n[{VERB_GROUP}]\n# d = e:f\n; g = h:i\nj=k:l\nm = n.o:p  \n\n"
        f"[{VERB_GROUP}.x]\nq = r:s\n"
    )
    assert list(_section(text)) == [("j", "k:l"), ("m", "n.o:p")]
