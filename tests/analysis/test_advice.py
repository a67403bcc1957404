import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.advice import Advice, nccl_version
from lagom_overlap.analysis.advice_rules import advice_of, looked_for, without_losses
from lagom_overlap.analysis.findings import analyse
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.sim.what_if import AskedChange, Spent, what_if
from lagom_overlap.trace.gpu_trace import EventRole, KnobReach

COMM, COMP = EventRole.COMM, EventRole.COMPUTE
AG = {"kind": CollectiveKind.ALL_GATHER, "op": "all_gather", "communicator": "fsdp"}
RS = {"kind": CollectiveKind.REDUCE_SCATTER, "op": "reduce_scatter", "communicator": "fsdp"}


def advice(*traces):
    return {held.rule: held for held in advice_of(analyse(traces))}


def stretched(num=20, **fields):
    """GEMMs of 100 us alone, of 150 us during a hidden collective."""
    rows, names, calls = [], [], []
    for n in range(num):
        at = n * 400_000
        rows += [(COMP, at, at + 100_000), (COMP, at + 200_000, at + 350_000), (COMM, at + 205_000, at + 345_000)]
        names += ["gemm", "gemm", "ncclDevKernel_AllGather"]
        calls.append(AG)
    return gpu_trace(rows, names=names, calls=calls, **fields)


def test_a_hidden_collective_that_stretches_gets_fewer_channels():
    found = advice(stretched())["fewer_channels"]
    # 20 runs x 50 us, one window, half of it: 0.5 ms.
    assert found.predicted_gain_s == pytest.approx(0.5e-3)
    assert "1.50 times" in found.evidence
    assert "max_ctas = 8" in found.apply


def test_an_all_to_all_is_told_its_own_variable():
    trace = stretched()
    calls = tuple(
        type(call)(**{f: getattr(call, f) for f in call.__slots__} | {
            "kind": CollectiveKind.ALL_TO_ALL, "op": "all_to_all", "reach": KnobReach.P2P_CHANNELS,
        })
        for call in trace.calls
    )  # fmt: skip
    changed = type(trace)(**{f: getattr(trace, f) for f in trace.__slots__} | {"calls": calls})
    assert advice(changed)["fewer_channels"].apply.startswith("export NCCL_MAX_P2P_NCHANNELS=8 ")


def test_what_no_knob_reaches_gets_no_channels():
    trace = stretched()
    calls = tuple(
        type(call)(**{f: getattr(call, f) for f in call.__slots__} | {"reach": KnobReach.NONE}) for call in trace.calls
    )
    changed = type(trace)(**{f: getattr(trace, f) for f in trace.__slots__} | {"calls": calls})
    assert "fewer_channels" not in advice(changed)


def test_a_healthy_trace_gets_no_advice():
    rows = [(COMP, n * 100_000, n * 100_000 + 99_000) for n in range(40)]
    assert advice(gpu_trace(rows)) == {}


def test_an_exposed_collective_learns_from_a_faster_one_in_the_same_trace():
    calls = [{"num_bytes": 64 << 20, "num_channels": 4}, {"num_bytes": 64 << 20, "num_channels": 16}]
    trace = gpu_trace([(COMM, 0, 4_000_000), (COMM, 5_000_000, 6_000_000)], calls=calls)
    found = advice(trace)["more_channels"]
    assert found.predicted_gain_s == pytest.approx(3e-3)
    assert "min_ctas = 16" in found.apply
    assert "new_group(" in found.apply
    assert "holds for all its collectives" in found.apply
    old = advice(gpu_trace([(COMM, 0, 4_000_000), (COMM, 5_000_000, 6_000_000)], calls=calls, nccl_version="2.14.3"))
    assert old["more_channels"].apply.startswith("export NCCL_MIN_NCHANNELS=16")
    world = [call | {"communicator": "default_pg"} for call in calls]
    whole = advice(gpu_trace([(COMM, 0, 4_000_000), (COMM, 5_000_000, 6_000_000)], calls=world))
    assert "init_process_group(" in whole["more_channels"].apply


