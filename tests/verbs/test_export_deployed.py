"""A run's exported table in the plug-in, under a fake NCCL that makes the calls of a training step in their order."""

import shutil
import tomllib
from collections import Counter

import pytest
from c_build import build_libraries
from test_export import PHI2

from lagom_overlap.backends.fake_nccl import Rehearsal
from lagom_overlap.cli import main
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job

JOB = PHI2.replace("[1, 2, 4, 8, 16]", "[1, 2, 3, 5, 7, 11]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job and its run, with the table for the plug-in."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "job.toml").write_text(JOB)
    assert main(["tune", str(folder / "job.toml"), "--out", str(folder / "run")]) == 0
    assert main(["export", str(folder / "run"), "--format", "plugin"]) == 0
    return folder


@pytest.mark.parametrize("release", ["2.28", "2.30", "2.31"])
def test_every_call_of_a_step_runs_as_configs_toml_says_step_after_step(folder, tmp_path_factory, release):
    job = Job(read_job(folder / "job.toml"))
    asked = tomllib.loads((folder / "run" / "configs.toml").read_text())["groups"]
    wanted = {}
    for group in job.groups:
        for op, occurrences in zip(group.comms, group.occurrences, strict=True):
            for occurrence in occurrences:
                wanted[op.collective, occurrence] = asked[group.name][op.name]
    plugin, fake = build_libraries(tmp_path_factory)
    model = ContentionModel(load_preset("a40_nvlink", 1), load_profile("plausible"))
    rehearsal = Rehearsal(model, fake_library=fake, plugin_library=plugin, release=release)
    shutil.copy(folder / "run" / "lagom_table.bin", rehearsal.table)
    checked = 0
    for _ in range(2):
        rehearsal.plugin.step()  # as `lagom run` marks it; a raw table sets only what most calls of a site share
        seen = Counter()
        for op in job.issued.comms:
            ran = rehearsal.run(op)
            knobs = wanted.get((op.collective, seen[op.collective]), {})
            seen[op.collective] += 1
            if "num_channels" in knobs and op.collective.kind is not CollectiveKind.ALL_GATHER:  # see `lagom export`
                assert ran.num_channels == knobs["num_channels"]
                checked += 1
            if "chunk_bytes" in knobs and release != "2.28":
                assert ran.chunk_bytes == knobs["chunk_bytes"] // 512 * 512
    rehearsal.close()
    assert checked > 50
