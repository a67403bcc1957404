from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable

FSDP = CommunicatorId(description="fsdp", ranks=(0, 1, 2, 3))
KEY = ConfigKey(communicator=FSDP, kind=CollectiveKind.ALL_GATHER, num_bytes=4096)


def test_a_table_finds_a_call_site_by_all_of_its_key() -> None:
    table = ConfigTable({KEY: CommConfig(num_channels=2), replace(KEY, occurrence=1): CommConfig(num_channels=4)})
    assert len(table) == 2
    assert table.get(KEY) == CommConfig(num_channels=2)
    assert table.get(replace(KEY, occurrence=1)) == CommConfig(num_channels=4)
    for other in (
        replace(KEY, occurrence=2),
        replace(KEY, num_bytes=4097),
        replace(KEY, kind=CollectiveKind.REDUCE_SCATTER),
        replace(KEY, communicator=replace(FSDP, creation_order=1)),
        replace(KEY, communicator=replace(FSDP, ranks=(1, 0, 2, 3))),
    ):
        assert table.get(other) is None


def test_a_table_keeps_its_rows_when_the_source_changes() -> None:
    rows = {KEY: CommConfig(num_channels=2)}
    table = ConfigTable(rows)
    rows[KEY] = CommConfig(num_channels=9)
    assert [config.num_channels for _, config in table] == [2]


@pytest.mark.parametrize("ranks", [(0,), (), (1, 1), (-1, 0)])
def test_a_communicator_has_at_least_two_different_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two different numbers from 0"):
        CommunicatorId(description="tp", ranks=ranks)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="creation_order is -1"):
        replace(FSDP, creation_order=-1)
    with pytest.raises(ValueError, match="num_bytes is 0"):
        replace(KEY, num_bytes=0)
    with pytest.raises(ValueError, match="occurrence is -1"):
        replace(KEY, occurrence=-1)
