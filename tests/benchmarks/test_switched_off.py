"""What a term is worth: the neutral value reaches every object, and the rule for what stays."""

from dataclasses import dataclass

import msgspec
import pytest

import switched_off


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """In place of a class of constants, which other tests use."""

    operand: int
    by_columns: int


def test_a_term_that_is_off_has_its_neutral_value_in_whatever_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(switched_off.NEUTRAL, "by_columns", (Toy, 0))
    switched_off.switch_off("by_columns")
    told = {"operand": 3, "by_columns": 7}
    for toy in (Toy(**told), msgspec.convert(told, Toy)):
        assert (toy.operand, toy.by_columns) == (3, 0)


def test_every_term_is_a_field_whose_neutral_value_its_class_allows() -> None:
    for name, (owner, _) in switched_off.NEUTRAL.items():
        assert name in owner.__dataclass_fields__


@pytest.mark.parametrize(
    ("off", "stays"),
    [
        ({"": 6.09, "a": 5.0, "b": 7.4}, False),  # 0.04 of all, 0.4 in b
        ({"": 6.15, "a": 5.0, "b": 7.0}, True),  # 0.1 of all
        ({"": 6.05, "a": 5.0, "b": 7.6}, True),  # 0.6 in b
        ({"": 5.90, "a": 4.0, "b": 7.0}, False),  # better without
    ],
)
def test_a_term_stays_for_a_tenth_of_a_point_of_all_or_half_a_point_in_one_group(off, stays) -> None:
    on = {"": 6.05, "a": 5.0, "b": 7.0}
    points, group, most, found = switched_off.verdict(on, off)
    assert found is stays
    assert points == pytest.approx(off[""] - 6.05)
    assert most == pytest.approx(max(off["a"] - 5.0, off["b"] - 7.0))
    assert group in ("a", "b")
