"""A bundle of an earlier run replays exactly what was measured, and nothing else."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.backends.base import BackendRequest, Failure, GroupProblem, Measurement
from lagom_overlap.backends.bundle import assignment_of, group_row, header_line, outcome_of
from lagom_overlap.backends.recorded import open_backend
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import BundleError
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


def bundle(path: Path, *rows: tuple) -> Path:
    lines = [header_line(FINGERPRINT, "gloo", (PROBLEM,))]
    for assignment, outcome in rows:
        row = msgspec.to_builtins(group_row(PROBLEM, assignment, outcome))
        lines.append(msgspec.json.encode({"number": 0, "groups": {"g": row}}).decode())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def request(path: Path) -> BackendRequest:
    return BackendRequest(job_fingerprint=FINGERPRINT, bundle=path)


def test_a_row_gives_back_the_assignment_and_the_outcome():
    for outcome in (measured(0.25), Failure("too many channels")):
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
        lambda lines: [lines[0], lines[1][: len(lines[1]) // 2]],
        lambda lines: [lines[0], lines[1].replace('"num_channels":1', '"num_channels":"1"')],
        lambda lines: [lines[0], lines[1].replace('"makespan_s":1.0', '"makespan_s":-1.0')],
        lambda lines: [lines[0], lines[1].replace('"failure":null', '"failure":"x"')],
        lambda lines: [lines[0], lines[1].replace('"a":{"algorithm"', '"z":{"algorithm"')],
    ],
)
def test_damage_is_refused_and_the_line_is_named(tmp_path: Path, damage):
    path = bundle(tmp_path / "m.jsonl", ((SMALL, LARGE), measured(1.0)))
    path.write_text("\n".join(damage(path.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    with pytest.raises(BundleError, match=r"empty|header|version|line 2"):
        open_backend(request(path)).problem(GROUP)


def test_a_missing_bundle_is_named(tmp_path: Path):
    with pytest.raises(BundleError, match="cannot be read"):
        open_backend(request(tmp_path / "nothing"))
