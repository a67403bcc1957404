from pathlib import Path

import pytest

from lagom_overlap.jobfile.spec import ParallelTable
from lagom_overlap.workload.parallel import Dispatcher
from lagom_overlap.workload.step.rules import RULES, Sharding
from lagom_overlap.workload.step.switches import DISPATCHERS, SWITCHES

FORMATS = Path(__file__).parents[3] / "docs" / "formats.md"


@pytest.mark.parametrize("key", SWITCHES)
def test_the_documentation_names_the_frameworks_that_have_a_switch_and_what_they_call_it(key: str) -> None:
    lines = FORMATS.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| `{key}`"))
    for framework, line in SWITCHES[key].items():
        is_fsdp2 = RULES[framework].sharding is Sharding.FSDP2
        assert f"`{framework}`" in row or (is_fsdp2 and "FSDP2" in row)
        named = next((word for word in line.replace(",", " ").split() if set(word) & set("-_")), "")
        assert named in row


def test_every_switch_is_a_key_of_job_files_and_of_frameworks_that_there_are() -> None:
    assert set(SWITCHES) <= set(ParallelTable.__struct_fields__)
    for having in (*SWITCHES.values(), *DISPATCHERS.values()):
        assert set(having) <= set(RULES)
    assert Dispatcher.ALL_TO_ALL not in DISPATCHERS
