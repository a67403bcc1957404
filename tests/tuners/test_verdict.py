"""Quartiles and ratios worked by hand."""

import pytest

from lagom_overlap.tuners.verdict import NO_PAIRS, PairedRatio, judge


def test_ratios_are_taken_pair_by_pair_with_inclusive_quartiles() -> None:
    # Ratios 1.2, 0.9, 1.0, 1.5, 1.1; sorted 0.9 1.0 1.1 1.2 1.5: quartiles are the 2nd, 3rd and 4th.
    paired = PairedRatio.of([12, 9, 10, 15, 11], [10, 10, 10, 10, 10])
    assert paired == PairedRatio(num_pairs=5, median_ratio=1.1, q25=1.0, q75=1.2, num_wins=3)


def test_a_quartile_between_two_ratios_is_interpolated() -> None:
    # Sorted 1, 2, 3, 4: position 0.25 x 3 = 0.75 -> 1.75, 2.5, 3.25.
    paired = PairedRatio.of([4, 2, 3, 1], [1, 1, 1, 1])
    assert (paired.q25, paired.median_ratio, paired.q75, paired.num_wins) == (1.75, 2.5, 3.25, 3)


@pytest.mark.parametrize(
    ("default_s", "tuned_s", "adopted"),
    [
        ((11.0,) * 3, (10.0,) * 3, True),  # to the last bit: a formula
        ((11.0, 11.0, 11.01), (10.0,) * 3, False),
        ((11.0, 11.01) * 3 + (11.0,), (10.0, 10.01) * 3 + (10.0,), True),  # seven of seven: 1 in 128
        ((11.0, 11.01) * 3, (10.0, 10.01) * 3, False),
        ((11.0, 11.01) * 4, (10.0, 10.01) * 3 + (11.5, 11.5), False),
        ((10.0,) * 3, (10.0,) * 3, False),
    ],
)
def test_it_is_adopted_only_if_the_sequential_test_says_faster(default_s, tuned_s, adopted) -> None:
    verdict = judge({"default": default_s, "tuned": tuned_s}, tuned_differs=True, failures={})
    assert verdict.adopted is adopted


def test_the_default_itself_is_never_adopted() -> None:
    makespans_s = {"default": (11.0, 11.0, 11.0), "tuned": (10.0, 10.0, 10.0)}
    assert not judge(makespans_s, tuned_differs=False, failures={}).adopted


def test_the_best_fixed_setting_is_the_one_with_the_lowest_median() -> None:
    makespans_s = {
        "default": (10.0, 10.0, 10.0),
        "tuned": (5.0, 5.0, 5.0),
        "engine_default": (1.0, 1.0, 1.0),
        "fixed_min": (9.0, 7.0, 100.0),
        "fixed_max": (8.0, 8.0, 8.0),
    }
    verdict = judge(makespans_s, tuned_differs=True, failures={})
    assert verdict.best_fixed == "fixed_max"
    assert verdict.over_baselines["fixed_min"].median_ratio == 9.0 / 5.0
    assert set(verdict.over_baselines) == {"engine_default", "fixed_min", "fixed_max"}


def test_a_tuned_assignment_that_failed_has_no_pairs_and_is_not_adopted() -> None:
    verdict = judge({"default": (9.0, 9.0), "tuned": (1.0,)}, tuned_differs=True, failures={"tuned": "no memory"})
    assert verdict.over_default == NO_PAIRS
    assert not verdict.adopted
    assert verdict.failures == {"tuned": "no memory"}


@pytest.mark.parametrize(("base", "tuned"), [([1.0], [1.0]), ([1.0, 1.0], [1.0, 0.0]), ([1.0, 1.0], [1.0])])
def test_ratios_need_pairs_of_positive_makespans(base: list[float], tuned: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|longer|shorter"):
        PairedRatio.of(base, tuned)
