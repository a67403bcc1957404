"""`lagom tune --from-trace` on a trace that a known model made: what is predicted is compared with that model."""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from kineto_traces import KinetoFile

from lagom_overlap.analysis import trace_fit
from lagom_overlap.analysis.concurrency_model import modelled_kernel
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.kernel_class import kernel_class
from lagom_overlap.analysis.trace_gpu import nearest_cluster
from lagom_overlap.backends.traced import only
from lagom_overlap.cli import main
from lagom_overlap.collective import CallCycle, Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError, TraceError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.spec import JobSpec, JobTable, TuneTable
from lagom_overlap.nccl_plugin.table_reader import read_table
from lagom_overlap.report.tune.verdict_words import next_commands
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.tuners.tied import Tied
from lagom_overlap.units import MIB
from lagom_overlap.verbs.export import ExportRequest, Format, read_deployment, run_export
from lagom_overlap.verbs.from_trace import FromTraceRequest, predicted_job
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.workload import CommOp, CompOp, OverlapGroup

US = 1e-6
NUM_KERNELS = 12
GEMM = KernelKey("gemm_bf16_128x256", (132 * 5, 1, 1), (384, 1, 1))
CHANNELS = 32


def truth(link_share=0.4):
    """An H100 node whose wire is slower than the preset's."""
    cluster = load_preset("h100_dgx")
    intra = replace(cluster.intra, bytes_per_s=link_share * cluster.intra.bytes_per_s, measured=False)
    return ContentionModel(replace(cluster, intra=intra), load_profile("plausible"))


def true_group(model, kernel_us=250.0, mib=256):
    work = modelled_kernel(GEMM, kernel_us * 1000, model.cluster.gpu, model.profile)
    gather = Collective(CollectiveKind.ALL_GATHER, mib * MIB, 8)
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"k{i}", work=work) for i in range(NUM_KERNELS)),
        comms=(CommOp(name="gather", collective=gather),),
    )


def default_config(model, group):
    return replace(model.default_config(group.comms[0].collective), num_channels=CHANNELS, num_threads=None)


def written(path, model, group, *, world=8, num_steps=4, **top):
    """What a profiler would have seen: the group under the default, then the same kernels alone, step by step."""
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": world}, **top)
    spans = GroupSimulator(group, model).timeline((default_config(model, group),)).spans
    alone_us = model.kernel_seconds(group.computations[0].work) / US
    for step in range(num_steps):
        at = 20_000.0 * step
        file.step(step, at, 20_000.0)
        for span in spans:
            start, length = at + 100 + span.start_s / US, (span.end_s - span.start_s) / US
            if span.kind == "comp":
                file.kernel(GEMM.name, start, length, launch=at + 50, grid=list(GEMM.grid), block=list(GEMM.block))
            else:
                file.nccl(
                    "AllGather_RING_SIMPLE", start, length, op="_allgather_base", launch=at + 50,
                    nelems=group.comms[0].collective.num_bytes // 2, grid=[CHANNELS, 1, 1],
                )  # fmt: skip
        end = at + 100 + max(span.end_s for span in spans) / US
        for number in range(2):
            start = end + 2 + number * (alone_us + 1)
            file.kernel(GEMM.name, start, alone_us, launch=at + 50, grid=list(GEMM.grid), block=list(GEMM.block))
    return file.write(path)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    model = truth()
    return written(tmp_path_factory.mktemp("trace") / "rank0.json.gz", model, true_group(model))


def test_the_group_comes_back_with_its_kernels_alone(traced):
    job = predicted_job(FromTraceRequest(traces=(traced,)))
    (group,) = [held for held in job.groups if held.comms[0].collective.num_bytes == 256 * MIB]
    model = truth()
    kernels = [op for op in group.computations if op.name.startswith("kernel")]
    assert len(kernels) >= NUM_KERNELS
    alone = sum(model.kernel_seconds(op.work) for op in kernels[:NUM_KERNELS])
    assert alone == pytest.approx(NUM_KERNELS * 250e-6, rel=0.01)


def test_the_wire_is_fitted_and_what_one_trace_cannot_tell_is_named(traced):
    record = predicted_job(FromTraceRequest(traces=(traced,))).trace_record
    fitted = {held.name: held for held in record.fit}
    assert fitted["intra.bytes_per_s"].value == pytest.approx(truth().cluster.intra.bytes_per_s, rel=0.15)
    assert record.fit_mean_abs_error < 0.05
    assert not fitted["latency_scale"].identified
    assert not fitted["channel_bytes_per_s"].identified


