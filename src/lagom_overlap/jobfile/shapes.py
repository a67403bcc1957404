"""A job's `[[group]]`s: overlap groups given by the shapes of their operators and the sizes of their collectives."""

from types import MappingProxyType
from typing import Final

from lagom_overlap.collective import Collective
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.spec import BlockTable, CommTable, GroupTable, JobSpec
from lagom_overlap.toml_tables import size_bytes
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, MemoryBound, OverlapGroup, Work
from lagom_overlap.workload.precision import DType

_ELEMENT_BYTES: Final = MappingProxyType({"nccl": 2, "fake_nccl": 2})
"""Of the computations that a job gives by shapes: bf16 on GPUs, fp32 on ranks of this machine's processor."""


def _block_ops(block: BlockTable, element_bytes: int) -> list[CompOp]:
    """The forward pass of a transformer block: qkv, attention, output projection, up, activation, down."""
    tokens, hidden, ffn = block.batch * block.seq_len, block.hidden, block.ffn
    attention = Attention(
        batch=block.batch,
        num_heads=block.heads,
        seq_len=block.seq_len,
        head_dim=hidden // block.heads,
        element_bytes=element_bytes,
    )
    works: dict[str, Work] = {
        "qkv": Gemm(tokens, 3 * hidden, hidden, element_bytes),
        "attention": attention,
        "out": Gemm(tokens, hidden, hidden, element_bytes),
        "up": Gemm(tokens, ffn, hidden, element_bytes),
        "activation": MemoryBound(2 * tokens * ffn * element_bytes),
        "down": Gemm(tokens, hidden, ffn, element_bytes),
    }
    return [CompOp(name=f"{name}.{i}", work=work) for i in range(block.repeat) for name, work in works.items()]


def _listed_ops(group: GroupTable, place: str, element_bytes: int) -> list[CompOp]:
    ops = []
    for number, op in enumerate(group.op):
        work: Gemm | Attention | MemoryBound
        if op.gemm is not None:
            m, n, k = op.gemm
            work = Gemm(m, n, k, element_bytes)
        elif op.attention is not None:
            batch, heads, seq_len, head_dim = op.attention
            work = Attention(
                batch=batch, num_heads=heads, seq_len=seq_len, head_dim=head_dim, element_bytes=element_bytes
            )
        else:
            work = MemoryBound(size_bytes(op.memory or 0, f"{place}.op[{number}].memory"))
        ops.append(CompOp(name=op.name, work=work))
    return ops


def _comm_op(comm: CommTable, num_ranks: int, place: str) -> CommOp:
    collective = Collective(comm.kind, size_bytes(comm.bytes, f"{place}.bytes"), num_ranks)
    return CommOp(name=comm.name, collective=collective, communicator=comm.communicator)


def groups_from_shapes(spec: JobSpec) -> tuple[OverlapGroup, ...]:
    """The overlap groups of a job that gives them by their shapes.

    Raises:
        JobError: if names repeat, or sizes are impossible.
    """
    groups, seen = [], set[str]()
    element_bytes = _ELEMENT_BYTES.get(spec.job.backend, DType.FP32.num_bytes)
    for index, table in enumerate(spec.group):
        place = f"group[{index}]"
        comms = [_comm_op(comm, spec.job.ranks, f"{place}.comm[{i}]") for i, comm in enumerate(table.comm)]
        for name in (table.name, *(comm.name for comm in comms)):
            if name in seen:
                raise JobError(f"{place}: the name {name!r} is used twice; groups and collectives need different names")
            seen.add(name)
        groups.append(
            OverlapGroup(
                name=table.name,
                computations=tuple(
                    _block_ops(table.block, element_bytes) if table.block else _listed_ops(table, place, element_bytes)
                ),
                comms=tuple(comms),
                starts_after=tuple(comm.starts_after for comm in table.comm),
                count=table.count,
            )
        )
    return tuple(groups)
