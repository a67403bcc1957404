"""The support matrix against NCCL's release notes and sources, and against its page."""

from pathlib import Path

import pytest

from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS
from lagom_overlap.nccl_plugin.support import NO, Knob, RouteName, Settable, best_route, support_of, tuner_version
from lagom_overlap.verbs.doctor import support_matrix

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.mark.parametrize(
    ("nccl", "version"),
    [((2, 20, 5), None), ((2, 21, 5), 2), ((2, 23, 4), 3), ((2, 27, 7), 4), ((2, 29, 7), 5), ((2, 30, 3), 6)],
)
def test_the_interface_version_is_the_newest_that_the_release_looks_for(nccl, version):
    assert tuner_version(nccl) == version


def test_the_fake_host_and_the_matrix_agree_on_interfaces_and_chunks(open_nccl):
    for release, code in RELEASES.items():
        nccl = (code // 10000, code // 100 % 100, code % 100)
        assert open_nccl(release).tuner_version == tuner_version(nccl)
        assert (Knob.CHUNK in support_of(nccl)[RouteName.PLUGIN]) == (release in WITH_CHUNKS)


@pytest.mark.parametrize(
    ("nccl", "knob", "route", "reach"),
    [
        ((2, 16, 2), Knob.CHANNELS, None, Settable.NO),
        ((2, 19, 3), Knob.CHANNELS, RouteName.SIBLING, Settable.LOWER),
        ((2, 21, 5), Knob.ALGORITHM, RouteName.PLUGIN, Settable.PARTLY),
        ((2, 29, 7), Knob.CHANNELS, RouteName.PLUGIN, Settable.YES),
        ((2, 29, 7), Knob.CHUNK, None, Settable.NO),
        ((2, 29, 7), Knob.THREADS, None, Settable.NO),
        ((2, 30, 3), Knob.THREADS, RouteName.SIBLING, Settable.PARTLY),
        ((2, 31, 2), Knob.CHANNELS, RouteName.PLUGIN, Settable.LOWER),
        ((2, 31, 2), Knob.ALL_TO_ALL_CHANNELS, RouteName.SIBLING, Settable.LOWER),
    ],
)
def test_each_knob_has_the_route_that_the_release_gives_it(nccl, knob, route, reach):
    assert best_route(nccl, knob) == route
    found = NO if route is None else support_of(nccl)[route][knob]
    assert found.reach is reach
    assert (found.note != "") == (reach in (Settable.PARTLY, Settable.LOWER))


def test_no_route_of_ours_is_the_configuration_per_call_because_pytorch_passes_none():
    assert support_of((2, 32, 6))[RouteName.COLL_CONFIG]
    assert {best_route((2, 32, 6), knob) for knob in Knob} == {RouteName.PLUGIN, RouteName.SIBLING}


def test_the_page_shows_the_matrix_of_the_code():
    page = PAGE.read_text().partition("\n## PyTorch\n")[0]
    lines = [line for line in page.splitlines() if line.startswith("| 2.")]
    rows = [row for row in support_matrix() if f"| {row.nccl} |" in "\n".join(lines)]
    assert len(lines) == len(rows) >= 8
    for line, row in zip(lines, rows, strict=True):
        cells = [f"{k.route}: {k.reach}" if k.route else "-" for k in row.knobs.values()]
        assert [cell.strip() for cell in line.strip("|").split("|")] == [row.nccl, ", ".join(row.torch) or "-", *cells]
