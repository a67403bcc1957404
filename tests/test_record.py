"""Files are written whole or not at all, and only their owner reads them."""

import errno
import os
from pathlib import Path

import pytest

from lagom_overlap.errors import OutputError
from lagom_overlap.record import (
    append_line,
    check_new_folder,
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
