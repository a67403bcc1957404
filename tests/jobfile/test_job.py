"""Names become objects; equal workloads have equal fingerprints."""

import copy

import pytest

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.job import Job, job_fingerprint, limits_of, unused_keys
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.spec import SpaceTable
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import Attention, Gemm, MemoryBound

BLOCK = {
    "job": {"name": "toy"},
    "cluster": {"preset": "a40_nvlink"},
    "group": [
        {
            "name": "g",
            "block": {"seq_len": 16, "hidden": 8, "heads": 2, "ffn": 32, "batch": 3, "repeat": 2},
            "comm": [
                {"name": "ag", "kind": "all_gather", "bytes": "1 MiB", "starts_after": 1},
                {"name": "rs", "kind": "reduce_scatter", "bytes": 4096},
            ],
        }
    ],
}
MODEL = {
    "job": {"name": "m"},
    "model": {"name": "phi-2", "seq_len": 2048},
    "cluster": {"preset": "a40_nvlink"},
    "parallel": {"fsdp": 8, "micro_batch": 2},
}


def with_(raw: dict, table: str, **changes) -> dict:
    changed = copy.deepcopy(raw)
    changed.setdefault(table, {}).update(changes)
    return changed


def fingerprint(raw: dict) -> str:
    spec = parse_job(raw, "job.toml")
    return job_fingerprint(spec, Job(spec).groups)


def test_a_block_becomes_the_operators_of_a_transformer_layer():
    (group,) = Job(parse_job(BLOCK, "job.toml")).groups
    works = [op.work for op in group.computations]
    assert len(works) == 2 * 6
    tokens = 3 * 16
    assert works[0] == Gemm(tokens, 24, 8, 4)
    assert works[1] == Attention(batch=3, num_heads=2, seq_len=16, head_dim=4, element_bytes=4)
    assert works[4] == MemoryBound(2 * tokens * 32 * 4)
    # A layer's matrix products: qkv + out + up + down = 2 T (3h^2 + h^2 + 2 h f) operations.
    assert sum(w.flops for w in works[:6] if isinstance(w, Gemm)) == 2 * tokens * (4 * 64 + 2 * 8 * 32)


def test_collectives_keep_their_order_sizes_and_starts():
    (group,) = Job(parse_job(BLOCK, "job.toml")).groups
    assert [(c.name, c.collective.num_bytes, c.collective.num_ranks) for c in group.comms] == [
        ("ag", MIB, 2),
        ("rs", 4096, 2),
    ]
    assert group.starts_after == (1, 0)


def test_listed_operators_are_taken_as_they_are():
    raw = copy.deepcopy(BLOCK)
    del raw["group"][0]["block"]
    raw["group"][0]["op"] = [
        {"name": "mm", "gemm": [2, 3, 4]},
        {"name": "at", "attention": [1, 2, 3, 4]},
        {"name": "add", "memory": "1 KiB"},
    ]
    (group,) = Job(parse_job(raw, "job.toml")).groups
    assert [type(op.work) for op in group.computations] == [Gemm, Attention, MemoryBound]


def test_a_name_that_is_used_twice_is_refused():
    raw = copy.deepcopy(BLOCK)
    raw["group"].append(copy.deepcopy(raw["group"][0]))
    with pytest.raises(JobError, match="'g' is used twice"):
        _ = Job(parse_job(raw, "job.toml")).groups


def test_a_start_after_more_computations_than_there_are_is_refused():
    raw = copy.deepcopy(BLOCK)
    raw["group"][0]["comm"][0]["starts_after"] = 99
    with pytest.raises(JobError, match="99"):
        _ = Job(parse_job(raw, "job.toml")).groups


def test_gradient_accumulation_repeats_every_group():
    """The layers' groups twice; where micro-batches meet there are others."""
    once = Job(parse_job(MODEL, "job.toml")).groups
    twice = Job(parse_job(with_(MODEL, "parallel", global_batch=32), "job.toml")).groups
    most = sorted((group.count for group in once), reverse=True)[:2]
    assert [2 * count for count in most] == sorted((group.count for group in twice), reverse=True)[:2]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (with_(MODEL, "parallel", global_batch=24), "24, must be a multiple of micro_batch x data = 2 x 8 = 16"),
        (with_(with_(MODEL, "parallel", fsdp=64), "cluster", nodes=1), "64 GPUs, but cluster"),
        (with_(MODEL, "model", name="phi-3"), "did you mean 'phi-2'"),
    ],
)
def test_an_impossible_layout_is_refused(raw, words):
    with pytest.raises(LagomError, match=words):
        _ = Job(parse_job(raw, "job.toml")).groups


def test_the_fingerprint_is_of_the_workload_and_the_machine_only():
    same = with_(with_(BLOCK, "tune", tuner="autoccl", seed=9, pairs=3), "job", name="other", timeout_s=5)
    assert fingerprint(same) == fingerprint(BLOCK)
    for changed in (
        with_(BLOCK, "job", ranks=4),
        with_(BLOCK, "job", link="1 Gbit/s"),
        with_(BLOCK, "cluster", preset="a40_pcie"),
        with_(BLOCK, "cost", profile="paper_scale"),
    ):
        assert fingerprint(changed) != fingerprint(BLOCK)
    bigger = copy.deepcopy(BLOCK)
    bigger["group"][0]["comm"][1]["bytes"] = 8192
    assert fingerprint(bigger) != fingerprint(BLOCK)


def test_slices_become_chunks_on_the_wire():
    limits = limits_of(SpaceTable(slice_bytes=["684 KiB", "1366 KiB"], num_channels=[4, 2, 2]))
    assert limits.chunk_bytes == (1366 * KIB, 1368 * KIB)
    assert limits.num_channels == (2, 4)


def test_a_key_that_the_backend_has_no_use_for_is_named():
    def unused(raw: dict, backend: str) -> tuple[str, ...]:
        return unused_keys(parse_job(raw, "job.toml"), backend)

    assert unused(BLOCK, "simulated") == unused(BLOCK, "gloo") == ()
    linked = with_(BLOCK, "job", link="1 Gbit/s", ranks=4)
    assert unused(linked, "simulated") == ("job.link",)
    assert unused(linked, "gloo") == ()
    assert unused(with_(MODEL, "job", ranks=4), "simulated") == ("job.ranks",)
    assert unused(with_(BLOCK, "cost", noise=0.1), "gloo") == ("cost",)
    assert unused(with_(BLOCK, "cost", noise=0.1), "simulated") == ()
