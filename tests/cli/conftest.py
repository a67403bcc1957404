import sys
from pathlib import Path

import pytest

from lagom_overlap.cli import progress

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))


@pytest.fixture(autouse=True)
def _no_progress_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes ten seconds for what is quick, and the line that says so is no part of what is tested."""
    if request.module.__name__ != "test_progress":
        monkeypatch.setattr(progress, "EVERY_S", 1e6)
