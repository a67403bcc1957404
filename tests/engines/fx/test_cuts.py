"""Cuts followed through views, against doing the same to numbers."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lagom_overlap.engines.fx import cuts
from lagom_overlap.engines.fx.cuts import GraphCut, equal_parts, repeated
from lagom_overlap.errors import JobError

pytestmark = pytest.mark.torch


def view_of(function, *shape):
    module = make_fx(function, tracing_mode="fake")(torch.zeros(shape))
    return next(node for node in module.graph.nodes if node.op == "call_function")


def test_equal_parts_are_contiguous_and_must_divide():
    assert equal_parts(1, 6, 3) == GraphCut(1, (0, 0, 1, 1, 2, 2))
    with pytest.raises(JobError, match="dimension of 7"):
        equal_parts(0, 7, 2)


def test_the_parts_of_every_rank_interleave():
    assert repeated(equal_parts(0, 2, 2), 3).owner == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("function", "shape", "cut", "expected"),
    [
        (lambda x: x.t(), (4, 6), GraphCut(0, (0, 0, 1, 1)), GraphCut(1, (0, 0, 1, 1))),
        (lambda x: x.permute(2, 0, 1), (2, 4, 6), equal_parts(2, 6, 2), GraphCut(0, (0, 0, 0, 1, 1, 1))),
        (lambda x: x.view(8, 6), (2, 4, 6), equal_parts(0, 2, 2), GraphCut(0, (0,) * 4 + (1,) * 4)),
        (lambda x: x.view(8, 6), (2, 4, 6), equal_parts(1, 4, 2), GraphCut(0, (0, 0, 1, 1) * 2)),  # inside each batch
        (lambda x: x.view(2, 4, 6), (8, 6), equal_parts(0, 8, 2), GraphCut(0, (0, 1))),
        (lambda x: x.view(2, 4, 6), (8, 6), GraphCut(0, (0, 0, 1, 1) * 2), GraphCut(1, (0, 0, 1, 1))),
    ],
)
def test_a_cut_is_followed_through_a_view_and_back(function, shape, cut, expected):
    node = view_of(function, *shape)
    assert cuts.after(node, cut) == expected
    assert cuts.before(node, expected) == cut


def test_pieces_that_a_view_scatters_are_refused():
    node = view_of(lambda x: x.view(3, 8), 8, 3)
    with pytest.raises(JobError, match="mixes the pieces"):
        cuts.after(node, GraphCut(0, (0, 1) * 4))