def test_small_all_reduces_under_ddp_ask_for_larger_buckets():
    calls = [{"num_bytes": 1 << 16}] * 8 + [{"num_bytes": 32 << 20}]
    rows = [(COMM, n * 100_000, n * 100_000 + 50_000) for n in range(8)] + [(COMM, 900_000, 1_900_000)]
    assert "bucket_cap_mb" not in advice(gpu_trace(rows, calls=calls))["larger_buckets"].apply
    found = advice(gpu_trace(rows, calls=calls, frameworks=frozenset({"DDP"})))["larger_buckets"]
    assert "bucket_cap_mb" in found.apply
    # At the large one's rate 64 KiB take 1/512 of 1 ms: 8 x (50 us - 1.953 us).
    assert found.predicted_gain_s == pytest.approx(8 * (50e-6 - 1e-3 / 512))


def test_many_small_all_reduces_alone_are_joined_whatever_makes_them():
    """60 of 98 KB, each exposed for 30 of its 50 us: one joined call pays one latency of the 60."""
    rows = [(COMM, n * 100_000, n * 100_000 + 50_000) for n in range(60)]
    rows += [(COMP, n * 100_000, n * 100_000 + 20_000) for n in range(60)]
    found = advice(gpu_trace(rows, calls=[{"num_bytes": 98_304}] * 60))["larger_buckets"]
    assert found.predicted_gain_s == pytest.approx(59 * 30e-6)
    assert "60 all-reduces below 1 MiB per step" in found.evidence
    assert "larger_buckets" not in advice(gpu_trace(rows[:3], calls=[{"num_bytes": 98_304}] * 3))


def test_buckets_of_ddp_that_nothing_hides_ask_for_the_engine_before():
    """Four of 1 ms, each between computations; all but the last could be hidden."""
    rows = [
        (kind, 2_000_000 * n + at, 2_000_000 * n + at + 1_000_000)
        for n in range(4)
        for kind, at in ((COMP, 0), (COMM, 1_000_000))
    ]
    calls = [{"num_bytes": 32 << 20}] * 4
    waiting = gpu_trace(rows, calls=calls, frameworks=frozenset({"DDP"}))
    found = advice(waiting)["waiting_buckets"]
    assert found.apply.startswith("TORCH_DIST_USE_NCCL2=0")
    assert found.predicted_gain_s == pytest.approx(3e-3)
    for frameworks in ({"DDP", "ProcessGroupNCCL"}, {"FSDP"}):  # the engine before annotates its collectives
        assert "waiting_buckets" not in advice(gpu_trace(rows, calls=calls, frameworks=frozenset(frameworks)))
    hidden = [*rows, (COMP, 1_000_000, 2_000_000)]
    assert "waiting_buckets" not in advice(gpu_trace(hidden, calls=calls, frameworks=frozenset({"DDP"})))


def test_a_reduce_scatter_queued_behind_an_all_gather_asks_for_its_own_communicator():
    rows = [(COMM, 0, 500_000), (COMM, 501_000, 900_000), (COMP, 900_000, 1_000_000)]
    queued = gpu_trace(rows, calls=[AG, RS], launches=[0, 100_000, 890_000], frameworks=frozenset({"FSDP"}))
    found = advice(queued)["shared_communicator"]
    assert found.predicted_gain_s == pytest.approx(399e-6)
    assert "set_separate_reduce_scatter_group" in found.apply
    late = gpu_trace(rows, calls=[AG, RS], launches=[0, 500_500, 890_000], frameworks=frozenset({"FSDP"}))
    assert "shared_communicator" not in advice(late)


