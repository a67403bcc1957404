import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig
from lagom_overlap.engines.messages import (
    GroupMessage,
    Join,
    Listening,
    Measure,
    Measured,
    Ready,
    Reply,
    RunTimes,
    Stop,
    Wrong,
    decode_command,
    decode_reply,
    encode,
)
from lagom_overlap.errors import BackendError
from lagom_overlap.timeline import Span, SpanKind
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, OverlapGroup, Work


def group_of(*works: Work) -> OverlapGroup:
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"c{index}", work=work) for index, work in enumerate(works)),
        comms=(CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 64, 2), communicator="fsdp"),),
        starts_after=(1,),
    )


def test_a_measure_command_comes_back_as_it_was_sent() -> None:
    works = (Gemm(1, 2, 3), Attention(batch=1, num_heads=2, seq_len=3, head_dim=4, passes=2.5), MemoryBound(8))
    group = group_of(*works)
    config = CommConfig(algorithm=Algorithm.RING, num_channels=2, chunk_bytes=1 << 20)
    command = Measure(GroupMessage.of(group), (config,), 3)
    line = encode(command)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    decoded = decode_command(line)
    assert decoded == command
    assert isinstance(decoded, Measure)
    assert decoded.group.to_group() == group


@pytest.mark.parametrize("command", [Join(4711), Stop()])
def test_short_commands_come_back_as_they_were_sent(command: Join | Stop) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "reply",
    [
        Listening(1),
        Ready("2.13", (0, -1)),
        Wrong(1, (0, 2)),
        Measured((RunTimes(2.0, 1.0, (0.5,)),), (Span(name="a", kind=SpanKind.COMM, stream="s", start_s=0, end_s=1),)),
    ],
)
def test_replies_come_back_as_they_were_sent(reply: Reply) -> None:
    assert decode_reply(encode(reply)) == reply


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[]",
        b'{"type":"dance"}',
        b'{"type":"join"}',
        b'{"type":"join","port":"80"}',
        b'{"type":"join","port":80,"host":"x"}',
        b'{"type":"listening","port":80}',
        encode(Measure(GroupMessage.of(group_of(Gemm(7, 1, 1))), (CommConfig(),), 1)).replace(b'"m":7', b'"m":0'),
    ],
)
def test_a_line_that_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a command"):
        decode_command(line)


def test_a_line_that_is_no_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="not a reply"):
        decode_reply(b'{"type":"stop"}')


def test_a_kernel_is_refused_by_the_name_of_its_computation() -> None:
    kernel = Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0)
    with pytest.raises(BackendError, match="computation 'c1' is a kernel"):
        GroupMessage.of(group_of(Gemm(1, 1, 1), kernel))
