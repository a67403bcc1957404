"""What `lagom run --observe` reports of NCCL's choices, from a record that the real plug-in wrote under a fake NCCL."""

import pytest

pytest.importorskip("torch")

from c_build import build_libraries

from lagom_overlap.backends.fake_nccl import Rehearsal
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.record_log import RecordLog, read_record
from lagom_overlap.online.launch_observe import record_lines
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp


def lines_of(tmp_path_factory, release, calls, **options):
    plugin, fake = build_libraries(tmp_path_factory)
    model = ContentionModel(load_preset("a40_nvlink", 1), load_profile("plausible"))
    rehearsal = Rehearsal(model, fake_library=fake, plugin_library=plugin, release=release)
    for communicator, kind, num_bytes, num_ranks in calls:
        collective = Collective(CollectiveKind(kind), num_bytes, num_ranks)
        rehearsal.run(CommOp(name="call", collective=collective, communicator=communicator))
    rehearsal.plugin.flush_record()
    lines = record_lines(read_record(rehearsal.record), **options)
    rehearsal.close()
    return lines


@pytest.mark.parametrize("release", ["2.22", "2.30"])
def test_sites_are_named_with_what_nccl_prefers_the_dearest_first(tmp_path_factory, release):
    calls = [("dp", "all_gather", MIB, 8)] * 3 + [("dp", "all_reduce", 256 * MIB, 8), ("tp", "all_reduce", 4 * KIB, 8)]
    lines = lines_of(tmp_path_factory, release, calls)
    assert lines[0].startswith("NCCL asked the tuner about 3 call sites on 2 communicators;")
    assert "all_reduce 256 MiB on 8 ranks, 1 calls: ring/simple" in lines[1]
    assert "all_gather 1 MiB on 8 ranks, 3 calls" in lines[2]
    assert "all_reduce 4 KiB on 8 ranks #1, 1 calls: ring/ll," in lines[3]
    assert all("other ways on offer" in line for line in lines[1:])


def test_the_rest_is_counted(tmp_path_factory):
    calls = [("dp", "all_reduce", n * MIB, 8) for n in range(1, 6)]
    lines = lines_of(tmp_path_factory, "2.30", calls, most=2)
    assert len(lines) == 4
    assert lines[-1].strip() == "and 3 more"


def test_an_old_release_tells_no_costs_and_silence_tells_nothing(tmp_path_factory):
    (_, line) = lines_of(tmp_path_factory, "2.21", [("dp", "all_reduce", MIB, 8)])
    assert "tells no costs" in line
    assert record_lines(RecordLog((), (), (), 0)) == []
