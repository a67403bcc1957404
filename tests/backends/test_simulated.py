from dataclasses import replace
from math import log
from statistics import mean, median, stdev

import pytest

from lagom_overlap.backends import Backend, BackendRequest
from lagom_overlap.backends.simulated import open_backend
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits, Transport
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError, SpaceError, UnknownNameError
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

CLUSTER = Cluster(
    name="box",
    gpu=Gpu(
        name="A40",
        num_sms=84,
        gemm_flops=115e12,
        hbm_bytes_per_s=600e9,
        l2_bytes=6_000_000,
        memory_bytes=48_000_000_000,
    ),
    gpus_per_node=8,
    num_nodes=1,
    intra=Link(kind=LinkKind.NVLINK, bytes_per_s=44e9, hop_s=1e-6),
    inter=Link(kind=LinkKind.NETWORK, bytes_per_s=44e9, hop_s=5e-6),
)
GROUP = OverlapGroup(
    name="g",
    computations=tuple(CompOp(name=f"c{i}", work=Gemm(4096, 2560, 2560)) for i in range(4)),
    comms=(
        CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 32 * MIB, 8)),
        CommOp(name="ar", collective=Collective(CollectiveKind.ALL_REDUCE, 8 * MIB, 8)),
    ),
)
UNTOUCHED = (CommConfig(), CommConfig())


def backend(**request: object) -> Backend:
    return open_backend(BackendRequest(job_fingerprint="job", cluster=CLUSTER, **request))


def measured(opened: Backend, assignment: tuple[CommConfig, ...] = UNTOUCHED) -> Measurement:
    outcome = opened.measure(GROUP, assignment)
    assert isinstance(outcome, Measurement)
    return outcome


def test_without_noise_it_measures_what_the_simulator_says() -> None:
    times = GroupSimulator(GROUP, ContentionModel(CLUSTER, load_profile("plausible"))).evaluate(UNTOUCHED)
    outcome = measured(backend(repeats=3))
    assert (outcome.makespan_s, outcome.comp_s, outcome.comm_s) == (times.makespan_s, times.comp_s, times.comm_s)
    assert (outcome.num_repeats, outcome.makespan_iqr_s) == (3, 0.0)
    assert outcome.timeline is not None
    assert outcome.timeline.makespan_s == times.makespan_s


def test_the_profile_is_the_job_s() -> None:
    assert measured(backend(profile="paper_scale")).makespan_s > measured(backend()).makespan_s


@pytest.mark.parametrize(("profile", "num_threads"), [("plausible", 544), ("paper_scale", 512)])
def test_the_default_is_spelled_out_and_what_untouched_means(profile: str, num_threads: int) -> None:
    """On eight A40 NCCL 2.30.7 takes what the paper says of 2.18.3, and counts the warp that synchronises."""
    opened = backend(profile=profile)
    problem = opened.problem(GROUP)
    spelled = CommConfig(
        algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, num_threads=num_threads, chunk_bytes=2 * MIB
    )
    assert problem.default == (replace(spelled, num_threads=None),) * 2
    assert all(config in space for config, space in zip(problem.default, problem.spaces, strict=True))
    assert measured(opened, problem.default) == measured(opened, (spelled, spelled)) == measured(opened)


def test_the_default_names_its_threads_where_the_job_does() -> None:
    problem = backend(limits=SpaceLimits(num_threads=(128, 544))).problem(GROUP)
    assert all(config in space for config, space in zip(problem.default, problem.spaces, strict=True))
    assert [config.num_threads for config in problem.default] == [544, 544]


def test_it_says_what_its_times_come_from() -> None:
    assert backend(noise=0.02).description == "simulated: A40 GPUs of cluster box, profile plausible, 2.0 % noise"


def test_the_baselines_are_the_corners_of_the_default_s_subspace() -> None:
    problem = backend().problem(GROUP)
    corners = {name: {(c.algorithm, c.num_channels, c.chunk_bytes) for c in a} for name, a in problem.baselines.items()}
    assert corners == {
        "fixed_min": {(Algorithm.RING, 1, 32 * KIB)},
        "fixed_max": {(Algorithm.RING, 8, 2 * MIB)},  # the channels that NCCL gives a communicator of eight A40
    }


def test_every_configuration_it_offers_can_run() -> None:
    opened = backend()
    first, second = opened.problem(GROUP).spaces
    assert all(isinstance(opened.measure(GROUP, (config, CommConfig())), Measurement) for config in first)
    assert all(isinstance(opened.measure(GROUP, (CommConfig(), config)), Measurement) for config in second)


