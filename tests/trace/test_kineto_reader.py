import json
from pathlib import Path

import numpy as np
import pytest
from kineto_traces import NCCL, KinetoFile

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.gpu_trace import NO_TIME, EventRole, GpuTrace, KnobReach
from lagom_overlap.trace.reader import ReadOptions, compile_pattern, read_traces
from lagom_overlap.workload import Phase


def read(file: KinetoFile, tmp_path: Path, name: str = "rank0.json", pattern: str | None = None) -> GpuTrace:
    (trace,) = read_traces([file.write(tmp_path / name)], ReadOptions(pattern=compile_pattern(pattern)))
    return trace


def test_the_fields_of_an_a100_sample_become_one_all_reduce(tmp_path):
    # The event printed in HTA's own test data (nccl_data.json.gz), word for word.
    sample = json.loads(
        '{"ph":"X","cat":"kernel",'
        '"name":"ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",'
        '"pid":0,"tid":40,"ts":4458677009853.422,"dur":2636.669,"args":{"External id":12945,"queued":0,"device":0,'
        '"context":1,"stream":40,"correlation":60047,"registers per thread":96,"shared memory":87568,'
        '"blocks per SM":0.074074,"warps per SM":1.259259,"grid":[8,1,1],"block":[544,1,1],'
        '"est. achieved occupancy %":0,"Collective name":"allreduce","In msg nelems":6637568,"Out msg nelems":6637568,'
        '"Group size":2,"dtype":"Float","In split size":"[]","Out split size":"[]","Process Group Name":"0",'
        '"Process Group Description":"default_pg","Process Group Ranks":"[0, 1]"}}'
    )
    file = KinetoFile()
    file.events.append(sample)
    trace = read(file, tmp_path)
    (call,) = trace.calls
    assert (call.kind, call.communicator, call.ranks) == (CollectiveKind.ALL_REDUCE, "default_pg", (0, 1))
    assert (call.num_bytes, call.num_channels, call.num_threads) == (6637568 * 4, 8, 544)
    assert call.duration_ns == 2_636_669
    assert trace.events.start_ns.tolist() == [4458677009853422]
    assert call.reach is KnobReach.TUNER


def test_times_beyond_float64_are_exact_to_the_nanosecond(tmp_path):
    # 1694128201436271.123 us is about 2^60.6 ns: a float64 of it is wrong by up to 125 ns.
    data = (
        b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1694128201436271.123,'
        b'"dur":2.001,"args":{"device":0,"stream":7,"correlation":1}}]}'
    )
    path = tmp_path / "t.json"
    path.write_bytes(data)
    (trace,) = read_traces([path])
    assert trace.events.start_ns.tolist() == [1694128201436271123]
    assert trace.events.end_ns.tolist() == [1694128201436273124]


def test_times_just_within_float64_are_exact_to_the_nanosecond(tmp_path):
    # Near 2^42 us the nearest float times 1000, rounded, lies one off for some; so it does in HTA's nccl_data.json.gz.
    wanted = [4458677083276404 + n * 104729 for n in range(500)]
    wrong = sum(round(float(f"{ns // 1000}.{ns % 1000:03}") * 1000) != ns for ns in wanted)
    assert wrong > 50
    for name, odd in (("a.json", b""), ("b.json", b', {"ph":"X","cat":"kernel","ts":"x"}')):
        rows = [
            f'{{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":{ns // 1000}.{ns % 1000:03},"dur":0.007,'
            '"args":{"device":0,"stream":7,"correlation":1}}'
            for ns in wanted
        ]
        path = tmp_path / name
        path.write_bytes(b'{"traceEvents": [' + ",".join(rows * 8).encode() + odd + b"]}")
        (trace,) = read_traces([path])
        assert trace.events.start_ns.tolist() == [ns for ns in wanted for _ in range(8)]
        assert set((trace.events.end_ns - trace.events.start_ns).tolist()) == {7}


