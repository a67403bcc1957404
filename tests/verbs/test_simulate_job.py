"""`lagom simulate` from the job file to the run folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job, read_job
from lagom_overlap.results.simulate import SimulateResult
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.workload.parallel import PipelineSchedule, Recompute

EXAMPLES = Path(__file__).parents[2] / "examples"


def job(parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "job": {"name": "toy"},
        "model": {"name": "llama-2-7b", "seq_len": 2048},
        "cluster": {"preset": "a100_dgx"},
        "parallel": parallel,
    } | changes


def simulate(parallel: dict[str, Any], out: Path | None = None, **changes: Any) -> SimulateResult:
    return run_simulate(SimulateRequest(job=Job(parse_job(job(parallel, **changes), "job.toml")), out=out))


def test_every_key_of_parallel_reaches_the_layout() -> None:
    keys = {
        "data": 4, "tensor": 2, "pipeline": 2, "micro_batch": 2, "global_batch": 32, "schedule": "interleaved",
        "chunks": 2, "recompute": "selective", "sequence_parallel": True, "async_tensor": True, "zero_stage": 1,
        "overlap_gradients": False, "bucket_bytes": "40 MB", "prefetch": 3,
        "flash_attention": False, "scatter_gather": True, "expert": 2,
    }  # fmt: skip
    table = parse_job(job(keys), "job.toml").parallel
    assert table is not None
    layout = table.layout()
    for name, value in keys.items():
        expected = {"interleaved": PipelineSchedule.INTERLEAVED, "selective": Recompute.SELECTIVE, "40 MB": 40_000_000}
        assert getattr(layout, name) == expected.get(str(value), value), name


def test_fsdp_is_data_parallelism_with_everything_sharded() -> None:
    table = parse_job(job({"fsdp": 8, "prefetch": 2}), "job.toml").parallel
    assert table is not None
    layout = table.layout()
    assert (layout.data, layout.zero_stage, layout.prefetch, layout.global_batch) == (8, 3, 2, 8)


def test_hybrid_sharding_adds_gradients_between_groups_that_share_out_the_whole() -> None:
    named = parse_job(job({"fsdp": 4, "replicate": 2}), "job.toml").parallel
    same = parse_job(job({"data": 8, "zero_stage": 3, "replicate": 2, "framework": "fsdp2"}), "job.toml").parallel
    assert named is not None
    assert same is not None
    layout = named.layout()
    assert layout == same.layout()
    assert (layout.data, layout.shard, layout.num_gpus, layout.global_batch) == (8, 4, 8, 8)
    assert set(simulate({"fsdp": 4, "replicate": 2}).communicators) == {"fsdp", "dp"}
    with pytest.raises(JobError, match="replicate is 2, must be 1 with framework megatron"):
        simulate({"data": 8, "zero_stage": 1, "replicate": 2})


def test_the_printed_object_adds_up() -> None:
    result = simulate({"tensor": 4, "pipeline": 2, "data": 2, "global_batch": 32, "sequence_parallel": True})
    assert result.num_gpus == 16
    assert result.tokens_per_s == pytest.approx(32 * 2048 / result.iteration_s)
    assert result.mfu == pytest.approx(result.model_flops / result.iteration_s / 16 / 312e12)
    assert result.memory_bytes == max(stage.memory.total_bytes for stage in result.stages)
    assert set(result.communicators) == {"tp", "pp", "dp"}
    for comm in result.communicators.values():
        assert 0 <= comm.exposed_s <= comm.total_s
    assert result.files == ()


def test_a_run_folder_holds_record_report_and_timeline(tmp_path: Path) -> None:
    spec = parse_job(job({"pipeline": 4, "global_batch": 8}) | {"job": {"name": "<b>&"}}, "job.toml")
    folder = tmp_path / "run"
    result = run_simulate(SimulateRequest(job=Job(spec), out=folder))
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "run.json", "timeline.json"]
    record = json.loads((folder / "run.json").read_text())
    assert record["result"]["iteration_s"] == result.iteration_s
    page = (folder / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&<" not in page
    assert len(json.loads((folder / "timeline.json").read_text())["traceEvents"]) > 4 * 8 * 2


@pytest.mark.parametrize(
    ("parallel", "changes", "words"),
    [
        ({"tensor": 3}, {}, "parallel.tensor is 3, must divide the model's heads (32)"),
        ({"pipeline": 5}, {}, "must divide the model's layers (32)"),
        ({"tensor": 8}, {"cluster": {"preset": "a100_dgx", "nodes": 2}}, "8 x 1 x 1 = 8 GPUs, but cluster"),
        ({"tensor": 1}, {"model": {"name": "gpt-22b", "seq_len": 2048}}, "A100-SXM4-80GB has 85.0 GB (parameters 44."),
        ({"tensor": 8}, {"model": {"name": "gpt-22", "seq_len": 2048}}, "did you mean 'gpt-22b'"),
        ({"data": 8, "global_batch": 12}, {}, "parallel.global_batch is 12, must be a multiple of"),
        ({"data": 8, "framework": "megatrn"}, {}, "unknown framework 'megatrn'"),
        ({"fsdp": 8, "data": 8}, {}, "parallel.fsdp already says parallel.data"),
        (
            {"fsdp": 8, "zero_stage": 1},
            {},
            "parallel.zero_stage is 1: with parallel.fsdp",
        ),
        ({"data": 8, "schedule": "zigzag"}, {}, "allowed: gpipe, 1f1b, interleaved"),
        ({"data": 8}, {"job": {"name": "x", "backend": "gloo"}}, "job.backend is 'gloo'"),
        ({"data": 0}, {}, "parallel.data is 0"),
        ({"data": 8, "bucket_bytes": "4 zB"}, {}, "parallel.bucket_bytes"),
    ],
)
def test_bad_layouts_are_refused_with_one_line(parallel: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LagomError, match=re.escape(words)) as caught:
        simulate(parallel, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parallel", [{"data": 8, "zero_stage": 3}, {"pipeline": 8, "global_batch": 8}])
def test_a_cluster_on_which_nothing_ends_is_refused(tmp_path: Path, parallel: dict[str, Any]) -> None:
    gpu = {"num_sms": 84, "gemm_flops": 1e-300, "hbm_bytes_per_s": 6e11, "l2_bytes": 6_291_456, "memory_bytes": 8e10}
    wires = "".join(f"[{end}]\nkind = 'network'\nbytes_per_s = 1e-300\nhop_s = 1e-6\n" for end in ("intra", "inter"))
    numbers = "".join(f"{key} = {int(value) if 'bytes' in key else value}\n" for key, value in gpu.items())
    path = tmp_path / "mine.toml"
    path.write_text(f"name = 'mine'\ngpus_per_node = 8\nnum_nodes = 1\n[gpu]\nname = 'mine'\n{numbers}{wires}")
    with pytest.raises(LagomError, match=r"(inf|nan) s|wave_s is inf"):
        simulate({**parallel, "recompute": "full"}, cluster={"preset": str(path)})


def test_a_graph_between_nodes_that_nobody_knows_is_said_to_be_a_guess() -> None:
    model = {"name": "llama-3.2-1b", "seq_len": 1024}
    for preset, data, is_guess in (("mi300x", 16, True), ("mi300x", 8, False), ("h100_dgx", 16, False)):
        found = simulate({"data": data, "zero_stage": 1}, model=model, cluster={"preset": preset})
        assert any("one ring of few channels is assumed" in note for note in found.notes) is is_guess


def test_tensor_parallelism_that_does_not_divide_a_node_is_refused_by_its_key() -> None:
    model = {"name": "llama-3.2-1b", "seq_len": 1024}
    layout = {"tensor": 4, "data": 3, "zero_stage": 1, "global_batch": 3}
    with pytest.raises(
        JobError, match=r"parallel\.tensor is 4, must divide a node's 6 GPUs \(cluster\.gpus_per_node\)"
    ):
        simulate(layout, model=model, cluster={"preset": "gb200", "gpus_per_node": 6})
    assert simulate(layout, model=model, cluster={"preset": "gb200", "gpus_per_node": 12}).num_gpus == 12


def test_all_to_alls_of_a_rack_stay_on_its_nvlink() -> None:
    experts = {"data": 8, "expert": 8, "global_batch": 8, "micro_batch": 1}
    model = {"name": "olmoe-1b-7b", "seq_len": 1024}
    trays = simulate(experts, model=model, cluster={"preset": "gb200"})
    rack = simulate(experts, model=model, cluster={"preset": "gb200", "gpus_per_node": 8})
    assert rack.iteration_s < trays.iteration_s
    assert any("could join 72 (cluster.gpus_per_node)" in note for note in trays.notes)
    assert not any("gpus_per_node" in note for note in rack.notes)
    stated = simulate(experts, model=model, cluster={"preset": "gb200", "gpus_per_node": 4})
    assert stated.iteration_s == trays.iteration_s
    assert not any("gpus_per_node" in note for note in stated.notes)
    with pytest.raises(JobError, match=r"gpus_per_node is 73, must be 1 to 72$"):
        simulate(experts, model=model, cluster={"preset": "gb200", "gpus_per_node": 73})


def test_every_exposed_collective_waits_for_the_last_rank() -> None:
    """Tensor parallelism over 8 GPUs: 32 layers of 4 all-reduces, and those of the vocabulary, 1 ms of wait each."""
    together, apart = simulate({"tensor": 8}), simulate({"tensor": 8}, cost={"rank_skew_s": 1e-3})
    waited_s = apart.iteration_s - together.iteration_s
    assert waited_s == pytest.approx(apart.communicators["tp"].total_s - together.communicators["tp"].total_s)
    assert 32 * 4 <= round(waited_s / 1e-3, 6) <= 32 * 4 + 5
    assert waited_s / 1e-3 == pytest.approx(round(waited_s / 1e-3))


def test_a_job_of_groups_is_refused() -> None:
    with pytest.raises(JobError, match="the job has no \\[model\\]"):
        run_simulate(SimulateRequest(job=Job(read_job(EXAMPLES / "gpt_fsdp_gloo.toml"))))


def test_keys_that_simulate_does_not_read_are_named() -> None:
    notes = simulate({"fsdp": 8}, tune={"pairs": 5}, cost={"noise": 0.1}).notes
    assert any(note.startswith("[tune] is not read") for note in notes)
    assert any(note.startswith("cost.noise = 0.1 is not read") for note in notes)


def test_pytorchs_interleaved_stages_are_told_of_a_communicator_for_each_pair() -> None:
    parallel = {"fsdp": 2, "pipeline": 4, "recompute": "full", "micro_batch": 1, "global_batch": 8}
    parallel |= {"schedule": "interleaved", "chunks": 2}
    queued = simulate(parallel)
    asked = next(each for each in queued.what_ifs if each.change == "pipeline transfers behind computation")
    assert "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1" in asked.apply
    apart = simulate(parallel | {"overlap_p2p": True})
    assert asked.gain_s == pytest.approx(queued.iteration_s - apart.iteration_s)
    assert apart.iteration_s < 0.9 * queued.iteration_s


def test_tune_takes_any_layout_in_which_something_overlaps() -> None:
    both = Job(parse_job(job({"fsdp": 8, "tensor": 2}), "job.toml")).groups
    assert {comm.communicator for group in both for comm in group.comms} == {"fsdp"}  # products wait for the others
    staged = Job(parse_job(job({"pipeline": 2, "data": 4, "overlap_gradients": True}), "job.toml")).groups
    assert {comm.communicator for group in staged for comm in group.comms} == {"dp"}
    with pytest.raises(JobError, match="no communication of this job overlaps a computation"):
        _ = Job(parse_job(job({"micro_batch": 2}), "job.toml")).groups


def test_ddp_of_pytorch_2_15_hides_no_reduction_and_is_told_what_would() -> None:
    parallel = {"data": 8, "framework": "ddp"}
    changes = {"model": {"name": "llama-3.2-1b", "seq_len": 2048}, "cluster": {"preset": "h100_dgx"}}
    before, since = (simulate(parallel | keys, **changes) for keys in ({}, {"framework_release": "2.15"}))
    (hidden,), (shown,) = (result.stages[0].communicators.values() for result in (before, since))
    assert hidden.exposed_s < 0.05 * hidden.total_s
    assert shown.exposed_s == pytest.approx(shown.total_s, rel=1e-6)  # nothing else runs, so nothing is stretched
    assert any('framework_release = "2.15"' in note for note in before.notes)
    assert not any("framework_release" in note for note in since.notes)
    (answer,) = [answer for answer in since.what_ifs if answer.setting == "TORCH_DIST_USE_NCCL2=0"]
    assert answer.gain_s == pytest.approx(since.iteration_s - before.iteration_s)
    assert not any(answer.setting == "TORCH_DIST_USE_NCCL2=0" for answer in before.what_ifs)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (
            {"fsdp": 8},
            "allocates 23.2 GB and reserves up to 28.8 GB; 6 % and 8 % are the worst errors on 37 emulated jobs",
        ),
        ({"fsdp": 8, "framework": "torchtitan_compiled"}, "no job of this kind was compared with its allocator"),
        ({"tensor": 8}, "what framework megatron holds for itself is not in it"),
    ],
)
def test_simulate_says_what_its_memory_is_worth(parallel: dict[str, Any], words: str) -> None:
    notes = [note for note in simulate(parallel).notes if note.startswith("Memory")]
    assert len(notes) == 1
    assert words in notes[0]


def test_the_buckets_of_ddp_have_the_size_that_the_job_says() -> None:
    raw = {
        "job": {"name": "ddp"},
        "model": {"name": "llama-3.2-1b", "seq_len": 512},
        "cluster": {"preset": "h100_dgx"},
        "parallel": {"framework": "ddp", "data": 8},
    }
    plain, default, small = (
        Job(parse_job({**raw, "parallel": {**raw["parallel"], **keys}}, "job.toml")).step  # type: ignore[dict-item]
        for keys in ({}, {"bucket_bytes": "25 MiB"}, {"bucket_bytes": "4 MiB"})
    )
    assert plain is not None and default is not None and small is not None  # noqa: PT018 - a named model's
    assert plain.layout == default.layout
    assert len(small.issued.iteration.comms) > len(plain.issued.iteration.comms)
    assert small.times.iteration_s != plain.times.iteration_s


def test_a_framework_without_buckets_says_that_their_size_is_not_read() -> None:
    raw = {
        "job": {"name": "fsdp"},
        "model": {"name": "llama-3.2-1b", "seq_len": 512},
        "cluster": {"preset": "h100_dgx"},
        "parallel": {"fsdp": 8, "bucket_bytes": "4 MiB"},
    }
    notes = run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml")))).notes
    assert "parallel.bucket_bytes is not read: framework fsdp2 reduces by unit, in no buckets." in notes
