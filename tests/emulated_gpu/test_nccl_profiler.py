"""The stand-in libnccl.so.2 finds a profiler plug-in as each release does, and tells it what it tells its log."""

import re
from pathlib import Path

import pytest
from c_build import build_libraries

from lagom_emulate.nccl_tables import write_tables
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, read_profile

TOY_S = 10e-6  # client.h: an operation without a coordinator
LINE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
IS_SHARDED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@pytest.fixture
def profiled(on_ranks, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """The ring of each rank and rank 0's log of decisions, after `collectives` under a release."""

    def run(release: str, *, num_ranks: int = 2, function: str = "collectives", **environment: str):
        tables, plugin = tmp_path / "tables", build_libraries(tmp_path_factory)[0]
        write_tables(tables, load_preset("h100_dgx"), release)
        named = [tmp_path / f"profile-{rank}" for rank in range(num_ranks)]
        given = {"NCCL_PROFILER_PLUGIN": str(plugin), "LAGOM_PROFILE": str(tmp_path / "profile-%r")}
        given |= {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
        logs = on_ranks(function, num_ranks, **(given | environment))
        return [read_profile(path) if path.exists() else None for path in named], logs[0]

    return run


def as_logged(call: ProfiledCollective) -> tuple[str, ...]:
    name = "".join(word.capitalize() for word in str(call.kind).split("_"))
    own_bytes = (call.num_bytes or 0) // (call.num_ranks if call.kind in IS_SHARDED else 1)
    return name, str(own_bytes), str(call.algorithm).upper(), str(call.protocol).upper(), str(call.num_channels)


@pytest.mark.parametrize(
    ("release", "version"), [("2.27.7", 4), ("2.28.9", 5), ("2.29.7", 6), ("2.30.7", 6), ("2.31.2", 7)]
)
def test_the_profile_holds_what_nccl_logged_with_the_devices_times(profiled, release, version):
    rings, log = profiled(release)
    for rank, ring in enumerate(rings):
        assert [(c.rank, c.num_ranks, c.abi_version) for c in ring.communicators] == [(rank, 2, version)]
        logged = [(n, b, a, p, str(int(hi) - int(lo) + 1)) for n, b, a, p, lo, hi in LINE.findall(log)]
        assert [as_logged(call) for call in ring.collectives] == logged
        assert len(logged) >= 9
        for call in ring.collectives:
            assert (call.is_complete, call.duration_s) == (True, pytest.approx(TOY_S))
            assert (call.called_ns is None) == (version == 4)
        starts = [call.start_ns for call in ring.collectives]
        assert starts == sorted(starts)  # one stream
    assert {c.comm_id for c in rings[0].collectives} == {c.comm_id for c in rings[1].collectives}
    reduced = [call.call for call in rings[0].collectives if call.kind == CollectiveKind.ALL_REDUCE]
    assert reduced == list(range(len(reduced)))


@pytest.mark.parametrize("environment", [{"NCCL_PROFILER_PLUGIN": "none"}, {"LAGOM_PROFILE": ""}])
def test_a_plug_in_that_is_not_wanted_changes_nothing(profiled, environment):
    assert profiled("2.30.7", **environment)[0] == [None, None]


def test_a_release_whose_profilers_know_no_gpu_time_takes_none(profiled):
    assert profiled("2.26.5")[0] == [None, None]


def test_a_lost_rank_leaves_a_profile_that_can_be_read(profiled):
    rings, _ = profiled("2.30.7", num_ranks=3, function="a_rank_goes")
    assert all(ring is not None for ring in rings[:1])


def test_communicators_and_groups_of_sends_are_profiled_without_the_sends(profiled):
    rings, _ = profiled("2.30.7", function="groups")
    kinds = {call.kind for call in rings[0].collectives}
    assert kinds <= set(CollectiveKind)
    assert CollectiveKind.ALL_REDUCE in kinds
