"""The trace of `lagom analyze --example`: what was put into it is found again."""

import json

import pytest

from lagom_overlap.cli.main import main
from lagom_overlap.trace.files import EXAMPLE
from lagom_overlap.verbs.from_trace import MAX_STEP_ERROR
from lagom_overlap.verbs.own_trace import job_for


@pytest.fixture
def found(capsys):
    assert main(["analyze", "--example", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example_says_what_was_put_into_it(found):
    """Kernels take 12 % longer beside a collective; all-gathers queue behind reduce-scatters of one communicator."""
    classes = {(row["kernel_class"], row["kind"]): row for row in found["contention"]["classes"]}
    gemm = classes["gemm", "reduce_scatter"]
    assert gemm["low"] - 0.01 <= 1.12 <= gemm["high"] + 0.01
    assert found["advice"][0]["rule"] == "shared_communicator"
    assert [part["name"] for part in found["parts"] if part["by"] == "phase"] == ["forward", "backward", "optimizer"]
    assert found["ranks"][0]["steps"] == 5
    assert "made-up" in found["warnings"][0]
    assert found["next_line"].startswith("lagom tune --example")
    assert str(EXAMPLE.parent) not in json.dumps(found)
    assert EXAMPLE.stat().st_size < 50_000


def test_the_next_line_of_the_example_predicts():
    job = job_for(None, EXAMPLE, seed=None, backend=None, bundle=None)
    assert 0 < job.from_trace.step_error < MAX_STEP_ERROR


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["analyze", "--example", "t.json"], ["tune", "--example", "--from-trace", "t.json"]]
)
def test_traces_or_the_example_one_of_them(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"lagom {arguments[0]}: give ")


def test_what_the_model_predicts_to_lose_is_no_advice(found):
    shares = {row["change"]: row["share"] for row in found["what_ifs"]}
    assert shares["at most 8 channels"] < 0, "half of the 16 that the reduce-scatters have"
    assert [advice["rule"] for advice in found["advice"]] == ["shared_communicator"]