def test_old_traces_name_the_collective_through_the_cpu_event_around_the_launch(tmp_path):
    file = KinetoFile(distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8})
    for name, start in (("record_param_comms", 90.0), ("nccl:_all_gather_base", 92.0)):
        args = {"Input Dims": [[1, 1000]], "Input type": ["c10::BFloat16"]} if name.startswith("nccl") else {}
        file.add(ph="X", cat="user_annotation", name=name, pid=10, tid=5, ts=start, dur=20.0, args=args)
    file.kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", 200, 50, launch=95.0, tid=5, stream=9)
    (call,) = read(file, tmp_path).calls
    assert call.kind is CollectiveKind.ALL_GATHER
    assert call.num_bytes == 1000 * 2 * 8
    assert call.communicator == "stream 9"


@pytest.mark.parametrize(("name", "is_known"), [("nccl:all_reduce", True), ("nccl2:all_reduce", False)])
def test_the_engine_before_pytorch_2_15s_own_is_known_by_its_annotations(tmp_path, name, is_known):
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": 2})
    file.add(ph="X", cat="user_annotation", name=name, pid=10, tid=1, ts=90, dur=20, args={})
    file.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 200, 50, launch=95.0)
    assert ("ProcessGroupNCCL" in read(file, tmp_path).frameworks) is is_known


def test_send_receive_kernels_of_an_all_to_all_are_known_by_their_cpu_event(tmp_path):
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": 2})
    file.add(
        ph="X", cat="user_annotation", name="nccl:all_to_all", pid=10, tid=1, ts=90, dur=20,
        args={"Input Dims": [[2, 1024, 10]], "Input type": ["float"]},
    )  # fmt: skip
    file.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 200, 50, launch=95.0)
    (call,) = read(file, tmp_path).calls
    assert (call.kind, call.num_bytes, call.reach) == (
        CollectiveKind.ALL_TO_ALL,
        2 * 1024 * 10 * 4,
        KnobReach.P2P_CHANNELS,
    )


def test_rocm_grids_written_as_text_and_old_capital_categories_are_read(tmp_path):
    file = KinetoFile()
    file.kernel("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", 0, 10, grid="[64,1,1]", block="[256,1,1]")
    file.kernel(NCCL.format("Generic"), 20, 10, cat="Kernel", grid=[28, 1, 1], block=[512, 1, 1])
    file.kernel("Memcpy DtoD (Device -> Device)", 40, 10, cat="Memcpy", bytes=77)
    trace = read(file, tmp_path)
    assert trace.events.grid.tolist()[:2] == [[64, 1, 1], [28, 1, 1]]
    assert len(trace.events.rows(EventRole.COMM)) == 1
    assert trace.events.memory_op.tolist() == [0, 0, 1]


def test_a_launch_is_found_by_correlation_and_its_absence_is_said(tmp_path):
    file = KinetoFile()
    file.kernel("a", 100, 10, launch=50.0)
    file.kernel("b", 200, 10, launch=None)
    assert read(file, tmp_path).events.launch_ns.tolist() == [50_000, NO_TIME]


def test_the_users_pattern_makes_a_kernel_communication(tmp_path):
    file = KinetoFile()
    file.kernel("my_ring_exchange<8>(float*)", 0, 10)
    assert len(read(file, tmp_path).calls) == 0
    assert len(read(file, tmp_path, pattern="ring_exchange").calls) == 1


@pytest.mark.parametrize(("pattern", "why"), [("(", "not a regular expression"), (".*", "matches every kernel")])
def test_a_pattern_that_cannot_be_meant_is_refused(pattern, why):
    with pytest.raises(TraceError, match=why):
        compile_pattern(pattern)


def test_events_with_negative_or_no_duration_are_dropped_and_counted(tmp_path):
    file = KinetoFile()
    file.kernel("a", 0, 10)
    file.kernel("b", 20, -1)
    file.add(ph="X", cat="kernel", name="c", pid=0, tid=7, ts=5, args={})
    trace = read(file, tmp_path)
    assert len(trace.events) == 1
    assert any("1 GPU events with a negative duration" in text for text in trace.warnings)
    assert any("1 GPU events without a start or duration" in text for text in trace.warnings)