def test_spaces_keep_to_the_job_s_limits() -> None:
    limits = SpaceLimits(algorithms=(Algorithm.RING,), num_channels=(1, 2, 4), chunk_bytes=(64 * KIB, MIB))
    for space in backend(limits=limits).problem(GROUP).spaces:
        assert {config.num_channels for config in space} == {1, 2, 4}
        assert {config.chunk_bytes for config in space} <= {64 * KIB, MIB}
        assert {config.algorithm for config in space} == {Algorithm.RING}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (SpaceLimits(num_channels=(84,)), r"^tune\.space\.num_channels allows 84;"),
        (SpaceLimits(num_threads=(65,)), r"^tune\.space\.num_threads allows 65;"),
        (SpaceLimits(chunk_bytes=(4 * MIB,)), r"^tune\.space\.chunk_bytes allows 4194304;"),
        (SpaceLimits(algorithms=(Algorithm.NVLS,)), r"^tune\.space\.algorithm allows only nvls,"),
        (SpaceLimits(transports=(Transport.SHM,)), r"^tune\.space\.transport allows shm,"),
        (SpaceLimits(protocols=(Protocol.LL,), chunk_bytes=(2 * MIB,)), r"^tune\.space: nothing is left to try"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_their_key(limits: SpaceLimits, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        backend(limits=limits).problem(GROUP)


def test_a_configuration_that_cannot_run_is_a_failure_with_its_reason() -> None:
    outcome = backend().measure(GROUP, (CommConfig(), CommConfig(num_channels=84)))
    assert outcome == Failure(
        "ar: num_channels is 84, but A40 has 84 SMs: computation would never run; allowed: fewer channels than SMs"
    )


def test_noise_repeats_with_the_seed_and_differs_from_call_to_call() -> None:
    one, two, other = backend(noise=0.05, seed=1), backend(noise=0.05, seed=1), backend(noise=0.05, seed=2)
    first = [measured(one).makespan_s for _ in range(3)]
    assert first == [measured(two).makespan_s for _ in range(3)]
    assert len(set(first)) == 3
    assert first[0] != measured(other).makespan_s


def test_a_failure_takes_its_place_in_the_noise() -> None:
    one, two = backend(noise=0.05), backend(noise=0.05)
    one.measure(GROUP, (CommConfig(num_channels=84), CommConfig()))
    two.measure(GROUP, UNTOUCHED)
    assert measured(one) == measured(two)


def test_noise_is_log_normal_with_the_asked_sigma_around_the_clean_time() -> None:
    clean, opened = measured(backend()), backend(noise=0.05, seed=7)
    logs = [log(measured(opened).makespan_s / clean.makespan_s) for _ in range(400)]
    assert mean(logs) == pytest.approx(0.0, abs=0.01)
    assert stdev(logs) == pytest.approx(0.05, rel=0.15)


def test_repeats_narrow_the_noise_and_report_its_spread() -> None:
    clean, once, often = measured(backend()), backend(noise=0.05), backend(noise=0.05, repeats=15)
    errors = [[abs(log(measured(b).makespan_s / clean.makespan_s)) for _ in range(60)] for b in (once, often)]
    assert median(errors[1]) < 0.6 * median(errors[0])
    outcome = measured(often)
    assert outcome.num_repeats == 15
    assert 0.02 < outcome.makespan_iqr_s / clean.makespan_s < 0.15


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cluster": None}, JobError, "needs a cluster"),
        ({"noise": -0.1}, JobError, "noise is -0.1"),
        ({"noise": float("nan")}, JobError, "noise is nan"),
        ({"repeats": 0}, JobError, "repeats is 0"),
        ({"profile": "real"}, UnknownNameError, "unknown cost profile 'real'"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    request = replace(BackendRequest(job_fingerprint="job", cluster=CLUSTER), **change)
    with pytest.raises(error, match=words):
        open_backend(request)


def test_more_ranks_than_the_cluster_has_are_refused() -> None:
    wide = replace(
        GROUP,
        comms=(CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, MIB, 16)),),
        starts_after=(),
        occurrences=(),
    )
    with pytest.raises(JobError, match="16 ranks do not fit"):
        backend().problem(wide)


def test_close_may_be_called_twice() -> None:
    opened = backend()
    opened.close()
    opened.close()
    assert measured(opened).makespan_s > 0