def test_all_gathers_queued_behind_reduce_scatters_of_their_communicator_name_it():
    """Each waits 400 us for a reduce-scatter and then runs exposed for 300 us: these could be won."""
    rows, calls, launches = [], [], []
    for n in range(4):
        at = 2_000_000 * n
        rows += [(COMM, at, at + 500_000), (COMM, at + 505_000, at + 805_000), (COMP, at + 805_000, at + 1_900_000)]
        calls += [RS, AG]
        launches += [at - 5_000, at + 105_000, at + 10_000]
    found = advice(gpu_trace(rows, calls=calls, launches=launches))["shared_communicator"]
    assert found.predicted_gain_s == pytest.approx(4 * 300e-6)
    assert "4 calls of all_gather on fsdp started at once when the reduce_scatter before them ended" in found.evidence
    assert "new_group" in found.apply
    assert "fsdp" in found.what


def test_collectives_of_any_two_kinds_that_share_a_communicator_are_named():
    """An all-gather of parameters behind the gradients' all-reduce; launched before that ended, exposed for 300 us."""
    rows = [(COMM, 0, 500_000), (COMM, 505_000, 805_000), (COMP, 805_000, 1_900_000)]
    calls = [{"kind": CollectiveKind.ALL_REDUCE, "communicator": "fsdp"}, AG]
    found = advice(gpu_trace(rows, calls=calls, launches=[0, 100_000, 120_000], frameworks=frozenset({"FSDP"})))
    assert found["shared_communicator"].predicted_gain_s == pytest.approx(300e-6)
    assert found["shared_communicator"].what.startswith("Give all-reduce a communicator of its own")
    assert "new_group" in found["shared_communicator"].apply
    alike = gpu_trace(rows, calls=[AG, AG], launches=[0, 100_000, 120_000])
    assert "shared_communicator" not in advice(alike)


def test_a_kernel_between_two_collectives_is_why_the_second_waits():
    """Tensor parallelism: a norm of what was scattered, and the gather of what it gives; the host is ahead."""
    rows = [(COMM, 0, 500_000), (COMP, 502_000, 510_000), (COMM, 512_000, 812_000), (COMP, 812_000, 900_000)]
    assert "shared_communicator" not in advice(gpu_trace(rows, calls=[RS, AG], launches=[0, 50_000, 60_000, 70_000]))
    rows[1] = (COMP, 490_000, 510_000)  # it began without the first
    assert "shared_communicator" in advice(gpu_trace(rows, calls=[RS, AG], launches=[0, 50_000, 60_000, 70_000]))


def test_without_advice_it_says_what_was_looked_for():
    hidden = analyse([gpu_trace([(COMP, 0, 1_000_000), (COMM, 100_000, 900_000)])])
    assert advice_of(hidden) == ()
    assert "0.0 % of the step is exposed communication" in looked_for(hidden)
    alone = looked_for(analyse([gpu_trace([(COMP, 0, 1_000_000)])]))
    assert alone.startswith("No collective runs")
    exposed = looked_for(analyse([gpu_trace([(COMP, 0, 1_000_000), (COMM, 1_000_000, 2_000_000)])]))
    assert "50.0 % of the step" in exposed
    assert "all_reduce of 1 MiB on dp" in exposed


def test_advice_that_the_model_predicts_to_lose_is_named_where_nothing_is_left():
    asked = AskedChange.channels(4)
    one = Advice(rule="fewer_channels", what="", apply="", evidence="", predicted_gain_s=1e-3, change=asked.change)
    step, longer = (Spent(step_s=step_s, overlapped_s=0.0, exposed_s=0.0) for step_s in (1.0, 1.1))
    assert without_losses([one], [what_if(asked, longer, step)]) == (one,)
    assert without_losses([one], [what_if(asked, step, longer)]) == ()
    findings = analyse([gpu_trace([(COMP, 0, 1_000_000), (COMM, 100_000, 900_000)])])
    assert "nothing that is predicted to pay (not at most 4 channels)" in looked_for(findings, [one])


def test_all_gathers_that_start_as_soon_as_they_are_launched_are_launched_too_late():
    rows = [(COMM, n * 200_000, n * 200_000 + 50_000) for n in range(5)]
    rows += [(COMP, n * 200_000 + 50_000, n * 200_000 + 190_000) for n in range(5)]
    launches = [max(0, n * 200_000 - 4_000) for n in range(5)] + [0] * 5
    trace = gpu_trace(rows, calls=[AG] * 5, launches=launches, frameworks=frozenset({"FSDP"}))
    assert advice(trace)["prefetch"].predicted_gain_s == pytest.approx(250e-6)


