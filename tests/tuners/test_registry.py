"""Which search a tuner's name stands for."""

import pytest

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.registry import (
    OURS,
    check_takes_warm_start,
    check_tuner_name,
    takes_warm_start,
    tuner_factory,
)


def test_ours_is_one_search_everywhere() -> None:
    assert tuner_factory(OURS) is OurSearch
    assert tuner_factory("lagom") is Lagom
    for gone in ("model_based", "descent"):
        with pytest.raises(UnknownNameError, match="ours"):
            check_tuner_name(gone)


def test_a_warm_start_is_for_ours() -> None:
    assert takes_warm_start(OURS)
    with pytest.raises(JobError, match="none of lagom, autoccl takes a warm start; allowed with: ours"):
        check_takes_warm_start("lagom", "autoccl")
