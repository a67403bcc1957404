"""What holds for every test: nothing depends on how fast the machine is, or on who started the tests."""

import signal

import pytest
from hypothesis import HealthCheck, settings

SLOWEST = 5
"""Times as long as a test's timeout may take on a machine with other work: it ends a test that hangs, no more."""

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A background shell or nohup starts us with SIGINT ignored, and what a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Timeouts are written for a quiet machine."""
    usual = float(config.getini("timeout"))
    for item in items:
        marked = item.get_closest_marker("timeout")
        seconds = float(marked.args[0]) if marked is not None else usual
        item.add_marker(pytest.mark.timeout(SLOWEST * seconds), append=False)
