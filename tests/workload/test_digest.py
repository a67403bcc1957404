"""A graph's digest stays what it was where a work has nothing but what works had."""

import hashlib
import json

import pytest

from lagom_overlap.workload import Attention, CompOp, Gemm, Iteration, Work
from lagom_overlap.workload.iteration import graph_digest


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            Attention(batch=1, num_heads=2, seq_len=4, head_dim=8),
            "Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, causal=True, passes=1.0, element_bytes=2)",
        ),
        (
            Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, passes=2.5, backward=True),
            "Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, causal=True, passes=2.5, element_bytes=2)",
        ),
    ],
)
def test_the_digest_of_an_attention_is_what_it_was_before_it_knew_its_kernel(work: Work, said: str) -> None:
    lines = json.dumps([("a", said, [])], separators=(",", ":")).encode()
    step = Iteration(name="x", ops=(CompOp(name="a", work=work),))
    assert graph_digest(step) == hashlib.sha256(lines).hexdigest()[:16]


def test_another_window_or_size_is_another_graph() -> None:
    works = (
        Attention(batch=1, num_heads=2, seq_len=4, head_dim=8),
        Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, window=2),
        Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, narrow=True),
        Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, reach=2.0),
        Gemm(8, 8, 8),
        Gemm(8, 8, 16),
    )
    digests = {graph_digest(Iteration(name="x", ops=(CompOp(name="a", work=work),))) for work in works}
    assert len(digests) == len(works)