def test_what_is_recommended_can_be_set_and_the_notes_say_under_which_nccl(traced):
    job = predicted_job(FromTraceRequest(traces=(traced,)))
    for group in job.groups:
        for space in job.backend.problem(group).spaces:
            assert all(config.num_channels <= CHANNELS for part in space.subspaces for config in part)
    (note,) = [note for note in job.caveats if "under NCCL" in note]
    assert "2.28.9, which is assumed" in note


def test_the_predicted_gain_is_that_of_the_model_that_made_the_trace(traced, tmp_path):
    request = FromTraceRequest(traces=(traced,))
    found = run_tune(TuneRequest(job=predicted_job(request), out=tmp_path / "run"))
    assert found.backend == "predicted_from_trace"
    assert "nothing was run" in found.notes[0]
    assert found.default is not None and found.best is not None  # noqa: PT018
    model = truth()
    group, simulator = true_group(model), GroupSimulator(true_group(model), model)
    before = simulator.evaluate((default_config(model, group),)).makespan_s
    ((config,),) = [list(held.values()) for held in found.configs.values()]
    tuned = CommConfig(
        algorithm=config.algorithm, protocol=config.protocol, num_channels=config.num_channels,
        chunk_bytes=config.chunk_bytes,
    )  # fmt: skip
    after = simulator.evaluate((tuned,)).makespan_s
    assert config.num_channels < CHANNELS  # 32 of 132 SMs are too many for that wire
    assert before / after > 1.04
    # The two kernels that run alone after the group have no join before them and stay in it: their time is in both.
    tail = 2 * model.kernel_seconds(group.computations[0].work)
    assert found.default.makespan_s in (pytest.approx(before, rel=0.05), pytest.approx(before + tail, rel=0.05))
    extra = found.default.makespan_s - before if found.default.makespan_s > before * 1.05 else 0.0
    assert found.best.makespan_s == pytest.approx(after + extra, rel=0.05)


