"""Fig. 3 on workers, with a backend whose times are known in closed form, and the flags that choose it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lagom_overlap.backends import BackendRequest
from lagom_overlap.cli import main
from lagom_overlap.collective import CommConfig, Protocol
from lagom_overlap.papers.reproduce import figure3_workers
from lagom_overlap.papers.reproduce.result import ReproducedVerdict
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.units import MIB
from lagom_overlap.workload import OverlapGroup


class _Known:
    """x = 1 / channels, Y grows with channels where threads do not block, and with the chunk where they yield."""

    description = "known"

    def __init__(self, request: BackendRequest) -> None:
        self.request = request

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Measurement:
        (config,) = assignment
        return Measurement(makespan_s=9.0, comp_s=_comp_s(config), comm_s=(1.0 / config.num_channels,))

    def close(self) -> None:
        closed.append(self.request)


closed: list[BackendRequest] = []


def _comp_s(config: CommConfig) -> float:
    assert config.num_channels is not None
    assert config.chunk_bytes is not None
    channels = 0.0 if config.protocol is Protocol.SIMPLE else config.num_channels
    chunk = config.chunk_bytes / (4 * MIB) if config.protocol is Protocol.LL128 else 0.0
    return 1.0 + 0.1 * channels + 0.1 * chunk


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    factory: Callable[[str], type[_Known]] = lambda name: _Known  # noqa: E731
    monkeypatch.setattr(figure3_workers, "backend_factory", factory)
    closed.clear()


@pytest.mark.usefixtures("known")
def test_each_way_of_waiting_gets_its_verdicts_and_pictures() -> None:
    report = figure3_workers.figure3_on_workers(link_bytes_per_s=None)
    verdicts = {(line.profile.split()[-1], line.what[:12]): line.verdict for line in report.lines if "3b" in line.what}
    by_wait = {
        wait: [line.verdict for line in report.lines if line.profile == f"workers, {wait}"]
        for wait in ("spin", "yield", "block")
    }
    assert len(report.lines) == 12
    assert verdicts
    faster, same = (
        ReproducedVerdict.DIRECTION,
        ReproducedVerdict.NOT,
    )  # x = 1/channels does not depend on the chunk: never "falls"
    assert by_wait == {
        "spin": [faster, faster, same, same],
        "yield": [faster, faster, same, faster],
        "block": [faster, same, same, same],
    }
    yielding = next(surface for surface in report.surfaces if surface.profile == "workers, yield")
    assert yielding.values[0][-1] == pytest.approx(1.8 + 0.1 / 16)  # over the least of all: blocking, 1.0
    assert [request.link_bytes_per_s for request in closed] == [None]


@pytest.mark.usefixtures("known")
def test_an_interruption_closes_the_ranks() -> None:
    def interrupted(note: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        figure3_workers.figure3_on_workers(note=interrupted)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["fig5", "--backend", "workers"], "fig3, not fig5"),
        (["fig3", "--backend", "workers", "--link", "1 parsec"], "link"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["reproduce", *flags, "--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
