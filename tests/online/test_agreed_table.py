"""The table of `lagom run --config` is in force on all ranks or on none, whoever cannot read it."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from c_build import build_libraries
from job_of_threads import FakeStore

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.errors import BackendError
from lagom_overlap.export.plugin_table import checksum_of
from lagom_overlap.export.run_variables import TABLE_CHECKSUM_VARIABLE
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table
from lagom_overlap.online.agreed_table import apply_on_all, meet
from lagom_overlap.online.ranks.exchange import StoreLost
from lagom_overlap.units import MIB

NUM_RANKS = 3


def table(channels=7, generation=1):
    key = ConfigKey(
        communicator=CommunicatorId(description="dp", ranks=tuple(range(8))),
        kind=CollectiveKind.ALL_REDUCE,
        num_bytes=64 * MIB,
    )
    rows = ConfigTable({key: CommConfig(num_channels=channels)})
    return encode_table(rows, generation=generation, communicators=[ProcessCommunicator(key.communicator)]).data


class Ranks:
    """Each with a plug-in of its own, which decides by nothing yet, and the environment that its launcher gave it."""

    def __init__(self, folder, library):
        self.store, self.plugins, self.environments = FakeStore(), [], []
        for rank in range(NUM_RANKS):
            path = folder / f"rank{rank}.so"
            path.write_bytes(library.read_bytes())
            write_table(folder / f"table{rank}.bin", table())
            self.plugins.append(TunerPlugin(path))
            self.environments.append(
                {"LAGOM_TABLE": str(folder / f"table{rank}.bin"), TABLE_CHECKSUM_VARIABLE: checksum_of(table())}
            )

    def path(self, rank):
        return Path(self.environments[rank]["LAGOM_TABLE"])

    def apply(self, rank, exchange):
        self.plugins[rank].enable(is_enabled=False)
        return apply_on_all(self.plugins[rank], exchange, self.environments[rank])

    def begin(self, *, without=(), timeout_s=30.0):
        """Every rank's answer, and the generation that it decides by then."""

        def live(rank):
            exchange = meet(under(self.store), rank=rank, num_ranks=NUM_RANKS, timeout_s=timeout_s)
            return self.apply(rank, exchange)

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            there = [rank for rank in range(NUM_RANKS) if rank not in without]
            refusals = list(pool.map(live, there))
        return refusals, [self.plugins[rank].generation for rank in there]


class Prefixed:
    """What torch's PrefixStore makes of a store."""

    def __init__(self, store, prefix):
        self.store, self.prefix = store, prefix

    def __getattr__(self, name):
        def call(keys, *rest):
            named = [f"{self.prefix}/{key}" for key in keys] if isinstance(keys, list) else f"{self.prefix}/{keys}"
            return getattr(self.store, name)(named, *rest)

        return call


def under(store):
    return lambda name: Prefixed(store, name)


@pytest.fixture
def ranks(tmp_path, tmp_path_factory, monkeypatch):
    for name in ("LAGOM_DISABLE", "LAGOM_TABLE", "LAGOM_RECORD"):
        monkeypatch.delenv(name, raising=False)
    return Ranks(tmp_path, build_libraries(tmp_path_factory)[0])


def test_all_ranks_decide_by_the_launchers_table(ranks):
    assert ranks.begin() == ([""] * NUM_RANKS, [1] * NUM_RANKS)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a file to another user")
def test_a_table_that_the_file_system_gave_to_another_user_is_taken(ranks):
    """Root-squashed NFS: the plug-in's own loader would refuse it, on this rank alone."""
    os.chown(ranks.path(1), 65534, 65534)
    assert ranks.begin() == ([""] * NUM_RANKS, [1] * NUM_RANKS)


def test_a_table_that_its_group_may_write_is_taken_because_its_checksum_is_known(ranks):
    ranks.path(2).chmod(0o664)
    assert ranks.begin() == ([""] * NUM_RANKS, [1] * NUM_RANKS)


def lose(path):
    path.unlink()


def replace(path):
    path.write_bytes(table(channels=5))