def test_a_persistent_gemm_gets_a_carve_out_and_others_do_not():
    fields = {"num_sms": 132, "gpu_name": "NVIDIA H100"}
    assert "carve_out" not in advice(stretched(**fields))
    persistent = stretched(grids=[(132, 1, 1), (132, 1, 1), (16, 1, 1)] * 20, **fields)
    found = advice(persistent)["carve_out"]
    # 20 x (50 us - 100 us * 16 / 116)
    assert found.predicted_gain_s == pytest.approx(20 * (50e-6 - 100e-6 * 16 / 116))
    assert "_set_sm_carveout_experimental(16)" in found.apply
    blackwell = stretched(grids=[(148, 1, 1), (148, 1, 1), (16, 1, 1)] * 20, num_sms=148, gpu_name="NVIDIA B200")
    assert "GreenContext" in advice(blackwell)["carve_out"].apply


def test_copy_engines_are_named_only_where_this_nccl_has_them():
    fsdp = frozenset({"FSDP"})
    assert "copy_engine_all_gather" not in advice(stretched(frameworks=fsdp, nccl_version="2.27.5"))
    assert "copy_engine_all_gather" in advice(stretched(frameworks=fsdp, nccl_version="2.28.9"))


def test_a_gpu_that_waits_for_the_cpu_is_told_so_first():
    rows = [(COMP, n * 100_000, n * 100_000 + 20_000) for n in range(10)]
    trace = gpu_trace(rows, launches=[max(0, n * 100_000 - 5_000) for n in range(10)])
    found = advice(trace)["host_bound"]
    assert found.predicted_gain_s == pytest.approx(9 * 75e-6)
    assert "CUDA graphs" in found.what
    assert " 0 % of it in gaps of more than 1.00 ms" in found.evidence


def test_a_few_long_waits_for_the_cpu_are_no_matter_of_launching():
    # Nine gaps of 75 us and one of 2 ms: 75 % of the waiting is one stall, which CUDA graphs do not shorten.
    rows = [(COMP, n * 100_000, n * 100_000 + 20_000) for n in range(10)] + [(COMP, 2_925_000, 2_945_000)]
    trace = gpu_trace(rows, launches=[max(0, start - 5_000) for _, start, _ in rows])
    found = advice(trace)["host_bound"]
    assert "stalls" in found.what
    assert "set_sync_debug_mode" in found.apply
    assert "75 % of it in gaps of more than 1.00 ms" in found.evidence


def test_waiting_for_a_late_rank_names_the_rank():
    early = gpu_trace([(COMM, 0, 1_000_000), (COMP, 1_000_000, 1_100_000)], rank=0)
    late = gpu_trace([(COMM, 900_000, 1_000_000), (COMP, 1_000_000, 1_100_000)], rank=5)
    found = advice(early, late)["late_peers"]
    assert "rank 5" in found.what
    assert found.predicted_gain_s == pytest.approx(0.45e-3)


def test_pipeline_bubbles_are_named_only_on_a_pipeline_s_communicator():
    call = {"kind": CollectiveKind.SEND_RECV, "op": "send_recv", "reach": KnobReach.P2P_CHANNELS}
    rows = [(COMM, 0, 500_000), (COMP, 500_000, 1_000_000)]
    assert "pipeline_bubbles" not in advice(gpu_trace(rows, calls=[call]))
    found = advice(gpu_trace(rows, calls=[call | {"communicator": "mesh_pp"}]))["pipeline_bubbles"]
    assert found.predicted_gain_s == pytest.approx(0.25e-3)


@pytest.mark.parametrize(("text", "version"), [("2.27.5", (2, 27)), ("", None), ("unknown", None), ("2", None)])
def test_versions_of_nccl_are_read_or_not_at_all(text, version):
    assert nccl_version(text) == version
