"""How far the outputs of a plan are from the program's."""

import sys

import pytest

pytest.importorskip("torch", reason="needs the extra torch")

import torch

from lagom_overlap.engines.fx.commands import ArmRuns, PlanRun
from lagom_overlap.engines.fx.program_session import relative_error
from lagom_overlap.engines.messages import decode_reply, encode

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.5, -4.0], 0.125),
        ([0.0, 0.0], [0.0, 0.25], 0.25),
        ([NAN, INF, 2.0], [NAN, INF, 2.0], 0.0),
        ([NAN, INF, 2.0], [NAN, INF, 1.0], 0.5),
        ([1.0, 2.0], [NAN, 2.0], sys.float_info.max),
        ([1.0, 2.0], [INF, 2.0], sys.float_info.max),
        ([3, 4], [3, 2], 0.5),
        ([True, False], [True, True], 1.0),
        ([], [], 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_value(expected, found, error):
    assert relative_error(torch.tensor(expected), torch.tensor(found)) == error


def test_the_largest_error_survives_the_way_from_rank_to_controller():
    arm = ArmRuns((1.0,), (0.0,), ())
    worst = relative_error(torch.tensor([1.0]), torch.tensor([NAN]))
    sent = PlanRun(before=arm, after=arm, max_error=worst, order_digest="0")
    assert decode_reply(encode(sent)) == sent