def test_the_run_folder_keeps_the_fit(traced, tmp_path, capsys):
    assert main(["tune", "--from-trace", str(traced), "--out", str(tmp_path / "run"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert kept["result"] == printed
    assert kept["from_trace"]["traces"] == ["rank0.json.gz"]
    assert {held["name"] for held in kept["from_trace"]["fit"]} >= {"intra.bytes_per_s", "slowdown.gemm"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "run.json", "configs.toml", "report.html", "timeline.json", "measurements.jsonl",
    }  # fmt: skip


def test_a_job_file_s_own_tables_count(traced):
    spec = JobSpec(job=JobTable(name="mine"), tune=TuneTable(tuner="exhaustive", seed=7))
    request = FromTraceRequest(traces=(traced,), spec=spec)
    found = predicted_job(request).spec
    assert found.tune.tuner == "exhaustive"
    assert found.job.name == "mine"


def test_a_collective_out_of_reach_is_not_tuned(tmp_path):
    model = truth()
    file = written(tmp_path / "t.json", model, true_group(model))
    text = file.read_text().replace("ncclDevKernel_AllGather", "ncclSymkDevKernel_AllGather")
    file.write_text(text)
    job = predicted_job(FromTraceRequest(traces=(file,)))
    problem = job.backend.problem(job.groups[0])
    assert [len(space) for space in problem.spaces] == [1]


def test_an_unknown_gpu_takes_the_nearest_preset_and_says_so(tmp_path):
    model = truth()
    properties = [{"id": 0, "name": "Tesla H800-like", "numSms": 120}]
    path = written(tmp_path / "t.json", model, true_group(model), deviceProperties=properties)
    job = predicted_job(FromTraceRequest(traces=(path,)))
    (note,) = [note for note in job.caveats if note.startswith("No preset")]
    # Of an A100's 108 SMs 120 are 1.11 times as many, of the 132 of an H100 1.10 times fewer.
    assert "(Tesla H800-like): the nearest by its SMs, h100" in note
    assert "stands in with 120 SMs" in note


@pytest.mark.parametrize("properties", [[], [{"id": 0, "name": "Toy GPU", "numSms": 24}]])
def test_a_gpu_that_is_like_none_asks_for_a_cluster_or_two_numbers(tmp_path, properties):
    model = truth()
    path = written(tmp_path / "t.json", model, true_group(model), deviceProperties=properties)
    with pytest.raises(JobError, match=r"\[cluster\] preset = .*num_sms and hbm_bytes_per_s"):
        predicted_job(FromTraceRequest(traces=(path,)))


def test_the_nearest_of_a_maker_has_nodes_that_hold_the_ranks():
    def nearest(name, num_sms, num_ranks=8):
        trace = SimpleNamespace(gpu_name=name, num_sms=num_sms)
        found = nearest_cluster(trace, num_ranks)
        return found and (found.name, found.gpu.num_sms)

    assert nearest("Tesla V100-SXM2-16GB", 80) == ("a40_bridged", 80)  # 84 SMs; an A10G has 80, one to a node
    assert nearest("AMD Instinct MI250X", 220)[0].startswith("mi3")
    assert nearest("", 80) is None


def test_a_trace_without_overlap_has_nothing_to_tune(tmp_path):
    file = KinetoFile()
    file.kernel("gemm", 10, 20)
    with pytest.raises(TraceError, match="nothing to tune"):
        predicted_job(FromTraceRequest(traces=(file.write(tmp_path / "t.json"),)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["tune"], "--from-trace"), (["tune", "--from-trace", "x", "--backend", "gloo"], "--backend")],
)
def test_impossible_combinations_are_refused(arguments, named, capsys):
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


def test_a_step_that_the_model_does_not_reproduce_is_not_predicted(tmp_path, capsys):
    # Every second step takes twice as long, as beside another job: the fit sees one kind, the check the other.
    model = truth()
    path = written(tmp_path / "t.json", model, true_group(model), num_steps=6)
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        if event.get("ph") == "X" and not event["name"].startswith("ProfilerStep"):
            step, within = divmod(event["ts"], 20_000.0)
            if step % 2:
                event["ts"], event["dur"] = 20_000.0 * step + 2 * within, 2 * event["dur"]
    path.write_text(json.dumps(content))
    assert main(["tune", "--from-trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lagom tune: this trace cannot be modelled, because on ")
    assert "all_gather 256 MiB" in error
    assert error.endswith("measure instead: lagom run --online -- COMMAND\n")


def test_the_gain_has_the_model_s_own_error_as_its_interval(traced, tmp_path):
    found = run_tune(TuneRequest(job=predicted_job(FromTraceRequest(traces=(traced,))), out=tmp_path / "run"))
    gain = found.predicted
    low, high = gain.limits
    assert gain.is_beyond_error
    assert 0 < low < high
    assert (low + high) / 2 == pytest.approx(gain.saving_s / gain.step_s)
    assert gain.num_held_out >= 2
    assert gain.step_s == pytest.approx(0.016, rel=0.01), "four steps of 20 ms, of which the last ends with its kernels"
    assert f"{100 * low:.1f} % to {100 * high:.1f} %" in found.summary()


COPY = KernelKey("vectorized_elementwise_kernel", (132 * 8, 1, 1), (512, 1, 1))
SLOWED = {"gemm": 4.0, "elementwise": 0.4}
SLOWER_SCATTER = 1.5
"""Of the world in which `two_classes` ran: what the model says of contention is wrong by these factors."""


def two_classes(path, *, num_steps=4, late=1.0):
    """Steps with a gather over products and a scatter over element-wise kernels, each of which also runs alone.

    From the middle of the trace on they take `late` times as long.
    """
    model = replace(truth(), collective_scales=((CollectiveKind.REDUCE_SCATTER, SLOWER_SCATTER),))
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": 8})
    end = 0.0
    for step in range(num_steps):
        factor = late if step >= num_steps // 2 else 1.0
        begin = end
        launch, at = begin + 50, begin + 100
        for key, kind in ((GEMM, CollectiveKind.ALL_GATHER), (COPY, CollectiveKind.REDUCE_SCATTER)):
            name = kernel_class(key.name).value
            work = modelled_kernel(key, 250_000, model.cluster.gpu, model.profile)
            work = replace(work, slowdown_scale=SLOWED[name])
            group = OverlapGroup(
                name=name,
                computations=tuple(CompOp(name=f"k{i}", work=work) for i in range(NUM_KERNELS)),
                comms=(CommOp(name=kind.value, collective=Collective(kind, 256 * MIB, 8)),),
            )
            spans = GroupSimulator(group, model).timeline((default_config(model, group),)).spans
            for span in spans:
                start, length = at + factor * span.start_s / US, factor * (span.end_s - span.start_s) / US
                if span.kind == "comp":
                    file.kernel(key.name, start, length, launch=launch, grid=list(key.grid), block=list(key.block))
                else:
                    nccl, op = NCCL_NAMES[kind]
                    file.nccl(nccl, start, length, op=op, launch=launch, nelems=128 * MIB, grid=[CHANNELS, 1, 1])
            at += factor * max(span.end_s for span in spans) / US + 5
            for _ in range(2):
                file.kernel(key.name, at, 250, launch=launch, grid=list(key.grid), block=list(key.block))
                at += 251
            # Nothing hides this one, and the next group waits for it.
            file.nccl("AllReduce_Sum_f32_RING_LL", at, 30, op="allreduce", launch=launch, nelems=1024, grid=[1, 1, 1])
            at += 35
        end = at
        file.step(step, begin, end - begin)
    return file.write(path)


NCCL_NAMES = {
    CollectiveKind.ALL_GATHER: ("AllGather_RING_SIMPLE", "_allgather_base"),
    CollectiveKind.REDUCE_SCATTER: ("ReduceScatter_Sum_bf16_RING_SIMPLE", "_reduce_scatter_base"),
}


def test_what_contention_costs_each_class_and_each_kind_is_found_in_the_trace(tmp_path, monkeypatch):
    path = two_classes(tmp_path / "t.json")
    job = predicted_job(FromTraceRequest(traces=(path,)))
    fitted = {held.name: held.value for held in job.trace_record.fit}
    assert {name: fitted[f"slowdown.{name}"] for name in SLOWED} == pytest.approx(SLOWED, rel=0.1)
    relative = fitted.get("time.reduce_scatter") or 1 / fitted["time.all_gather"]
    assert relative == pytest.approx(SLOWER_SCATTER, rel=0.05)
    assert job.fit_errors.share < 0.005
    assert job.fit_errors.num_seen == 0
    # A model that knows no such factors is wrong about this world, and is found to be.
    monkeypatch.setattr(trace_fit, "_scales", lambda traced: [])
    with pytest.raises(TraceError, match="this trace cannot be modelled"):
        predicted_job(FromTraceRequest(traces=(path,)))


def test_a_trace_whose_later_steps_run_otherwise_is_refused_or_says_so_in_its_interval(tmp_path):
    # Every second step is in each half, so the halves agree with each other; the earlier and later steps do not.
    with pytest.raises(TraceError, match="as its later steps differ from its earlier ones"):
        predicted_job(FromTraceRequest(traces=(two_classes(tmp_path / "t.json", num_steps=8, late=1.3),)))
    errors = predicted_job(
        FromTraceRequest(traces=(two_classes(tmp_path / "u.json", num_steps=8, late=1.04),))
    ).fit_errors
    for name, error_s in errors.error_s.items():
        assert error_s >= 0.03 * 3e-3, name  # twelve kernels of 250 us and more are 3 ms and more


def test_of_a_trace_in_which_nothing_comes_twice_no_interval_is_claimed(tmp_path):
    path = written(tmp_path / "t.json", truth(), true_group(truth()), num_steps=1)
    found = run_tune(TuneRequest(job=predicted_job(FromTraceRequest(traces=(path,))), out=tmp_path / "run"))
    assert found.predicted.limits is None
    assert "without an interval" in found.summary()
    assert any("no group ran twice" in note for note in found.notes)


def test_a_gain_below_the_model_s_error_recommends_nothing(traced, tmp_path):
    job = predicted_job(FromTraceRequest(traces=(traced,)))
    errors = replace(job.fit_errors, error_s=dict.fromkeys(job.fit_errors.error_s, 0.01))
    found = run_tune(TuneRequest(job=replace(job, fit_errors=errors), out=tmp_path / "run"))
    assert not found.predicted.is_beyond_error
    assert "nothing is recommended" in found.summary()
    assert "adopted = false" in (tmp_path / "run" / "configs.toml").read_text()
    exported = run_export(ExportRequest(run=tmp_path / "run", formats=(Format.PLUGIN,)))
    assert exported.num_rows == 0
    assert "nothing is set" in exported.summary()


def test_what_a_trace_predicted_is_exported_by_ranks_kind_and_bytes(traced, tmp_path):
    run_tune(TuneRequest(job=predicted_job(FromTraceRequest(traces=(traced,))), out=tmp_path / "run"))
    exported = run_export(ExportRequest(run=tmp_path / "run", formats=(Format.PLUGIN,)))
    assert exported.num_rows == 1
    [row] = read_table(tmp_path / "run" / "lagom_table.bin").decisions
    assert row.first_bytes <= 256 * MIB <= row.last_bytes
    assert "its channels are NCCL's under NCCL 2.29 and 2.30" in exported.summary()


def test_what_a_trace_of_emulated_gpus_predicted_is_tried_on_emulated_gpus(tmp_path):
    device = {"id": 0, "name": "NVIDIA H100-SXM5-80GB (emulated)", "numSms": 132}
    trace = written(tmp_path / "rank0.json.gz", truth(), true_group(truth()), deviceProperties=[device])
    found = run_tune(TuneRequest(job=predicted_job(FromTraceRequest(traces=(trace,))), out=tmp_path / "run"))
    assert "The trace is of emulated GPUs" in " ".join(found.notes)
    assert next_commands(found, "run")[0].startswith("lagom emulate ... -- lagom run --prove run -- COMMAND")
    exported = run_export(ExportRequest(run=tmp_path / "run", formats=(Format.PLUGIN, Format.ENV)))
    assert exported.files[0].use.startswith("lagom emulate ... -- lagom run --config ")
    assert exported.files[1].use.startswith("env ")


def two_of_a_size(path, model, *, alone=True, other="fsdp", num_steps=4):
    """Steps with two gathers of 256 MiB, over twelve kernels of 250 us and over twelve of 30 us, in this order.

    `alone`: a reduce-scatter of 64 MiB that nothing hides comes between steps; `other`: the second one's communicator.
    """
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": 8})
    groups = [true_group(model, kernel_us=250.0), true_group(model, kernel_us=30.0)]
    for step in range(num_steps):
        at = 40_000.0 * step
        file.step(step, at, 40_000.0)
        launch, at = at + 50, at + 100
        for number, group in enumerate(groups):
            name = f"{GEMM.name}_{number}"
            spans = GroupSimulator(group, model).timeline((default_config(model, group),)).spans
            for span in spans:
                start, length = at + span.start_s / US, (span.end_s - span.start_s) / US
                if span.kind == "comp":
                    file.kernel(name, start, length, launch=launch, grid=list(GEMM.grid), block=list(GEMM.block))
                else:
                    file.nccl(
                        "AllGather_RING_SIMPLE", start, length, op="_allgather_base", launch=launch, nelems=128 * MIB,
                        grid=[CHANNELS, 1, 1], **{"Process Group Description": other if number else "fsdp",
                                                  "Process Group Name": "2" if number and other != "fsdp" else "1"},
                    )  # fmt: skip
            at += max(span.end_s for span in spans) / US + 5
            alone_us = model.kernel_seconds(group.computations[0].work) / US
            for _ in range(3):
                file.kernel(name, at, alone_us, launch=launch, grid=list(GEMM.grid), block=list(GEMM.block))
                at += alone_us + 1
            at += 50  # the next group's kernels follow no collective
        if alone:
            file.nccl(
                "ReduceScatter_RING_SIMPLE", at, 400, op="_reduce_scatter_base", launch=launch, nelems=32 * MIB,
                grid=[CHANNELS, 1, 1],
            )  # fmt: skip
    return file.write(path)


def predicted_run(path, folder):
    job = predicted_job(FromTraceRequest(traces=(path,)))
    return job, run_tune(TuneRequest(job=job, out=folder))


def set_by_hand(folder, *channels):
    """Another answer of the search: the collectives of the run, in order, with these channels."""
    configs = tomllib.loads((folder / "configs.toml").read_text())
    names = [(group, comm) for group, comms in configs["groups"].items() for comm in comms]
    for (group, comm), count in zip(names, channels, strict=True):
        configs["groups"][group][comm] = {"num_channels": count}
    (folder / "configs.toml").write_text(tomli_w.dumps(configs | {"adopted": True}))


def played(deployment, calls):
    """The channels that the plug-in's rule gives calls of a running job, in their order; 0 untouched."""
    (communicator,) = {held.id for held in deployment.communicators}
    cycle = CallCycle(deployment.table.cycles[communicator])
    configs = [deployment.table.get(key) if (key := cycle.next_key(*call)) else None for call in calls]
    return [config.num_channels if config else 0 for config in configs]


def test_calls_of_one_size_are_set_by_their_place_in_the_step(tmp_path):
    job, _ = predicted_run(two_of_a_size(tmp_path / "t.json", truth()), tmp_path / "run")
    assert sorted(site.places for site in job.trace_record.sites) == [(0,), (0,), (1,)]
    assert job.ties == ()
    set_by_hand(tmp_path / "run", 4, 8, 2)
    source = read_deployment(tmp_path / "run")
    gather, scatter = (CollectiveKind.ALL_GATHER, 256 * MIB), (CollectiveKind.REDUCE_SCATTER, 64 * MIB)
    step = [gather, gather, scatter]
    # Two steps, an evaluation that only gathers once, and two more: the reduce-scatter puts the places right again.
    assert played(source.deployment, [*step, *step, gather, *step, *step]) == [
        *[4, 8, 2] * 2,
        4,
        *[8, 4, 2],
        *[4, 8, 2],
    ]
    assert [note for note in source.notes if "MiB" not in note] == [
        "all_gather of 268435456 bytes on 'fsdp' (8 ranks): call 1 of 2 in a step",
        "all_gather of 268435456 bytes on 'fsdp' (8 ranks): call 2 of 2 in a step",
        "reduce_scatter of 67108864 bytes on 'fsdp' (8 ranks): its call of a step",
    ]


@pytest.mark.parametrize(
    ("trace", "why", "num_rows"),
    [
        ({"alone": False}, "their places in the step cannot be told from the trace", 1),  # no call comes only once
        ({"other": "ep"}, "the trace has 2 communicators of 8 ranks and not their order of creation", 2),
    ],
)
def test_calls_that_cannot_be_told_apart_share_one_setting_and_the_output_says_so(tmp_path, trace, why, num_rows):
    job, found = predicted_run(two_of_a_size(tmp_path / "t.json", truth(), **trace), tmp_path / "run")
    ((first, second),) = job.ties
    settings = {found.search.recommended[group][at] for group, at in (first, second)}
    assert len(settings) == 1
    assert any(f"2 collectives of the groups share one setting, as {why}." in note for note in found.notes)
    source = read_deployment(tmp_path / "run")
    assert len(source.deployment.table) == num_rows
    assert len({config for _, config in source.deployment.table}) == 1
    assert any("all calls of a step share one setting" in note for note in source.notes)


def test_what_a_shared_setting_costs_is_in_the_prediction(tmp_path):
    # Two fakes of one group each, tied: 2 channels suit one (10 s less), 8 the other (1 s less); 8 harms the first.
    seconds = {("a", 2): 10.0, ("a", 8): 30.0, ("a", 16): 20.0, ("b", 2): 21.0, ("b", 8): 19.0, ("b", 16): 20.0}
    problems = tuple(
        GroupProblem(
            group=replace(true_group(truth()), name=name), spaces=(only(CommConfig(num_channels=16)),),
            default=(CommConfig(num_channels=16),),
        )
        for name in "ab"
    )  # fmt: skip
    inner = SimpleNamespace(recommend=lambda: {"a": (CommConfig(num_channels=2),), "b": (CommConfig(num_channels=8),)})
    tied = Tied(
        inner, problems, [(("a", 0), ("b", 0))], lambda problem, each: seconds[problem.group.name, each[0].num_channels]
    )
    # 2 channels for both: 31 s; 8: 49 s; the default: 40 s.
    assert set(tied.recommend().values()) == {(CommConfig(num_channels=2),)}


def test_a_file_that_cannot_be_read_does_not_take_the_folder_down(tmp_path):
    model = truth()
    written(tmp_path / "rank0.json", model, true_group(model))
    (tmp_path / "rank1.json").write_text("")
    job = predicted_job(FromTraceRequest(traces=(tmp_path,)))
    assert "rank1.json: is empty; a trace is expected; this file is left out" in job.caveats
