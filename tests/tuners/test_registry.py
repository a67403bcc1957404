"""Which search a tuner's name stands for."""

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.tuners.descent import Descent
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.model_based import ModelBased
from lagom_overlap.tuners.registry import OURS, check_takes_warm_start, takes_warm_start, tuner_factory


def test_ours_is_one_name_for_two_searches() -> None:
    assert tuner_factory(OURS) is ModelBased
    assert tuner_factory(OURS, online=True) is Descent
    assert tuner_factory("lagom") is tuner_factory("lagom", online=True) is Lagom


def test_a_warm_start_is_for_the_search_that_the_name_stands_for() -> None:
    assert takes_warm_start(OURS)
    assert not takes_warm_start(OURS, online=True)
    with pytest.raises(JobError, match="none of lagom, descent takes a warm start; allowed with: model_based, ours"):
        check_takes_warm_start("lagom", "descent")
