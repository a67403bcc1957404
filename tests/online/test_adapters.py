"""What a framework computes is the same to the bit with our adapter and without, in every state of a route."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from adapter_calls import CALLS
from adapter_ddp import DDP
from adapter_fsdp2 import FSDP2

from forked_python import ForkedPython
from ports import free_port

SCRIPT = Path(__file__).with_name("adapter_job.py")
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]


def run(folder: Path, suite: str, num_ranks: int) -> dict[str, list[dict[str, object]]]:
    """What each rank found of each program."""
    port = free_port()
    logs = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(num_ranks)]
    ranks = []
    for rank, (out, err) in enumerate(logs):
        with out.open("w") as stdout, err.open("w") as stderr:
            what = [str(rank), str(num_ranks), str(port), suite]
            ranks.append(ForkedPython(SCRIPT, what, stdout=stdout, stderr=stderr))
    try:
        codes = [rank.wait(timeout=540) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * num_ranks, "\n".join(err.read_text()[-4000:] for _, err in logs)
    found: dict[str, list[dict[str, object]]] = {}
    for out, _ in logs:
        for line in out.read_text().splitlines():
            what = json.loads(line)
            found.setdefault(what["name"], []).append(what)
    return found


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return run(tmp_path_factory.mktemp("fsdp2"), "fsdp2", 2)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return run(tmp_path_factory.mktemp("ddp"), "ddp", 3)


@pytest.fixture(scope="module")
def ddp_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return run(tmp_path_factory.mktemp("ddp2"), "ddp", 2)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return run(tmp_path_factory.mktemp("calls"), "calls", 3)


def is_equal(ranks: list[dict[str, object]]) -> bool:
    for rank in ranks:
        assert rank["equal"], f"{rank['stock']}\n{rank['ours']}"
    return bool(ranks)


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2(fsdp2: dict[str, list[dict[str, object]]], name: str) -> None:
    assert is_equal(fsdp2[name])
    assert fsdp2[name][0]["num_used"] or "bf16" in name


def test_a_call_is_counted_once_however_many_adapters_it_passes(fsdp2: dict[str, list[dict[str, object]]]) -> None:
    """Else the n-th call of a step would be another one as soon as nothing is set, and nothing is in force."""
    once, twice = (fsdp2[name][0] for name in ("as it is", "plain calls routed, too"))
    assert once["num_calls"] == twice["num_calls"]
    assert once["num_used"] == twice["num_used"]


@pytest.mark.parametrize("name", DDP)
def test_ddp_on_three_ranks_where_a_third_is_no_binary_fraction(
    ddp: dict[str, list[dict[str, object]]], name: str
) -> None:
    assert is_equal(ddp[name])
    assert not ddp[name][0]["num_unjoined"] or "uneven" in name


@pytest.mark.parametrize("name", DDP)
def test_ddp_on_two_ranks_with_sliced_all_reduces(ddp_of_two: dict[str, list[dict[str, object]]], name: str) -> None:
    assert is_equal(ddp_of_two[name])
    assert ddp_of_two[name][0]["num_used"] or name in {
        "bucket views",
        "bucket views, gradients kept",
        "uneven inputs",
        "uneven inputs, divided by those that have some",
        "a hook of the user's own, since",
        "DDP's own hook ALLREDUCE, since",
        "DDP's own hook FP16_COMPRESS, since",
        "bf16",
    }


@pytest.mark.parametrize("name", CALLS)
def test_plain_calls(calls: dict[str, list[dict[str, object]]], name: str) -> None:
    assert is_equal(calls[name])
    assert len({rank["num_calls"] for rank in calls[name]}) == 1 or "not in" in name
    # All-reduces of three ranks are not sliced, torch's errors are the same whatever is in force.
    assert calls[name][0]["num_used"] or name in {"coalesced", "traced", "compiled", "what torch refuses"}
