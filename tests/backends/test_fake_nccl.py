"""The tuner plug-in rehearsed: what a table asks for reaches the fake NCCL through the .so; that alone sets times."""

import shutil
from pathlib import Path

import pytest
from c_build import build_libraries

from lagom_overlap.backends import Backend, BackendRequest
from lagom_overlap.backends.fake_nccl import FakeNcclBackend
from lagom_overlap.backends.simulated import open_backend as open_simulated
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

AG, RS, AR, A2A = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


def group_of(*kinds: CollectiveKind, num_bytes: int = 64 * MIB, name: str = "block") -> OverlapGroup:
    return OverlapGroup(
        name=name,
        computations=tuple(CompOp(name=f"mm{i}", work=Gemm(4096, 4096, 4096)) for i in range(4)),
        comms=tuple(
            CommOp(name=f"{kind}{i}", collective=Collective(kind, num_bytes, 8), communicator="fsdp")
            for i, kind in enumerate(kinds)
        ),
    )


@pytest.fixture
def open_fake(tmp_path_factory):
    opened: list[Backend] = []
    plugin, fake = build_libraries(tmp_path_factory)

    def open_release(release: str = "2.30", plugin: Path = plugin, **options: object) -> FakeNcclBackend:
        request = BackendRequest(job_fingerprint="job", cluster=load_preset("a40_nvlink", 1), **options)
        opened.append(FakeNcclBackend(request, fake_library=fake, plugin_library=plugin, release=release))
        return opened[-1]

    yield open_release
    for backend in opened:
        backend.close()


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_runs_with_the_channels_that_its_table_names(open_fake, release):
    backend = open_fake(release)
    group = group_of(AG, RS)
    backend.problem(group)
    backend.measure(group, (CommConfig(num_channels=2), CommConfig(num_channels=5)))
    assert [config.num_channels for config in backend.effective] == [2, 5]


def test_equal_calls_of_one_step_are_told_apart(open_fake):
    backend = open_fake()
    group = group_of(AR, AR, AR)
    asked = tuple(CommConfig(num_channels=n) for n in (3, 1, 7))
    for _ in range(2):
        backend.measure(group, asked)
        assert [config.num_channels for config in backend.effective] == [3, 1, 7]


@pytest.mark.parametrize("release", RELEASES)
def test_a_chunk_takes_effect_exactly_where_nccl_asks_for_it(open_fake, release):
    backend = open_fake(release)
    group = group_of(AG)
    backend.measure(group, (CommConfig(chunk_bytes=128 * KIB, algorithm=Algorithm.RING, protocol=Protocol.SIMPLE),))
    unset = (None, 2 * MIB)  # 2.21 plans chunks elsewhere, so that the host says nothing of them
    assert backend.effective[0].chunk_bytes in ((128 * KIB,) if release in WITH_CHUNKS else unset)
    offered = {config.chunk_bytes for config in backend.problem(group).spaces[0]}
    assert (offered == {None}) == (release not in WITH_CHUNKS)


def test_from_2_31_on_channels_can_only_be_lowered_and_the_time_shows_it(open_fake):
    backend = open_fake("2.31")
    group = group_of(AG, num_bytes=512 * KIB)
    default = backend.measure(group, (CommConfig(),))
    of_default = backend.effective[0].num_channels
    raised = backend.measure(group, (CommConfig(num_channels=24),))
    assert backend.effective[0].num_channels == of_default < 24
    assert raised == default


def test_the_times_are_the_simulators_for_what_took_effect(open_fake):
    backend = open_fake()
    group = group_of(AG, AR)
    measured = backend.measure(group, (CommConfig(num_channels=4), CommConfig(num_channels=2)))
    simulated = open_simulated(BackendRequest(job_fingerprint="job", cluster=load_preset("a40_nvlink", 1)))
    assert measured == simulated.measure(group, backend.effective)


def test_what_never_reaches_a_tuner_is_left_alone_and_refused_if_set(open_fake):
    backend = open_fake()
    group = group_of(A2A, AG)
    problem = backend.problem(group)
    assert list(problem.spaces[0]) == [CommConfig()]
    assert isinstance(backend.measure(group, problem.default), Measurement)
    refused = backend.measure(group, (CommConfig(num_channels=2), CommConfig()))
    assert isinstance(refused, Failure)
    assert "never reaches a tuner" in refused.reason


def test_threads_are_refused_because_no_tuner_sets_them(open_fake):
    backend = open_fake(limits=SpaceLimits(num_threads=(256, 512)))
    with pytest.raises(SpaceError, match="num_threads"):
        backend.problem(group_of(AG))


def test_two_backends_of_one_process_share_nothing(open_fake):
    first, second = open_fake(), open_fake()
    group = group_of(AG)
    first.measure(group, (CommConfig(num_channels=3),))
    second.measure(group, (CommConfig(),))
    assert second.effective[0].num_channels != 3
    first.measure(group, (CommConfig(num_channels=3),))
    assert first.effective[0].num_channels == 3


def test_a_library_without_a_tuner_is_said_so(open_fake, tmp_path, tmp_path_factory):
    _, fake = build_libraries(tmp_path_factory)
    with pytest.raises(BackendError, match="holds no tuner"):
        open_fake(plugin=shutil.copy(fake, tmp_path / "other.so"))


@pytest.mark.parametrize("release", ["2.21", "2.28", "2.30", "2.31"])
def test_a_study_goes_from_default_to_tuned_through_the_plug_in(open_fake, release):
    """The whole loop: ask, write the table, swap, step, decide in the .so, simulate what came out, tell, judge."""
    backend = open_fake(release)
    group = group_of(AG, RS, num_bytes=64 * MIB)  # hidden behind the products, so that fewer channels pay
    problem = backend.problem(group)
    study = Study((problem,), Lagom((problem,), seed=1), seed=1, num_pairs=3, max_measurements=30)
    while (step := study.next()) is not None:
        study.report(step, {group.name: backend.measure(group, step.assignments[group.name])})
    assert study.verdict is not None
    default = backend.measure(group, problem.default)
    untouched = backend.effective
    tuned = backend.measure(group, study.recommended[group.name])
    assert tuned.makespan_s < default.makespan_s
    assert study.verdict.adopted
    for asked, ran, before in zip(study.recommended[group.name], backend.effective, untouched, strict=True):
        assert asked.num_channels in (None, ran.num_channels)
        assert ran != before or asked.is_untouched
