import inspect

import pytest

from lagom_overlap import errors
from lagom_overlap.errors import BackendError, LagomError, UnknownNameError, allowed_names, did_you_mean


def error_classes() -> dict[str, type[Exception]]:
    return {name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}


def test_everything_a_user_can_fix_is_one_family() -> None:
    assert all(issubclass(cls, LagomError) for cls in error_classes().values())
    assert not issubclass(LagomError, ValueError)


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("|", " ").replace("`", " ").replace("--", "  ").split()
        if words and words[0].endswith("Error") and line.startswith("    "):
            drawn.append((line.index(words[0]), words[0]))
    parents: dict[str, str] = {}
    for place, (indent, name) in enumerate(drawn[1:], start=1):
        parents[name] = next(other for other_indent, other in reversed(drawn[:place]) if other_indent < indent)
    classes = error_classes()
    assert set(parents) | {"LagomError"} == set(classes)
    assert {name: classes[name].__bases__[0].__name__ for name in parents} == parents
    assert issubclass(errors.RankError, BackendError)


def test_an_unknown_name_lists_what_is_allowed_sorted_and_the_nearest() -> None:
    error = UnknownNameError.among("tuner", "lagon", ["lagom", "autoccl"])
    assert str(error) == "unknown tuner 'lagon' (did you mean 'lagom'?); allowed: autoccl, lagom"


def test_many_names_are_not_listed_where_the_nearest_or_a_command_helps() -> None:
    many = [f"name{number}" for number in range(30)]
    assert allowed_names("name3x", many) == " (did you mean 'name3'?)"
    assert allowed_names("zzz", many) == f"; allowed: {', '.join(many)}"
    assert allowed_names("zzz", many, "lagom docs") == "; all 30 of them: lagom docs"
    assert str(UnknownNameError.among("model", "zzz", many)).endswith("all 30 of them: lagom list models")


@pytest.mark.parametrize("name", ["", "zzz"])
def test_a_name_like_no_other_gets_no_hint(name: str) -> None:
    assert str(UnknownNameError.among("model", name, ["phi-2"])) == f"unknown model {name!r}; allowed: phi-2"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", " (did you mean 'h100_dgx' or 'h100_hbm2e'?)"),
        ("h10O_dgx", " (did you mean 'h100_dgx'?)"),
        ("mi", ""),  # begins three names: too many to list again, and near to none
        ("", ""),
    ],
)
def test_a_shortened_name_stands_for_those_that_begin_so(name: str, hint: str) -> None:
    presets = ["h100_dgx", "h100_hbm2e", "h200", "mi300x", "mi350x", "mi355x"]
    assert did_you_mean(name, presets) == hint
