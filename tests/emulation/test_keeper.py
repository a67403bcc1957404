"""What the verb says of a keeper that could not do its work."""

import sys
from pathlib import Path

import pytest

from lagom_overlap.emulation import launch
from lagom_overlap.errors import JobError


def test_a_keeper_that_ends_before_it_starts_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "keeper_command", lambda report: [sys.executable, "-c", "raise SystemExit(5)"])
    monkeypatch.setattr(launch, "become_subreaper", lambda: None)
    folder = launch.JobFolder(path=Path("none"))
    with pytest.raises(JobError, match="cannot run 'true': its keeper ended with code 5"):
        launch.Job(["true"], [{"LAGOM_EMULATION_SOCKET": "none"}], folder, quiet_stdout=False)
