"""Rewrites as tables: what is written is what is read."""

import msgspec
import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Reorder,
    Split,
    Substitute,
    Substitution,
)
from lagom_overlap.workload.rewrite.tables import PartitionTable, RewriteTable, SplitTable, rewrite_of, table_of

REWRITES = (
    Substitute("c", Substitution.REDUCE_SCATTER_ALL_GATHER),
    PartitionGroups("c.ag", (2, 4), (1, 0, 1), 0, (ChainLink("mm", 0),)),
    Split("d", 1, 4, (ChainLink("a", 0), ChainLink("b", 2)), (ChainLink("e", 1),)),
    Fuse(("f", "g", "h")),
    Reorder(("x", "y#0"), (("x", "inter"),), (("y#0", "x"),)),
)


def test_every_rewrite_survives_json():
    content = msgspec.json.encode([table_of(rewrite) for rewrite in REWRITES])
    tables = msgspec.json.decode(content, type=list[RewriteTable])
    assert tuple(rewrite_of(table) for table in tables) == REWRITES


def test_a_key_that_no_rewrite_has_is_refused():
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(b'[{"rewrite":"fuse","comms":["a","b"],"colour":1}]', type=list[RewriteTable])


def test_what_no_rewrite_may_hold_is_refused():
    with pytest.raises(JobError, match="num_chunks is 1"):
        rewrite_of(SplitTable("c", 0, 1))
    with pytest.raises(JobError, match="must be from 2 to 4096"):  # found by a fuzzer: a list of so many shares
        rewrite_of(SplitTable("c", 0, 1 << 62))
    with pytest.raises(JobError, match="mesh"):
        rewrite_of(PartitionTable("c", (1, 4), (0, 1)))
