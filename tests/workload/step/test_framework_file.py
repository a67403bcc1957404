"""A framework is one file; one that extends another and changes constants, counts and switches is another framework."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lagom_overlap.cost.operators import load_framework
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.step import job_step
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.verbs.plan_carrier import carried
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.workload.step import framework_file as module
from lagom_overlap.workload.step import load_rules, rules
from lagom_overlap.workload.step.traffic import counts

CACHED = (
    module.framework_names, module.framework_file, load_rules, load_framework, module.switches, module.dispatchers,
    rules.release_changes,
)  # fmt: skip

H100_BYTES_PER_S = 2.926e12
"""What its memory-bound kernels stream (gpus/h100.toml)."""
OURS = """
extends = "megatron"
title = "Megatron-LM"

[rules]
traffic = { extends = "megatron", loss = [72, 44] }

[constants]
launch_s = 0.0
further_launch_s = 0.0
eager_launch_s = 0.0

[switches]
prefetch = "--prefetch (ours)"

[[release]]
software = "Ours"
since = "2.0"
what = "it waits"
avoided_by = "NO_WAIT=1"
rules = { waits_for_buckets = true }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's files and whatever else a test puts beside them."""
    found = tmp_path / "frameworks"
    shutil.copytree(str(module._folder()), found)
    for cached in CACHED:
        cached.cache_clear()
    monkeypatch.setattr(module, "_folder", lambda: found)
    yield found
    for cached in CACHED:
        cached.cache_clear()


def _step_s(framework: str, **parallel: object) -> float:
    raw = {
        "job": {"name": "one"},
        "model": {"name": "phi-2", "seq_len": 1024},
        "cluster": {"preset": "h100_dgx"},
        "parallel": {"data": 1, "framework": framework, **parallel},
    }
    return run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml")))).iteration_s


def test_a_framework_that_launches_nothing_is_megatron_s_step_as_a_cuda_graph(folder: Path) -> None:
    (folder / "ours.toml").write_text(OURS.replace('traffic = { extends = "megatron", loss = [72, 44] }', ""))
    assert _step_s("ours") == _step_s("megatron", cuda_graph=True) < _step_s("megatron")


def test_twice_the_traffic_of_the_loss_is_that_many_bytes_more(folder: Path) -> None:
    (folder / "ours.toml").write_text(OURS)
    plain, doubled = load_rules("megatron").traffic, load_rules("ours").traffic
    assert (doubled.loss, doubled.cut_loss, doubled.norm) == ((72, 44), plain.cut_loss, plain.norm)
    logits = 1024 * 51_200  # Phi-2's vocabulary
    extra_s = logits * (36 + 22) / H100_BYTES_PER_S
    assert _step_s("ours") - _step_s("megatron", cuda_graph=True) == pytest.approx(extra_s, rel=0.02)


def test_its_switches_titles_and_releases_are_its_own(folder: Path) -> None:
    (folder / "ours.toml").write_text(OURS)
    assert "ours" in module.framework_names()
    assert module.switches()["prefetch"]["ours"] == "--prefetch (ours)"
    assert module.switches()["frozen"]["ours"] == ""  # Megatron-LM's
    assert module.has_dispatcher("ours", module.Dispatcher.MERGED)
    assert rules.rules_in_release(load_rules("ours"), "2.1").waits_for_buckets
    assert not rules.rules_in_release(load_rules("ours"), "1.9").waits_for_buckets
    raw = {"job": {"name": "n"}, "model": {"name": "phi-2", "seq_len": 1024}, "cluster": {"preset": "h100_dgx"}}
    step = job_step(parse_job({**raw, "parallel": {"data": 8, "framework": "ours", "frozen": True}}, "job.toml"))
    assert step is not None
    assert step.framework.name == step.rules.name == "ours"
    with pytest.raises(JobError, match=r"has no such switch; allowed with: megatron, ours$"):
        job_step(parse_job({**raw, "parallel": {"data": 8, "framework": "ddp", "frozen": True}}, "job.toml"))


def test_its_plan_is_carried_by_the_framework_of_its_title(folder: Path) -> None:
    raw = {"job": {"name": "j"}, "model": {"name": "llama-3.2-1b", "seq_len": 1024}, "cluster": {"preset": "h100_dgx"}}

    def carrier() -> Carrier | None:
        spec = parse_job({**raw, "parallel": {"data": 8, "global_batch": 8, "framework": "ours"}}, "job.toml")
        return carried(read_input(spec), carrier=None, planner=None).carrier

    (folder / "ours.toml").write_text(OURS)
    assert carrier() is Carrier.MEGATRON
    (folder / "ours.toml").write_text(OURS.replace('title = "Megatron-LM"', 'title = "Ours"'))
    for cached in CACHED:
        cached.cache_clear()
    assert carrier() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OURS.replace("launch_s = 0.0\nfurther", "lunch_s = 0.0\nfurther"), "unknown key 'constants.lunch_s'"),
        (OURS + "[extra]\n", "unknown key 'extra'"),
        (OURS.replace("[rules]", '[rules]\nsharding = "none"'), "rules.sharding is 'none', must be fsdp2 or layerwise"),
        ('title = "x"\n[rules]\n', "missing key 'constants'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(folder: Path, text: str, words: str) -> None:
    (folder / "ours.toml").write_text(text)
    with pytest.raises(JobError, match=words):
        _ = load_rules("ours"), load_framework("ours")


def test_unknown_counts_and_frameworks_name_those_that_there_are(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown set of traffic 'eagr' \(did you mean 'eager'\?\)"):
        counts("traffic", "eagr")
    (folder / "ours.toml").write_text(OURS.replace('extends = "megatron"\n', 'extends = "megatrn"\n', 1))
    with pytest.raises(UnknownNameError, match="unknown framework 'megatrn'"):
        load_rules("ours")
