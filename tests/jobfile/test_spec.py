"""The job file: every mistake gets one line that names the key, the value and what is allowed."""

import copy
from pathlib import Path

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import MAX_JOB_BYTES, parse_job, read_job
from lagom_overlap.jobfile.spec import link_bytes_per_s

GOOD = {
    "job": {"name": "toy"},
    "group": [
        {
            "name": "g",
            "block": {"seq_len": 16, "hidden": 8, "heads": 2, "ffn": 32},
            "comm": [{"name": "ag", "kind": "all_gather", "bytes": "1 MiB"}],
        }
    ],
}


def changed(path, value):
    """GOOD with the value at a path of keys replaced; None removes the key."""
    raw = copy.deepcopy(GOOD)
    place = raw
    for key in path[:-1]:
        if isinstance(place, dict):
            place.setdefault(key, {})
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return raw


def test_a_minimal_job_is_accepted():
    spec = parse_job(GOOD, "job.toml")
    assert spec.group[0].comm[0].bytes == "1 MiB"
    assert spec.tune.pairs == 25


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("job", "rank"), 3, ["'job.rank'", "allowed", "ranks"]),
        (("top",), 1, ["'top'", "allowed", "model"]),
        (("job", "name"), None, ["missing key 'job.name'"]),
        (("job", "name"), 7, ["job.name is 7, must be text"]),
        (("job", "ranks"), 1, ["job.ranks is 1", ">= 2"]),
        (("job", "timeout_s"), float("nan"), ["job.timeout_s is nan"]),
        (("job", "timeout_s"), float("inf"), ["job.timeout_s is inf"]),
        (("group", 0, "comm", 0, "bytes"), 10**30, ["comm[0].bytes is 1000000"]),
        (("job", "link"), "3 GB", ["job.link", "'3 GB'", "loopback"]),
        (("group", 0, "comm", 0, "kind"), "allgather", ["comm[0].kind", "'allgather'", "all_gather"]),
        (("group", 0, "comm", 0, "bytes"), -4, ["comm[0].bytes is -4", ">= 1"]),
        (("group", 0, "comm"), [], ["group[0].comm", "length >= 1"]),
        (("group", 0, "block", "heads"), 3, ["hidden 8", "heads 3"]),
        (("group", 0, "block"), None, ["either block or op"]),
        (("group", 0, "block", "ffn"), None, ["missing key 'group[0].block.ffn'"]),
        (("group",), None, ["[model]", "[[group]]"]),
        (("parallel",), {"fsdp": 2}, ["[parallel]", "[model]"]),
        (("parallel",), {"tensr": 2}, ["unknown key 'parallel.tensr' (did you mean 'tensor'?)"]),
        (("parallel",), {"graph_modules": ["attn", "x"]}, ["graph_modules[1] is 'x'", "allowed: attn, mamba, mlp,"]),
        (("tune",), {"space": {"num_channels": [0]}}, ["num_channels[0] is 0", ">= 1"]),
        (("tune",), {"space": {"algorithm": ["rign"]}}, ["algorithm[0]", "'rign'", "ring"]),
        (("tune",), {"space": {"chunk_bytes": [1], "slice_bytes": [1]}}, ["chunk_bytes or slice_bytes"]),
        (("tune",), {"space": {"num_channels": []}}, ["tune.space.num_channels is [], must name at least one value"]),
        (("tune",), {"space": {"sm_carveout": []}}, ["tune.space.sm_carveout is [], must name at least one value"]),
        (("tune",), {"pairs": 2}, ["tune.pairs is 2", ">= 3"]),
        (("tune",), {"budget": {"seconds": 0}}, ["tune.budget.seconds is 0", "> 0"]),
        (("cost",), {"noise": float("nan")}, ["cost.noise is nan"]),
        (
            ("parallel",),
            {"attention_kernel": "fa3"},
            ["attention_kernel is 'fa3'", "allowed: flash_attention_2, sdpa_"],
        ),
        (("precision",), {"attention": "fp8x"}, ["precision.attention is 'fp8x'", "allowed: parameter, mxfp8"]),
        (("tune",), {"space": {"launch_order": ["x"]}}, ["launch_order[0] is 'x'", "allowed: collective_first"]),
        (("plan",), {"for": "x"}, ["plan.for is 'x'", "allowed: "]),
    ],
)
def test_a_mistake_is_named_with_its_value_and_what_is_allowed(path, value, words):
    with pytest.raises(JobError) as caught:
        parse_job(changed(path, value), "job.toml")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_model_needs_parallel_and_cluster():
    with pytest.raises(JobError, match=r"\[parallel\]"):
        parse_job({"job": {"name": "m"}, "model": {"name": "phi-2", "seq_len": 8}}, "job.toml")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(JobError, match=r"nothing\.toml.*does not exist"):
        read_job(tmp_path / "nothing.toml")


def test_a_folder_is_no_job_file(tmp_path: Path):
    with pytest.raises(JobError, match="is a folder, no job file"):
        read_job(tmp_path)


def test_an_oversized_file_is_refused_without_being_parsed(tmp_path: Path):
    path = tmp_path / "big.toml"
    path.write_bytes(b"#" * (MAX_JOB_BYTES + 1))
    with pytest.raises(JobError, match=str(MAX_JOB_BYTES)):
        read_job(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[job\nname = 1", b"[" * 50_000])
def test_what_is_no_toml_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"not (UTF-8|TOML)"):
        read_job(path)


def test_an_emulated_link_is_in_bytes_per_second():
    assert link_bytes_per_s("3 Gbit/s") == 375e6
    assert link_bytes_per_s("loopback") is None
