"""What holds for every test: nothing depends on how fast the machine is, or on who started the tests."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

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


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None]:
    """What a collection makes stays to the end, so none of it is looked through for garbage, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether the tests with ranks alone are asked for and a file has none: it is not imported then."""
    if (
        config.option.markexpr.startswith("gloo")
        and collection_path.suffix == ".py"
        and not _marks_gloo(collection_path)
    ):
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where all that was asked for was skipped (`-m real_nccl`), what it needs: pytest gives a number of tests."""
    stats = terminalreporter.stats
    if any(stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed")):
        return
    for reason in dict.fromkeys(report.longrepr[2] for report in stats.get("skipped", ())):
        terminalreporter.write_line(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Timeouts are written for a quiet machine."""
    usual = float(config.getini("timeout"))
    for item in items:
        marked = item.get_closest_marker("timeout")
        seconds = float(marked.args[0]) if marked is not None else usual
        item.add_marker(pytest.mark.timeout(SLOWEST * seconds), append=False)
        if item.get_closest_marker("gloo") is not None:
            if not _marks_gloo(item.path):
                raise pytest.UsageError(f"{item.nodeid} is marked gloo, but not in its own file: -m gloo would miss it")
            if shared := _shared_by(item):
                item.add_marker(pytest.mark.xdist_group(shared))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Generator[None]:
    """The group is in a test's id when xdist sends it. What xdist 3.8 writes there is lost from pytest 9.2 on.

    See pytest-xdist's issue 1386: nothing fails, but each process then starts what the tests of a group share.
    """
    if session.config.getoption("loadgroup", default=False):
        for item in session.items:
            group = item.get_closest_marker("xdist_group")
            if group is not None and not item.nodeid.endswith(suffix := f"@{group.args[0]}"):
                item._id = type(item.id).parse(item.nodeid + suffix)
    yield


def _marks_gloo(file: Path) -> bool:
    return "mark.gloo" in file.read_text()


def _shared_by(item: pytest.Item) -> str:
    """What of ours a test shares with others of its module or folder; they run in one process, which starts it once."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - pytest has no public name for it
    shared = (made[-1] for made in fixtures.values() if made[-1].scope in ("module", "session") and made[-1].baseid)
    return min((f"{fixture.baseid}:{fixture.argname}" for fixture in shared), default="")


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Real traces recorded by others; see the data folder's README."""
    named = os.environ.get("LAGOM_SHARED_DATA")
    base = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not (base / "traces").is_dir():
        pytest.skip("real traces are not here: set LAGOM_SHARED_DATA to the folder that holds traces/")
    return base / "traces"
