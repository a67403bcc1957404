"""What releases of frameworks change, as data."""

from dataclasses import fields

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload.step import IssueRules, framework_names, load_rules, rules_in_release
from lagom_overlap.workload.step.rules import release_changes

DDP = load_rules("ddp")
FSDP2 = load_rules("fsdp2")
RULES = {name: load_rules(name) for name in framework_names()}


def test_every_change_is_of_a_framework_and_of_rules_that_there_are() -> None:
    known = {field.name for field in fields(IssueRules)}
    for change in release_changes():
        assert change.framework in RULES
        assert change.rules.keys() <= known
        assert all(getattr(RULES[change.framework], key) != value for key, value in change.rules.items())
        assert "=" in change.avoided_by


@pytest.mark.parametrize(
    ("release", "waits"),
    [(None, False), ("2.9", False), ("2.14.1", False), ("2.15", True), ("2.15.0", True), ("3.0", True)],
)
def test_ddp_waits_for_each_bucket_from_pytorch_2_15_on(release: str | None, waits: bool) -> None:
    assert rules_in_release(DDP, release).waits_for_buckets is waits


def test_a_release_is_refused_where_releases_are_not_told_apart() -> None:
    with pytest.raises(JobError, match=r"framework_release is '2.15', but releases of framework fsdp2 .* ddp"):
        rules_in_release(FSDP2, "2.15")