def test_a_kernel_before_its_launch_says_that_clocks_disagree(tmp_path):
    file = KinetoFile()
    file.kernel("a", 100, 10, launch=150.0)
    assert any("clocks" in text for text in read(file, tmp_path).warnings)


def test_steps_come_from_the_cpu_annotations_in_order(tmp_path):
    file = KinetoFile()
    file.step(8, 200, 90)
    file.step(7, 100, 90)
    file.kernel("a", 120, 5)
    assert [(s.number, s.start_ns, s.end_ns) for s in read(file, tmp_path).steps] == [
        (7, 100_000, 190_000),
        (8, 200_000, 290_000),
    ]


def test_the_rank_comes_from_the_file_name_where_the_trace_does_not_say(tmp_path):
    file = KinetoFile(distributedInfo=None)
    file.kernel("a", 0, 1)
    assert read(file, tmp_path, "job_rank-12.json").rank == 12
    assert read(file, tmp_path, "trace.json").rank is None


def test_kernels_of_two_devices_in_one_file_become_two_traces(tmp_path):
    file = KinetoFile()
    file.kernel("a", 0, 10, device=0)
    file.kernel("b", 5, 10, device=1)
    traces = read_traces([file.write(tmp_path / "t.json")])
    assert [len(trace.events) for trace in traces] == [1, 1]
    assert traces[0].file.endswith("(gpu 0)")


def test_two_groups_of_one_description_keep_apart(tmp_path):
    file = KinetoFile()
    file.nccl("AllGather_RING_LL", 0, 5, op="_allgather_base", nelems=800)
    file.nccl(
        "ReduceScatter_Sum_bf16_RING_LL", 9, 5, op="_reduce_scatter_base", nelems=800, **{"Process Group Name": "9"}
    )
    first, second = read(file, tmp_path).calls
    assert (first.communicator, second.communicator) == ("fsdp", "fsdp (pg 9)")
    assert first.num_bytes == second.num_bytes == 1600


def test_groups_without_a_name_are_told_apart_by_their_streams(tmp_path):
    """Torch 2.15 may leave names empty, and does not list the ranks of every group."""
    file = KinetoFile()
    for stream, description in ((20, "fsdp"), (24, "fsdp"), (20, "fsdp"), (28, "")):
        named = {"Process Group Name": "", "Process Group Description": description, "Process Group Ranks": "[]"}
        file.nccl(
            "AllGather_RING_LL", 10.0 * len(file.events), 5, op="_allgather_base", nelems=800, stream=stream, **named
        )
    found = [call.communicator for call in read(file, tmp_path).calls]
    assert found[0] == found[2] == "fsdp"
    assert len(set(found)) == 3
    assert {call.num_ranks for call in read(file, tmp_path).calls} == {8}


def test_an_all_gather_into_a_list_is_broadcasts_of_the_shares(tmp_path):
    """Torch 2.15 on eight ranks: the kernels are NCCL's broadcasts, and the outputs count as the input."""
    file = KinetoFile()
    counts = {"In msg nelems": 8000, "Out msg nelems": 1000}
    for number in range(8):
        file.nccl("Broadcast_RING_LL", 10.0 * number, 5, op="all_gather", nelems=0, **counts)
    calls = read(file, tmp_path).calls
    assert {(call.kind, call.op, call.num_bytes) for call in calls} == {(CollectiveKind.BROADCAST, "broadcast", 2000)}


def test_10_000_streams_are_no_trouble(tmp_path):
    file = KinetoFile()
    for stream in range(10_000):
        file.kernel("a", stream, 1.5, stream=stream, launch=None)
    assert len(read(file, tmp_path).events.streams) == 10_000


def test_shapes_of_the_cpu_operator_tell_two_problems_of_one_kernel_apart(tmp_path):
    file = KinetoFile()
    for external, dims in ((1, [[64, 64]]), (2, [[8, 8]]), (3, [[64, 64]])):
        file.add(
            ph="X", cat="cpu_op", name="aten::mm", pid=10, tid=1, ts=0, dur=1,
            args={"External id": external, "Input Dims": dims},
        )  # fmt: skip
        file.kernel("gemm", external * 10, 5, **{"External id": external})
    first, second, third = read(file, tmp_path).events.shape.tolist()
    assert first == third != second
    assert first >= 0


