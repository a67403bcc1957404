"""PyTorch's operators in a trace: which are taken, and whose time; hand-made events, and a run of ours on gloo."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from kineto_traces import KinetoFile

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.operators import read_operators
from lagom_overlap.workload import Phase

OURS = Path(__file__).parents[1] / "data" / "zero_step_gloo_trace.json.gz"
FLOAT_MATRIX = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}


def event(name, start, length, *, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args}


def written(tmp_path, events, **top):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": events}))
    return path


def test_the_outermost_operator_that_is_asked_for_owns_what_it_calls(tmp_path):
    events = [
        event("aten::linear", 0, 10),
        event("aten::addmm", 1, 8, **FLOAT_MATRIX),
        event("aten::copy_", 2, 3),
        event("aten::copy_", 20, 4),
    ]
    path = written(tmp_path, events)
    found = read_operators(path, ["aten.addmm", "aten.copy_"]).operators
    assert [(held.kernel, held.seconds) for held in found] == [("aten.addmm", 8e-6), ("aten.copy_", 4e-6)]
    assert (found[0].shapes, found[0].element_bytes) == (((4, 8), (8, 2)), (4, 4))
    assert [held.kernel for held in read_operators(path, ["aten.linear", "aten.addmm"]).operators] == ["aten.linear"]


def test_an_operator_takes_the_kernels_that_it_and_its_callees_launched(tmp_path):
    events = [
        event("aten::mean", 0, 10, **{"External id": 1}),
        event("aten::sum", 2, 3, **{"External id": 2}),
        event("aten::mm", 20, 5, **{"External id": 3}),
        event("sum_kernel", 100, 7, cat="kernel", tid=7, device=0, stream=7, correlation=50, **{"External id": 2}),
        event("div_kernel", 110, 2, cat="kernel", tid=7, device=0, stream=7, correlation=51, **{"External id": 1}),
        # an old trace repeats the correlation where it knows no operator
        event("other", 120, 9, cat="kernel", tid=7, device=0, stream=7, correlation=3, **{"External id": 3}),
    ]
    found = read_operators(written(tmp_path, events), ["aten.mean", "aten.mm"])
    assert found.is_gpu
    assert [(held.kernel, held.seconds) for held in found.operators] == [("aten.mean", pytest.approx(9e-6))]


def test_phases_are_autograds_and_the_optimizers(tmp_path):
    events = [
        event("aten::mm", 0, 5),
        event("autograd::engine::evaluate_function: MmBackward0", 10, 10, tid=2),
        event("aten::mm", 11, 5, tid=2),
        event("Optimizer.step#SGD.step", 30, 10, cat="user_annotation"),
        event("aten::mm", 31, 5),
    ]
    found = read_operators(written(tmp_path, events), ["aten.mm"]).operators
    assert [held.phase for held in found] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    alone = read_operators(written(tmp_path, events[:1]), ["aten.mm"]).operators
    assert alone[0].phase is None


def test_what_runs_outside_of_the_profilers_steps_is_left_out(tmp_path):
    events = [
        event("aten::mm", 0, 5),
        event("ProfilerStep#3", 10, 10, cat="user_annotation"),
        event("aten::mm", 12, 7),
        event("aten::mm", 20, 5),
    ]
    found = read_operators(written(tmp_path, events), ["aten.mm"])
    assert (found.num_steps, [held.seconds for held in found.operators]) == (1, [7e-6])


def gloo(*events):
    return [*events], {"distributedInfo": {"world_size": 4, "pg_count": 1}}


def test_gloos_runs_are_the_calls_in_order_and_own_what_is_in_them(tmp_path):
    shard = {"Input Dims": [[16], [], []], "Input type": ["float", "Scalar", ""]}
    both = {"Input Dims": [[64], [16]], "Input type": ["float", "float"]}
    events, top = gloo(
        event("_c10d_functional::all_gather_into_tensor", 0, 2, **shard),
        event("_c10d_functional::reduce_scatter_tensor", 3, 2, **shard),
        event("aten::copy_", 3.5, 1),
        event("c10d::_allgather_base_", 6, 2, **both),
        event("_c10d_functional::wait_tensor", 9, 50),
        event("c10d::barrier", 5, 0.5),
        event("gloo:barrier", 52, 0.5, cat="user_annotation", tid=5),
        event("gloo:all_gather", 1, 20, cat="user_annotation", tid=5),
        event("aten::copy_", 2, 3, tid=5),
        event("gloo:all_reduce", 22, 30, cat="user_annotation", tid=5),
        event("gloo:all_gather", 53, 40, cat="user_annotation", tid=6),
    )
    found = read_operators(written(tmp_path, events, **top), ["aten.copy_"])
    assert found.operators == ()  # copies of collectives are theirs
    assert [(held.kind, held.seconds, held.num_bytes, held.num_ranks) for held in found.collectives] == [
        (CollectiveKind.ALL_GATHER, pytest.approx(20e-6), 4 * 64, 4),
        (CollectiveKind.REDUCE_SCATTER, pytest.approx(30e-6), 64, 4),
        (CollectiveKind.ALL_GATHER, pytest.approx(40e-6), 256, 4),
    ]


def test_a_gpus_collectives_are_its_kernels_in_the_steps(tmp_path):
    file = KinetoFile()
    file.add(**event("aten::mm", 95, 3))
    for start in (50, 110):
        file.nccl("AllGather_RING_LL", start, 12, op="_allgather_base", nelems=8192)
    file.step(1, 100, 50)
    found = read_operators(file.write(tmp_path / "gpu.json"), ["aten.mm"])
    assert found.operators == ()
    assert [(held.kind, held.seconds, held.num_bytes, held.num_ranks) for held in found.collectives] == [
        (CollectiveKind.ALL_GATHER, pytest.approx(12e-6), 8192 * 2, 8)
    ]


def test_collectives_of_several_groups_have_no_number_of_ranks(tmp_path):
    call = event("_c10d_functional::all_reduce", 0, 2, **{"Input Dims": [[16]], "Input type": ["float"]})
    run = event("gloo:all_reduce", 1, 9, cat="user_annotation", tid=5)
    found = read_operators(written(tmp_path, [call, run], distributedInfo={"world_size": 4, "pg_count": 2}), [])
    assert [(held.num_bytes, held.num_ranks) for held in found.collectives] == [(64, 0)]


@pytest.mark.parametrize(
    ("args", "shapes"),
    [
        ({"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"]}, ((2, 3),)),
        ({"Input Dims": "none", "Input type": 3}, ()),
        ({"Input Dims": [["a"]], "Input type": ["float"]}, ()),
        ({"Input Dims": [[[2], [3, 1]]], "Input type": ["TensorList"]}, ((2,), (3, 1))),
    ],
)
def test_shapes_are_read_where_they_are_shapes(tmp_path, args, shapes):
    found = read_operators(written(tmp_path, [event("aten::mm", 0, 1, **args)]), ["aten.mm"])
    assert found.operators[0].shapes == shapes


def test_what_is_no_trace_of_operators_is_refused(tmp_path):
    kernel = event("k", 0, 1, cat="kernel", device=0, stream=7, correlation=1)
    with pytest.raises(TraceError, match="no PyTorch operator in it"):
        read_operators(written(tmp_path, [kernel]), ["aten.mm"])
    with pytest.raises(TraceError, match="is a folder"):
        read_operators(tmp_path, ["aten.mm"])
    with pytest.raises(TraceError, match="cannot read"):
        read_operators(tmp_path / "nothing.json", ["aten.mm"])


def test_a_recorded_run_of_ours_holds_its_three_steps():
    """examples/plan_zero.py on two ranks: 36 products and 24 collectives of 2.25 MiB a step."""
    found = read_operators(OURS, ["aten.mm", "aten.relu"])
    assert (found.num_steps, found.is_gpu) == (3, False)
    assert Counter(held.kernel for held in found.operators) == {"aten.mm": 108, "aten.relu": 18}
    kinds = Counter((held.kind, held.num_bytes, held.num_ranks) for held in found.collectives)
    size = 384 * 1536 * 4
    assert kinds == {(CollectiveKind.ALL_GATHER, size, 2): 36, (CollectiveKind.REDUCE_SCATTER, size, 2): 36}
    with gzip.open(OURS) as file:
        raw = json.load(file)["traceEvents"]
    products = sum(e["dur"] for e in raw if e["name"] == "aten::mm")
    runs = sum(e["dur"] for e in raw if e["name"].startswith("gloo:all"))  # not gloo:barrier
    assert sum(held.seconds for held in found.operators if held.kernel == "aten.mm") == pytest.approx(products * 1e-6)
    assert sum(held.seconds for held in found.collectives) == pytest.approx(runs * 1e-6)


def test_the_kernels_of_a_real_trace_are_joined_as_an_independent_count_says(shared_traces):
    """ResNet-50 on two A100: 53 convolutions, forward and backward, in each of three steps."""
    path = shared_traces / "hta" / "nccl_data.json.gz"
    found = read_operators(path, ["aten.convolution", "aten.convolution_backward"])
    assert Counter((held.kernel, held.phase) for held in found.operators) == {
        ("aten.convolution", Phase.FORWARD): 159,
        ("aten.convolution_backward", Phase.BACKWARD): 159,
    }
    with gzip.open(path) as file:
        raw = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in raw if e["name"] == "aten::convolution_backward"]
    inside = {
        e["args"]["External id"]
        for e in raw
        if e.get("cat") == "cpu_op" and any(e["tid"] == tid and a <= e["ts"] < b for tid, a, b in spans)
    }
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    us = sum(e["dur"] for e in raw if e.get("cat") in wanted and e["args"].get("External id") in inside)
    backward = [held.seconds for held in found.operators if held.kernel == "aten.convolution_backward"]
    assert sum(backward) == pytest.approx(us * 1e-6, rel=1e-9)
