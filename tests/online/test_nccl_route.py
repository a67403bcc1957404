"""Which route a job on NCCL takes, and what is said where it has none."""

import pytest
from c_build import build_libraries

torch = pytest.importorskip("torch")

from lagom_overlap.errors import BackendError, JobError, LagomError  # noqa: E402
from lagom_overlap.online.guest import safely  # noqa: E402
from lagom_overlap.online.routes.nccl import nccl_in_use, open_nccl_route  # noqa: E402

pytestmark = pytest.mark.torch
MODEL = torch.nn.Linear(2, 2)


@pytest.fixture
def environment(tmp_path, tmp_path_factory):
    plugin, _ = build_libraries(tmp_path_factory)
    return {
        "NCCL_TUNER_PLUGIN": str(plugin),
        "LAGOM_RECORD": str(tmp_path / "record.%r.bin"),
        "RANK": "3",
    }


@pytest.mark.parametrize("nccl", [(2, 21, 5), (2, 30, 7), (2, 32, 6)])
def test_a_release_with_a_tuner_takes_the_plug_in_with_this_ranks_files(environment, tmp_path, nccl):
    route = open_nccl_route(MODEL, nccl, environment)
    assert route.name == "plugin"
    assert route._record == tmp_path / "record.3.bin"
    assert route.communicators() == ()  # NCCL has made none yet


def test_siblings_are_taken_where_there_is_no_tuner_or_the_user_says_so(environment):
    for nccl, env in (((2, 19, 3), {}), ((2, 30, 7), environment | {"LAGOM_ROUTE": "sibling"})):
        original = torch.distributed.all_to_all_single
        route = open_nccl_route(MODEL, nccl, env)
        assert route.name == "sibling"
        assert torch.distributed.all_to_all_single is not original
        route.close()
        assert torch.distributed.all_to_all_single is original


@pytest.mark.parametrize(
    ("nccl", "changed", "words"),
    [
        ((2, 30, 7), {"LAGOM_RECORD": ""}, "LAGOM_RECORD is not set in this rank: start the job with lagom run"),
        ((2, 30, 7), {"LAGOM_ROUTE": "magic"}, "LAGOM_ROUTE is 'magic'; allowed: plugin, sibling"),
        ((2, 16, 2), {}, "NCCL 2.16.2 lets nothing be set"),
    ],
)
def test_what_is_missing_is_named(environment, nccl, changed, words):
    with pytest.raises(JobError, match=words):
        open_nccl_route(MODEL, nccl, environment | changed)


def test_a_machine_without_nccl_is_not_on_nccl():
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    assert nccl_in_use() is None


def test_errors_of_ours_are_one_line_but_for_the_one_that_must_end_the_job(capsys):
    def fail(error):
        raise error

    for error in (LagomError("told\nin lines"), ZeroDivisionError("ours")):
        safely(lambda error=error: fail(error), ends_the_job=BackendError)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("(rank 0): ")[2] for line in lines] == ["told in lines", "ZeroDivisionError: ours"]
    with pytest.raises(BackendError):
        safely(lambda: fail(BackendError("could not switch")), ends_the_job=BackendError)
