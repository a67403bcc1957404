"""Our NCCL profiler plug-in in an emulated job: its times are the simulated clock's."""

import os
import sys
from pathlib import Path

import pytest

from lagom_emulate.verb import EmulateRequest, run_emulate
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.nccl_plugin.profile_log import read_profile
from lagom_overlap.units import NS

JOB = str(Path(__file__).with_name("profiled_job.py"))


@pytest.mark.timeout(120)
def test_each_collective_of_each_rank_takes_what_the_coordinators_timeline_says(tmp_path: Path) -> None:
    plugin = {"NCCL_PROFILER_PLUGIN": str(installed_library()), "LAGOM_PROFILE": str(tmp_path / "profile-%r")}
    request = EmulateRequest(command=(sys.executable, JOB, str(tmp_path)), cluster="h100_dgx", is_quiet=True)
    result = run_emulate(request, os.environ | plugin)
    assert result.exit_code == 0
    for rank in (0, 1):
        found = read_profile(tmp_path / f"profile-{rank}").collectives
        spans = [span for span in result.timeline.spans if span.rank == rank]
        assert [f"{call.kind} {call.num_bytes} B" for call in found] == [span.name for span in spans]
        first_ns = found[0].start_ns or 0
        for call, span in zip(found, spans, strict=True):
            assert call.duration_s == pytest.approx(span.end_s - span.start_s, abs=2 * NS)
            assert ((call.start_ns or 0) - first_ns) * NS == pytest.approx(span.start_s - spans[0].start_s, abs=2 * NS)
