import sys
from pathlib import Path

import pytest

from lagom_overlap.collective.sites import SiteSetting

sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_plugin"))  # c_build, which compiles the plug-in


@pytest.fixture(scope="session")
def found() -> tuple[SiteSetting, ...]:
    """What a search of the job of `test_online_loop` adopts."""
    from job_of_threads import Job
    from test_online_loop import options

    job = Job(options=options())
    job.run(220)
    assert job.members[0].settings
    return job.members[0].settings
