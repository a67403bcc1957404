"""A bundle of an earlier run replays exactly what was measured, and nothing else."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.recorded import open_backend
from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    Protocol,
    SpaceLimits,
    Subspace,
)
from lagom_overlap.errors import BundleError, SpaceError
from lagom_overlap.tuners.bundle import header_line, parse_header
from lagom_overlap.tuners.problem import Failure, GroupProblem, Measurement
from lagom_overlap.tuners.rows import assignment_of, group_row, outcome_of
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

GROUP = OverlapGroup(
    name="g",
    computations=(CompOp(name="mm", work=Gemm(8, 8, 8)),),
    comms=(
        CommOp(name="a", collective=Collective(CollectiveKind.ALL_GATHER, 1024, 2)),
        CommOp(name="b", collective=Collective(CollectiveKind.REDUCE_SCATTER, 1024, 2)),
    ),
)
SPACE = ConfigSpace((Subspace(num_channels=(1, 2), chunk_bytes=(1024, 2048)),))
PROBLEM = GroupProblem(group=GROUP, spaces=(SPACE, SPACE), default=(CommConfig(), CommConfig()))
SMALL = CommConfig(num_channels=1, chunk_bytes=1024)
LARGE = CommConfig(num_channels=2, chunk_bytes=2048)
FINGERPRINT = "0123456789abcdef"


def measured(makespan_s: float) -> Measurement:
    return Measurement(makespan_s=makespan_s, comp_s=makespan_s / 2, comm_s=(makespan_s / 4, makespan_s / 5))


def bundle(path: Path, *rows: tuple, problem: GroupProblem = PROBLEM, **words: object) -> Path:
    lines = [header_line(FINGERPRINT, "gloo", (problem,), **words)]
    for assignment, outcome in rows:
        row = msgspec.to_builtins(group_row(PROBLEM, assignment, outcome))
        lines.append(msgspec.json.encode({"number": 0, "groups": {"g": row}}).decode())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def request(path: Path, **limits: object) -> BackendRequest:
    return BackendRequest(job_fingerprint=FINGERPRINT, bundle=path, limits=SpaceLimits(**limits))


def test_a_row_gives_back_the_assignment_and_the_outcome():
    for outcome in (measured(0.25), Failure("too many channels"), Failure("given up", measured(9.0))):
        row = group_row(PROBLEM, (SMALL, LARGE), outcome)
        assert assignment_of(row, PROBLEM) == (SMALL, LARGE)
        assert outcome_of(row, PROBLEM) == outcome


def test_recorded_measurements_come_back_in_their_order_over_and_over(tmp_path: Path):
    path = bundle(
        tmp_path / "m.jsonl",
        ((SMALL, LARGE), measured(1.0)),
        ((SMALL, LARGE), measured(3.0)),
        ((LARGE, LARGE), measured(2.0)),
    )
    backend = open_backend(request(path))
    assert backend.problem(GROUP) == PROBLEM
    replayed = [backend.measure(GROUP, (SMALL, LARGE)) for _ in range(3)]
    assert [m.makespan_s for m in replayed] == [1.0, 3.0, 1.0]
    assert backend.measure(GROUP, (LARGE, LARGE)) == measured(2.0)


def test_a_configuration_that_was_never_measured_is_a_failure(tmp_path: Path):
    backend = open_backend(request(bundle(tmp_path / "m.jsonl", ((SMALL, LARGE), measured(1.0)))))
    backend.problem(GROUP)
    assert isinstance(backend.measure(GROUP, (LARGE, SMALL)), Failure)


def test_a_run_folder_is_found_by_its_measurements(tmp_path: Path):
    bundle(tmp_path / "measurements.jsonl", ((SMALL, LARGE), measured(1.0)))
    backend = open_backend(request(tmp_path))
    backend.problem(GROUP)
    assert isinstance(backend.measure(GROUP, (SMALL, LARGE)), Measurement)


def test_a_bundle_of_another_job_is_refused(tmp_path: Path):
    path = bundle(tmp_path / "m.jsonl")
    with pytest.raises(BundleError, match="another job"):
        open_backend(replace(request(path), job_fingerprint="f" * 16))


def test_a_group_with_other_collectives_is_refused(tmp_path: Path):
    backend = open_backend(request(bundle(tmp_path / "m.jsonl")))
    with pytest.raises(BundleError, match="no group 'h'"):
        backend.problem(replace(GROUP, name="h"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [],
        lambda lines: ["{}", *lines[1:]],
        lambda lines: [lines[0].replace('"version":1', '"version":99'), *lines[1:]],
        lambda lines: [lines[0].replace('"num_channels":[1,2]', '"num_channels":[2,1]'), *lines[1:]],
        lambda lines: [lines[0].replace('"num_channels":[1,2]', '"num_channels":[]'), *lines[1:]],
        lambda lines: [lines[0].replace('"default":[{', '"default":[{"num_channels":1},{'), *lines[1:]],
        lambda lines: ["[" * 100_000, *lines[1:]],
        lambda lines: [lines[0], '{"x":' * 100_000],
        lambda lines: [lines[0], lines[1][: len(lines[1]) // 2]],
        lambda lines: [lines[0], lines[1].replace('"num_channels":1', '"num_channels":"1"')],
        lambda lines: [lines[0], lines[1].replace('"makespan_s":1.0', '"makespan_s":-1.0')],
        lambda lines: [lines[0], lines[1].replace('"failure":null', '"failure":1')],
        lambda lines: [lines[0], lines[1].replace('"a":{"algorithm"', '"z":{"algorithm"')],
    ],
)
def test_damage_is_refused_and_the_line_is_named(tmp_path: Path, damage):
    path = bundle(tmp_path / "m.jsonl", ((SMALL, LARGE), measured(1.0)))
    path.write_text("\n".join(damage(path.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    with pytest.raises(BundleError, match=rf"^bundle {str(path)!r}.*(is empty|line [12] is|version)"):
        open_backend(request(path)).problem(GROUP)


# --- the words of the recording


def test_what_the_recording_backend_said_comes_back(tmp_path: Path):
    words = {
        "description": "gloo on 2 ranks",
        "notes": ("CPU only.", "No cluster."),
        "arm_words": {"default": "native"},
    }
    backend = open_backend(request(bundle(tmp_path / "m.jsonl", **words)))
    assert backend.description == "replayed: gloo on 2 ranks"
    assert (backend.recorded_backend, backend.notes) == ("gloo", words["notes"])
    assert dict(backend.arm_words) == words["arm_words"]


def test_a_bundle_without_words_is_still_version_1_and_names_the_backend(tmp_path: Path):
    path = bundle(tmp_path / "m.jsonl")
    header = msgspec.json.decode(path.read_bytes().splitlines()[0])
    assert set(header) == {"format", "version", "job_fingerprint", "backend", "groups"}
    assert header["version"] == 1
    backend = open_backend(request(path))
    assert (backend.description, backend.notes, dict(backend.arm_words)) == ("replayed: gloo", (), {})


def test_the_limits_of_the_recorded_job_are_kept(tmp_path: Path):
    limits = SpaceLimits(algorithms=(Algorithm.RING,), chunk_bytes=(1024, 1 << 20))
    path = bundle(tmp_path / "m.jsonl", limits=limits)
    assert parse_header(path.read_text(encoding="utf-8").splitlines()[0], "x").limits == limits


# --- the job's limits


def test_a_replay_tries_only_what_the_job_allows(tmp_path: Path):
    path = bundle(tmp_path / "m.jsonl", ((SMALL, LARGE), measured(1.0)))
    backend = open_backend(request(path, num_channels=(2,), chunk_bytes=(1024, 2048)))
    problem = backend.problem(GROUP)
    assert problem.spaces == (ConfigSpace((Subspace(num_channels=(2,), chunk_bytes=(1024, 2048)),)),) * 2
    assert problem.default == PROBLEM.default
    assert backend.measure(GROUP, (SMALL, LARGE)) == measured(1.0)  # what was recorded stays, as for a baseline


RING_SIMPLE = Subspace(
    algorithm=Algorithm.RING,
    protocol=Protocol.SIMPLE,
    num_channels=(1, 2),
    num_threads=(64, 608),
    chunk_bytes=(1024, 2048),
)
TREE_LL = Subspace(
    algorithm=Algorithm.TREE, protocol=Protocol.LL, num_channels=(1, 2), num_threads=(64, 640), chunk_bytes=(1024,)
)
SEND = Subspace(protocol=Protocol.LL, num_channels=(1, 2), num_threads=(64, 640), chunk_bytes=(1024,))
NCCL = GroupProblem(
    group=GROUP,
    spaces=(ConfigSpace((RING_SIMPLE, TREE_LL)), ConfigSpace((SEND,))),
    default=(CommConfig(), CommConfig()),
)


@pytest.mark.parametrize(
    ("limits", "first", "second"),
    [
        ({}, (RING_SIMPLE, TREE_LL), (SEND,)),
        ({"algorithms": (Algorithm.TREE,)}, (TREE_LL,), (SEND,)),  # a send has no algorithm to limit
        ({"protocols": (Protocol.LL,)}, (TREE_LL,), (SEND,)),
        ({"num_threads": (640,)}, (replace(TREE_LL, num_threads=(640,)),), (replace(SEND, num_threads=(640,)),)),
        ({"chunk_bytes": (2048, 1024)}, (RING_SIMPLE, TREE_LL), (SEND,)),
    ],
)
def test_limits_choose_subspaces_and_values(tmp_path: Path, limits, first, second):
    backend = open_backend(request(bundle(tmp_path / "m.jsonl", problem=NCCL), **limits))
    assert [space.subspaces for space in backend.problem(GROUP).spaces] == [first, second]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"algorithms": (Algorithm.RING, Algorithm.NVLS)},
            r"^tune\.space\.algorithm holds 'nvls', .* \['ring', 'tree'\]",
        ),
        ({"num_channels": (2, 4)}, r"^tune\.space\.num_channels holds 4, but the recording holds \[1, 2\]"),
        (
            {"protocols": (Protocol.SIMPLE,)},
            r"^tune\.space\.protocol is \['simple'\], .* 'b' of group 'g' holds \['ll'\]",
        ),
        (
            {"algorithms": (Algorithm.TREE,), "chunk_bytes": (2048,)},
            r"^tune\.space\.chunk_bytes is \[2048\], .* holds \[1024\] under tune\.space\.algorithm is \['tree'\]",
        ),
        ({"chunk_bytes": ()}, r"^tune\.space\.chunk_bytes is \[\]"),
    ],
)
def test_limits_beyond_the_recording_are_refused_by_their_key(tmp_path: Path, limits, message):
    backend = open_backend(request(bundle(tmp_path / "m.jsonl", problem=NCCL), **limits))
    with pytest.raises(SpaceError, match=message):
        backend.problem(GROUP)


def test_a_knob_that_was_not_recorded_is_refused(tmp_path: Path):
    backend = open_backend(request(bundle(tmp_path / "m.jsonl"), num_threads=(64,)))
    with pytest.raises(SpaceError, match=r"^tune\.space\.num_threads holds 64, but the recording holds no such knob"):
        backend.problem(GROUP)


def test_the_same_job_may_ask_again_for_a_value_that_its_backend_left_out(tmp_path: Path):
    asked = SpaceLimits(num_channels=(1, 2), chunk_bytes=(1024, 2048, 1 << 20))
    path = bundle(tmp_path / "m.jsonl", limits=asked)
    assert open_backend(replace(request(path), limits=asked)).problem(GROUP).spaces == PROBLEM.spaces
    with pytest.raises(SpaceError, match="holds 4096"):
        open_backend(request(path, chunk_bytes=(1024, 4096))).problem(GROUP)


def test_a_missing_bundle_is_named(tmp_path: Path):
    with pytest.raises(BundleError, match="cannot be read"):
        open_backend(request(tmp_path / "nothing"))
