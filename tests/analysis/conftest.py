import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Real traces recorded by others; see the data folder's README."""
    named = os.environ.get("LAGOM_SHARED_DATA")
    base = Path(named) if named else Path(__file__).parents[3] / "shared" / "data"
    if not (base / "traces").is_dir():
        pytest.skip("real traces are not here: set LAGOM_SHARED_DATA to the folder that holds traces/")
    return base / "traces"