@pytest.mark.parametrize(
    "args",
    [
        {"stream": "seven", "correlation": "x", "grid": "big", "device": None},
        {"stream": [1], "grid": [1, 2, 3, 4], "block": {"x": 1}, "correlation": 1e300},
        {
            "Collective name": 5,
            "Group size": "many",
            "In msg nelems": -4,
            "dtype": 3,
            "Process Group Ranks": "[0, ...]",
        },
        {"bytes": -1, "External id": 2**70, "Input Dims": "none"},
    ],
)
def test_fields_of_foreign_types_are_unknown_and_break_nothing(tmp_path, args):
    file = KinetoFile()
    file.kernel(NCCL.format("AllReduce_Sum_f32_RING_LL"), 0, 10, **args)
    trace = read(file, tmp_path)
    (call,) = trace.calls
    assert call.num_bytes == 0
    assert np.all(trace.events.grid >= 0)


def test_a_trace_without_gpu_events_says_how_to_record_them(tmp_path):
    file = KinetoFile()
    file.step(1, 0, 10)
    with pytest.raises(TraceError, match=r"no GPU event among 1 events.*ProfilerActivity"):
        read(file, tmp_path)


def test_of_nested_cpu_events_the_innermost_names_the_collective(tmp_path):
    file = KinetoFile()
    for name, start, length in (("nccl:all_reduce", 80.0, 50.0), ("nccl:broadcast", 90.0, 20.0)):
        file.add(ph="X", cat="user_annotation", name=name, pid=10, tid=1, ts=start, dur=length, args={})
    file.kernel("ncclDevKernel_Generic(x)", 200, 50, launch=95.0)
    assert read(file, tmp_path).calls[0].kind is CollectiveKind.BROADCAST


def test_of_several_calls_with_one_correlation_the_earliest_launched(tmp_path):
    file = KinetoFile()
    correlation = file.kernel("a", 100, 10, launch=60.0)
    for at in (70.0, 40.0, 50.0):
        file.add(ph="X", cat="cuda_driver", name="x", pid=1, tid=1, ts=at, dur=1, args={"correlation": correlation})
    assert read(file, tmp_path).events.launch_ns.tolist() == [40_000]


def test_backward_passes_and_optimizer_steps_are_found_by_autograds_nodes(tmp_path):
    file = KinetoFile()
    file.kernel("k", 5, 5)
    for name, start, length in (
        ("autograd::engine::evaluate_function: MmBackward0", 1000, 100),
        ("autograd::engine::evaluate_function: AddBackward0", 1150, 100),
        ("FSDP::post_backward_reduce (0)", 1300, 50),
        ("Optimizer.step#AdamW.step", 1400, 300),
        ("autograd::engine::evaluate_function: MmBackward0", 5000, 100),
    ):
        file.add(ph="X", cat="cpu_op", name=name, pid=10, tid=1, ts=start, dur=length)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert trace.phases == (
        (Phase.BACKWARD, 1_000_000, 1_350_000),
        (Phase.BACKWARD, 5_000_000, 5_100_000),
        (Phase.OPTIMIZER, 1_400_000, 1_700_000),
    )
    assert trace.frameworks == {"FSDP"}


def test_events_of_another_accelerator_are_named_and_not_taken_for_a_trace_of_the_cpu(tmp_path):
    file = KinetoFile()
    args = {"stream": 102, "correlation": 18, "row": "0", "column": "0"}
    for n in range(3):
        file.add(ph="X", cat="mtia_ccp_events", name="fc-dtype_Float", pid=9, tid=408, ts=10 + n, dur=1, args=args)
        file.add(ph="X", cat="cpu_op", name="gloo:all_reduce", pid=9, tid=1, ts=10 + n, dur=1, args={})
        file.add(ph="X", cat="cpu_op", name="aten::mm", pid=9, tid=2, ts=10 + n, dur=1, args={})
    with pytest.raises(TraceError, match="its 3 device events are of category 'mtia_ccp_events', which is"):
        read_traces([file.write(tmp_path / "t.json")])