def damage(path):
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose, "rank 1: cannot read the table .*No such file"),
        (replace, "rank 1: .*is not the table that was written at the start"),
        (damage, "rank 1: .*is not the table that was written at the start"),
    ],
)
def test_what_one_rank_lacks_all_do_without_and_know_why(ranks, harm, words):
    harm(ranks.path(1))
    refusals, generations = ranks.begin()
    assert generations == [0] * NUM_RANKS
    (refusal,) = set(refusals)
    assert re.match(words, refusal)


def test_ranks_that_were_started_with_different_tables_use_none(ranks):
    other = table(channels=5)
    ranks.path(0).write_bytes(other)
    ranks.environments[0][TABLE_CHECKSUM_VARIABLE] = checksum_of(other)
    refusals, generations = ranks.begin()
    assert generations == [0] * NUM_RANKS
    assert "was started with other settings than the others" in refusals[0]
    assert len(set(refusals)) == 1


def test_a_table_that_the_plug_in_refuses_is_used_by_none(ranks):
    for rank in range(NUM_RANKS):
        ranks.environments[rank][TABLE_CHECKSUM_VARIABLE] = checksum_of(b"no table")
        ranks.path(rank).write_bytes(b"no table")
    refusals, generations = ranks.begin()
    assert generations == [0] * NUM_RANKS
    assert all("the plug-in refused the table" in refusal for refusal in refusals)


def test_a_table_that_the_loader_took_before_is_let_go_where_a_rank_has_none(ranks):
    for plugin in ranks.plugins[1:]:
        plugin.install(table())
    lose(ranks.path(0))
    assert ranks.begin()[1] == [0] * NUM_RANKS


def test_without_a_rank_the_others_wait_no_longer_than_they_must_and_use_none(ranks):
    refusals, generations = ranks.begin(without=(2,), timeout_s=0.5)
    assert generations == [0, 0]
    assert all("nothing came within 0.5 s" in refusal for refusal in refusals)


def test_a_rank_whose_store_is_gone_uses_none(ranks):
    ranks.plugins[0].install(table())
    exchange = meet(under(ranks.store), rank=0, num_ranks=NUM_RANKS, timeout_s=5.0)
    ranks.store.is_gone = True
    assert "store does not answer" in ranks.apply(0, exchange)
    assert ranks.plugins[0].generation == 0


def test_a_rank_that_is_disabled_takes_all_with_it(ranks, monkeypatch):
    monkeypatch.setenv("LAGOM_DISABLE", "1")
    refusals, generations = ranks.begin()
    assert generations == [0] * NUM_RANKS
    assert all("LAGOM_DISABLE is set" in refusal for refusal in refusals)


def test_a_process_that_begins_anew_with_the_store_it_had_agrees_anew(ranks):
    """Else it would read the answer of the first time, whatever a rank cannot read now."""
    assert ranks.begin()[1] == [1] * NUM_RANKS
    lose(ranks.path(1))
    assert ranks.begin()[1] == [0] * NUM_RANKS
    write_table(ranks.path(1), table())
    assert ranks.begin() == ([""] * NUM_RANKS, [1] * NUM_RANKS)


class Silent(FakeStore):
    """Neither answers nor breaks: its machine is gone."""

    def __init__(self):
        super().__init__()
        self.is_over = Event()

    def add(self, key, amount):
        self.is_over.wait()
        return super().add(key, amount)


def test_a_rank_whose_store_does_not_answer_does_not_wait_for_ever():
    store = Silent()
    with pytest.raises(StoreLost, match=r"no answer within 0\.2 s"):
        meet(under(store), rank=0, num_ranks=NUM_RANKS, timeout_s=0.2)
    store.is_over.set()


class LostLate(FakeStore):
    """Gone as soon as a rank gives its last word."""

    def add(self, key, amount):
        self.is_gone = self.is_gone or "sure/" in key
        return super().add(key, amount)


def test_a_rank_that_cannot_know_whether_the_others_have_it_ends_the_job(ranks):
    exchange = meet(under(LostLate()), rank=0, num_ranks=1, timeout_s=0.5)
    with pytest.raises(BackendError, match="cannot know whether the others switch"):
        ranks.apply(0, exchange)
    assert ranks.plugins[0].generation == 0
