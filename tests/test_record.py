"""Files are written whole or not at all, and only their owner reads them."""

import errno
import os
from pathlib import Path

import pytest

from lagom_overlap.errors import OutputError
from lagom_overlap.record import (
    append_line,
    check_new_folder,
    check_own_folder,
    create_folder,
    describe_machine,
    package_versions,
    read_regular,
    write_private,
)


def test_a_file_is_replaced_whole_and_private(tmp_path: Path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [left.name for left in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert [left.name for left in tmp_path.iterdir()] == ["f"]


def test_a_folder_is_private_and_never_reused(tmp_path: Path):
    create_folder(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    write_private(tmp_path / "run" / "f", b"kept")
    assert [held.name for held in (tmp_path / "run").iterdir()] == ["f"]
    with pytest.raises(OutputError, match="exists already"):
        create_folder(tmp_path / "run")
    with pytest.raises(OutputError, match="does not exist"):
        create_folder(tmp_path / "a" / "b")


def test_a_folder_in_which_an_interrupted_run_wrote_nothing_is_taken_over(tmp_path: Path):
    run = tmp_path / "run"
    create_folder(run)
    (run / ".run.json.abcd_123").write_bytes(b"half")  # what a kill in the middle of a write leaves
    check_new_folder(run)
    create_folder(run)
    write_private(run / "run.json", b"{}")
    assert [held.name for held in run.iterdir()] == ["run.json"]
    with pytest.raises(OutputError, match="exists already"):
        check_new_folder(run)


def test_an_empty_folder_that_is_not_ours_or_holds_a_file_of_the_users_is_refused(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    create_folder(tmp_path / "ours")
    (tmp_path / "ours" / "notes.txt").write_text("of the user")
    create_folder(tmp_path / "unwritten")
    (tmp_path / "link").symlink_to(tmp_path / "unwritten")
    for name in ("theirs", "ours", "link"):
        with pytest.raises(OutputError, match="exists already"):
            check_new_folder(tmp_path / name)
        with pytest.raises(OutputError, match="exists already"):
            create_folder(tmp_path / name)
    assert (tmp_path / "ours" / "notes.txt").read_text() == "of the user"


def test_the_machine_and_its_versions_are_named():
    assert {"cpu", "cores", "load_1min", "system"} == describe_machine().keys()
    assert {"python", "numpy", "lagom-overlap"} <= package_versions().keys()


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    append_line(path, "first")
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="No space left on device"):
        append_line(path, "second")
    monkeypatch.undo()
    append_line(path, "third")
    assert path.read_text() == "first\nthird\n"


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    """A pipe would make us wait, a device would fill the memory; a link to a file is a file."""
    (tmp_path / "file").write_bytes(b"four")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"four"
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_regular(tmp_path / "file", 3)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(OSError, match="no regular file"):
            read_regular(tmp_path / name, 4)


def test_a_name_that_the_file_system_refuses_is_an_output_error(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    for refuse in (check_new_folder, create_folder):
        with pytest.raises(OutputError, match="File name too long"):
            refuse(long)


NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def foreign_file(path: Path, kind: str) -> None:
    """Something of that kind in the place of a file of ours."""
    victim = path.parent / "victim"
    victim.write_text("of the victim")
    match kind:
        case "a link":
            path.symlink_to(victim)
        case "a link to nothing":
            path.symlink_to(path.parent / "absent")
        case "a second name":
            path.hardlink_to(victim)
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "a folder":
            path.mkdir()
        case "nobody's":
            path.touch()
            os.chown(path, NOBODY, NOBODY)


KINDS = [
    *("a link", "a link to nothing", "a second name", "a pipe", "a device", "a folder"),
    pytest.param("nobody's", marks=as_root),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_goes_to_no_file_that_is_not_ours(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.0.jsonl"
    foreign_file(path, kind)
    with pytest.raises(OutputError, match="cannot write"):
        append_line(path, "a line")
    assert (tmp_path / "victim").read_text() == "of the victim"
    assert not (tmp_path / "absent").exists()
    with pytest.raises(OSError):  # noqa: PT011 - the words are the system's where it is a link or a folder
        read_regular(path, 100, is_own=True)


def test_a_pipe_that_somebody_reads_gets_no_line(tmp_path: Path) -> None:
    path = tmp_path / "events.0.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OutputError, match="it is no regular file"):
        append_line(path, "a line")
    assert os.read(reader, 10) == b""
    os.close(reader)


@as_root
def test_files_are_ours_where_the_file_system_gives_all_to_one_user(tmp_path: Path) -> None:
    """As an export with squashed owners does: the folder that we made belongs to that user, too."""
    append_line(tmp_path / "lines", "one")
    for path in (tmp_path / "lines", tmp_path):
        os.chown(path, NOBODY, NOBODY)
    append_line(tmp_path / "lines", "two")
    assert read_regular(tmp_path / "lines", 100, is_own=True) == b"one\ntwo\n"


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_regular(tmp_path / "huge", 100)


def test_a_folder_that_others_may_write_or_that_is_a_link_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    check_own_folder(folder)
    for mode in (0o777, 0o1777, 0o775):
        folder.chmod(mode)
        with pytest.raises(OutputError, match=rf"can be written by others \(mode {mode:o}\).*chmod go-w"):
            check_own_folder(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OutputError, match="is a symbolic link"):
        check_own_folder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is no folder"):
        check_own_folder(tmp_path / "file")


@as_root
def test_another_users_folder_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    create_folder(folder)
    os.chown(folder, NOBODY, NOBODY)
    for refuse in (check_own_folder, check_new_folder, create_folder):  # the last two: it bears the mark of a run
        with pytest.raises(OutputError, match=f"belongs to user {NOBODY}|exists already"):
            refuse(folder)
