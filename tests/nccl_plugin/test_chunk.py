"""getChunkSize: no identity, bytes of one channel, up to three calls, and the values that would crash NCCL."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.nccl_plugin.fake_host import RELEASES, WITH_CHUNKS, Fault, HostCall, HostMode

MIB, KIB = 1 << 20, 1 << 10
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
RING, TREE, NVLS, PAT = Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.PAT
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.SIMPLE
with_chunks = pytest.mark.parametrize("release", WITH_CHUNKS)


@with_chunks
def test_all_of_up_to_three_calls_get_the_chunk_and_see_the_bytes_of_one_channel(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB + 4096, 0): CommConfig(num_channels=8, chunk_bytes=96 * KIB)})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB + 4096)
    assert outcome.num_chunk_calls == 3
    assert outcome.chunk_bytes == (96 * KIB,) * 3
    assert max(outcome.channel_bytes) <= 9 * MIB  # an eighth, not the whole


@with_chunks
@pytest.mark.parametrize(
    "case",
    [
        (LL, 1000, 992),  # grain 16
        (LL, 16, 16),
        (LL128, 100_000, 99_840),  # grain 1920
        (LL128, 1920, 1920),
        (SIMPLE, 100_000, 99_840),  # grain 512
        (SIMPLE, 512, 512),
    ],
)
def test_a_chunk_is_a_multiple_of_the_protocols_grain(open_nccl, use_table, release, case):
    protocol, wanted, expected = case
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=RING, protocol=protocol, chunk_bytes=wanted)})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB)
    assert set(outcome.chunk_bytes) == {expected}
    assert outcome.faults == Fault(0)


@with_chunks
def test_a_chunk_below_the_grain_of_the_protocol_that_nccl_picks_becomes_one_grain(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(chunk_bytes=64)})  # the protocol is left to NCCL
    comm = open_nccl(release).comm()
    comm.set_costs({(RING, SIMPLE): 1.0})
    outcome = comm.run(AR, 64 * MIB)
    assert set(outcome.chunk_bytes) == {512}
    assert outcome.faults == Fault(0)


@with_chunks
@pytest.mark.parametrize("algorithm", [Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.COLLNET_CHAIN])
def test_nvls_and_collnet_chunks_are_never_raised_above_nccls_own(open_nccl, use_table, release, algorithm):
    num_nodes = 1 if algorithm == NVLS else 2
    rows = {(AR, 512 * MIB, 0): CommConfig(algorithm=algorithm, protocol=SIMPLE, chunk_bytes=512 * KIB)}
    use_table(rows, num_nodes=num_nodes)
    comm = open_nccl(release).comm(8, num_nodes, nvls_channels=16, has_collnet=True)
    outcome = comm.run(AR, 512 * MIB)
    comm.set_costs({(algorithm, SIMPLE): 1.0})
    default = comm.run(AR, 512 * MIB + 4096)  # has no row
    assert outcome.algorithm == default.algorithm == algorithm
    assert max(outcome.chunk_bytes) <= max(default.chunk_bytes) < 512 * KIB
    assert outcome.faults == Fault(0)


@with_chunks
def test_an_nvls_chunk_may_be_lowered(open_nccl, use_table, release):
    use_table({(AR, 512 * MIB, 0): CommConfig(algorithm=NVLS, protocol=SIMPLE, chunk_bytes=16 * KIB)})
    assert set(open_nccl(release).comm(nvls_channels=16).run(AR, 512 * MIB).chunk_bytes) == {16 * KIB}


@with_chunks
def test_a_ring_chunk_above_the_buffer_is_clamped_by_nccl(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=1 << 30)})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB)
    assert (set(outcome.chunk_bytes), outcome.faults) == ({2 * MIB}, Fault(0))


@with_chunks
def test_each_call_of_a_group_gets_its_own_chunk_when_kind_or_algorithm_tell_them_apart(open_nccl, use_table, release):
    use_table(
        {
            (AR, 64 * MIB, 0): CommConfig(algorithm=TREE, protocol=SIMPLE, chunk_bytes=64 * KIB),
            (AR, 4 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=32 * KIB),
            (AG, 64 * MIB, 0): CommConfig(chunk_bytes=128 * KIB),
        }
    )
    comm = open_nccl(release).comm()
    for _ in range(2):
        big, small, gather = comm.group(HostCall(AR, 64 * MIB), HostCall(AR, 4 * MIB), HostCall(AG, 64 * MIB))
        assert (set(big.chunk_bytes), set(small.chunk_bytes)) == ({64 * KIB}, {32 * KIB})
        assert set(gather.chunk_bytes) == {128 * KIB}
        assert set(comm.run(RS, 64 * MIB).chunk_bytes) == {2 * MIB}


@with_chunks
def test_a_call_smaller_than_one_channel_of_another_is_not_taken_for_it(open_nccl, use_table, release):
    use_table(
        {
            (AR, 2 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=8 * KIB),
            (AR, 512 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=16 * KIB),
        }
    )
    comm = open_nccl(release).comm()
    comm.run(AR, 2 * MIB, HostMode.SIMULATE)  # still waits for a launch
    assert set(comm.run(AR, 512 * MIB).chunk_bytes) == {16 * KIB}
    assert set(comm.run(AR, 2 * MIB).chunk_bytes) == {8 * KIB}


@with_chunks
def test_calls_of_a_group_that_cannot_be_told_apart_and_disagree_keep_nccls_chunk(open_nccl, use_table, release):
    use_table(
        {
            (AR, 64 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=64 * KIB),
            (AR, 63 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=32 * KIB),
        }
    )
    comm = open_nccl(release).comm()
    outcomes = comm.group(HostCall(AR, 64 * MIB), HostCall(AR, 63 * MIB, op_and_type=1))
    assert [set(o.chunk_bytes) for o in outcomes] == [{2 * MIB}, {2 * MIB}]
    assert set(comm.run(AR, 64 * MIB).chunk_bytes) == {64 * KIB}


@with_chunks
def test_members_of_an_aggregate_share_its_chunk(open_nccl, use_table, release):
    use_table({(AR, 60 * MIB, 0): CommConfig(algorithm=RING, protocol=SIMPLE, chunk_bytes=64 * KIB)})
    outcomes = open_nccl(release).comm().group(*[HostCall(AR, 20 * MIB)] * 3)
    assert [set(o.chunk_bytes) for o in outcomes] == [{64 * KIB}] * 3


@with_chunks
def test_the_chunk_is_left_alone_when_nccl_ran_another_algorithm_than_decided(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(algorithm=RING, protocol=LL128, chunk_bytes=1920)})
    outcome = open_nccl(release).comm(has_ll128=False).run(AR, 64 * MIB)
    assert 1920 not in outcome.chunk_bytes
    assert outcome.faults == Fault(0)


@pytest.mark.parametrize("release", [r for r in RELEASES if r not in WITH_CHUNKS])
def test_before_2_30_there_is_no_chunk_to_set(open_nccl, use_table, release):
    use_table({(AR, 64 * MIB, 0): CommConfig(num_channels=4, chunk_bytes=64 * KIB)})
    outcome = open_nccl(release).comm().run(AR, 64 * MIB)
    assert (outcome.max_channels, outcome.num_chunk_calls) == (4, 0)
