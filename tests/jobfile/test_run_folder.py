"""What one run folder is: written whole or not at all, read back as written, refused in one line where it is none."""

import json
import logging
from pathlib import Path

import pytest

from lagom_overlap.errors import BundleError, JobError, LagomError, OutputError
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.run_folder import FORMAT, RECORD, RunFolder, RunKind, RunRecord, list_runs

SPEC = parse_job(
    {
        "job": {"name": "toy"},
        "group": [
            {
                "name": "g",
                "op": [{"name": "mm", "gemm": [8, 8, 8]}],
                "comm": [{"name": "ar", "kind": "all_reduce", "bytes": "1 MiB"}],
            }
        ],
    },
    "job.toml",
)


def record(kind: RunKind = RunKind.TUNE, date: str | None = None) -> RunRecord:
    return RunRecord.now(kind, seed=4, job=SPEC, request={"out": Path("a")}, date=date)


def written(path: Path, **changes: object) -> Path:
    RunFolder.create(path, "toy").write(record(), {"x": 1.5}, {"a.txt": b"a"})
    raw = json.loads((path / RECORD).read_bytes()) | changes
    (path / RECORD).write_text(json.dumps(raw))
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    made = record()
    files = RunFolder.create(tmp_path / "run", "toy").write(made, {"x": 1.5}, {"b.txt": b"b", "a.txt": lambda: b"a"})
    assert files == tuple(tmp_path / "run" / name for name in ("run.json", "b.txt", "a.txt"))
    found = RunFolder.read(tmp_path / "run")
    assert found.path == tmp_path / "run"
    assert found.files == ("a.txt", "b.txt", "run.json")
    assert (found.kind, found.record.seed, found.record.date) == (RunKind.TUNE, 4, made.date)
    assert (found.record.machine, found.record.versions) == (made.machine, made.versions)
    assert (found.record.result, found.record.request, found.record.from_trace) == ({"x": 1.5}, {"out": "a"}, None)
    assert found.spec() == SPEC


def test_an_anonymous_record_names_no_machine() -> None:
    assert RunRecord.now(RunKind.ANALYZE, seed=0, is_anonymous=True).machine == {}


def test_a_key_that_a_later_release_adds_is_passed_over(tmp_path: Path) -> None:
    assert RunFolder.read(written(tmp_path / "run", added=1)).record.seed == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": FORMAT + 1}, f"has format {FORMAT + 1}, must have {FORMAT}"),
        ({"format": FORMAT + 1, "kind": "other"}, f"has format {FORMAT + 1}"),
        ({"format": "1"}, "must be a whole number"),
        ({"kind": "other"}, "Invalid enum value 'other'"),
        ({"machine": 3}, "must be a table"),
        ({"date": None}, "must be text"),
    ],
)
def test_another_format_and_damage_are_one_line(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(BundleError) as error:
        RunFolder.read(written(tmp_path / "run", **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"kind": "tune"}', b'{"format": 1', b"\xff\xfe", b"null"])
def test_a_record_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(BundleError, match=r"is damaged: run\.json"):
        RunFolder.read(tmp_path)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, words in (("none", "does not exist"), ("file", "is no run folder"), (".", "run.json is missing")):
        with pytest.raises(JobError, match=words):
            RunFolder.read(tmp_path / name)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / RECORD).mkdir()
    with pytest.raises(LagomError, match="is no run folder"):
        RunFolder.read(tmp_path / "odd")


def test_a_run_without_a_job_has_no_spec(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no job"):
        RunFolder.read(written(tmp_path / "run", job=None)).spec()


def test_a_file_that_cannot_be_written_ends_the_writing_or_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> bytes:
        raise OutputError("no space")

    folder = RunFolder.create(tmp_path / "run", "toy")
    contents = {"a.txt": full, "b.txt": b"b"}
    with pytest.raises(OutputError, match="no space"):
        folder.write(record(), 1, contents)
    assert RunFolder.read(folder.path).files == ("run.json",)
    with caplog.at_level(logging.WARNING):
        files = folder.write(record(), 2, contents, skips_unwritable=True)
    assert [path.name for path in files] == ["run.json", "b.txt"]
    assert caplog.messages == ["no space"]
    assert RunFolder.read(folder.path).record.result == 2


def test_a_second_writing_that_fails_loses_no_file_of_the_first(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise KeyError("our bug")

    folder = RunFolder.create(tmp_path / "run", "toy")
    folder.write(record(), 1, {"a.txt": b"first", "b.txt": b"first"})
    with pytest.raises(KeyError):
        folder.write(record(), 2, {"a.txt": b"second", "b.txt": broken})
    found = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.name != RECORD}
    assert found == {"a.txt": b"second", "b.txt": b"first"}
    assert RunFolder.read(folder.path).record.result == 2


def test_runs_are_listed_with_the_latest_first_and_nothing_else(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == ()
    for name, date in (("b", "2026-01-02T00:00:00Z"), ("a", "2026-01-02T00:00:00Z"), ("c", "2026-01-03T00:00:00Z")):
        RunFolder.create(tmp_path / name, "toy").write(record(date=date))
    RunFolder.create(tmp_path / "unfinished", "toy")
    written(tmp_path / "older", format=0)
    (tmp_path / "note.txt").write_text("x")
    assert [run.path.name for run in list_runs(tmp_path)] == ["c", "b", "a"]


def test_a_folder_that_is_not_ours_to_read_is_passed_over(tmp_path, monkeypatch):
    """As in a shared one: another user's folder of mode 0700."""
    (tmp_path / "theirs").mkdir()

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(RunFolder, "read", denied)
    assert list_runs(tmp_path) == ()
