"""The toy run of `toy_tuning` as fixtures."""

import pytest
from toy_tuning import toy_group, toy_report, with_failure

from lagom_overlap.results.tune import TuneResult


@pytest.fixture(scope="session")
def report() -> TuneResult:
    return toy_report()


@pytest.fixture
def make_report():
    return toy_report


@pytest.fixture
def make_group():
    return toy_group


@pytest.fixture
def add_failure():
    return with_failure
