"""Gathers of parameters in a step's data flow: which they are, what goes before them, who needs what they bring."""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload.iteration import Buffer, Iteration
from lagom_overlap.workload.ops import CommOp, CompOp, MemoryBound, Op, data_deps


def parameter_gathers(iteration: Iteration) -> tuple[Buffer, ...]:
    """Buffers of gathered parameters, in the order in which they are first needed.

    The maker is an all-gather that reads nothing that this step computes: what it waits for, if anything, are copies
    that wait for nothing themselves, and reads of the host.
    """
    ops = {op.name: op for op in iteration.ops}
    need = first_need(iteration)
    gathers = [b for b in iteration.buffers if b.users and _gathers_parameters(ops[b.maker], ops)]
    return tuple(sorted(gathers, key=lambda buffer: need[buffer.maker]))


def _gathers_parameters(op: Op, ops: dict[str, Op]) -> bool:
    if not isinstance(op, CommOp) or op.collective.kind is not CollectiveKind.ALL_GATHER:
        return False
    return _copies_before(op, ops) is not None


def copies_into(iteration: Iteration) -> dict[str, tuple[str, ...]]:
    """Each parameter gather, in the order of first need, with the copies that go before it, first to last.

    A copy that several gathers read belongs to the first.
    """
    ops = {op.name: op for op in iteration.ops}
    copies: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for buffer in parameter_gathers(iteration):
        op = ops[buffer.maker]
        if op.name not in copies and isinstance(op, CommOp):
            copies[op.name] = tuple(name for name in _copies_before(op, ops) or () if name not in taken)
            taken.update(copies[op.name])
    return copies


def _copies_before(gather: CommOp, ops: dict[str, Op]) -> list[str] | None:
    """The copies that a gather waits for, first to last (FSDP2 converts, then copies in); None if it waits for more."""
    copies: list[str] = []
    for name in data_deps(gather, ops):
        chain, needed = [name], data_deps(ops[name], ops)
        while isinstance(dep := ops[chain[-1]], CompOp) and isinstance(dep.work, MemoryBound) and len(needed) == 1:
            chain.append(needed[0])
            needed = data_deps(ops[needed[0]], ops)
        if needed or not (isinstance(dep, CompOp) and isinstance(dep.work, MemoryBound)):
            return None
        copies += reversed(chain)
    return copies


def begins_of_gathers(iteration: Iteration) -> dict[str, str]:
    """Each parameter gather, in the order of first need, with what begins it: the first copy into it, or itself."""
    return {name: (*copies, name)[0] for name, copies in copies_into(iteration).items()}


def users_of_gathers(iteration: Iteration) -> dict[str, tuple[str, ...]]:
    """What must have ended for the parameters of each gather to be released, by the gather's name.

    That is who uses its buffer; where that is a copy out of it (FSDP2's), also who uses the copy.
    """
    ops = {op.name: op for op in iteration.ops}
    used: dict[str, tuple[str, ...]] = {}
    for buffer in iteration.buffers:
        used[buffer.maker] = tuple(dict.fromkeys((*used.get(buffer.maker, ()), *buffer.users)))
    users = {}
    for buffer in parameter_gathers(iteration):
        copies = [user for user in used[buffer.maker] if data_deps(ops[user], ops) == (buffer.maker,)]
        later = [user for copy in copies for user in used.get(copy, ())]
        is_copied_out = all(isinstance(op := ops[copy], CompOp) and isinstance(op.work, MemoryBound) for copy in copies)
        users[buffer.maker] = tuple(dict.fromkeys((*used[buffer.maker], *(later if is_copied_out else ()))))
    return users


def gathers_by_group(iteration: Iteration) -> tuple[tuple[CommOp, ...], ...]:
    """The gathers of each group of parameters in program order: in forward, again in backward, in the next micro-batch.

    Gathers of one module with the same bytes and communicator are of one group.
    """
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    by_group: dict[tuple[int | None, str, Collective, str], list[CommOp]] = {}
    for name in sorted(copies_into(iteration), key=place.__getitem__):
        op = iteration.ops[place[name]]
        assert isinstance(op, CommOp), name
        module = op.origin.module.removesuffix("_d")  # a built step says so of what belongs to backward
        by_group.setdefault((op.origin.layer, module, op.collective, op.communicator), []).append(op)
    return tuple(map(tuple, by_group.values()))


def first_need(iteration: Iteration) -> dict[str, int]:
    """The place in program order of the first operator that waits for each operator or uses a buffer of it."""
    need: dict[str, int] = {}
    for number, op in enumerate(iteration.ops):
        for dep in op.deps:
            need.setdefault(dep, number)
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    for buffer in iteration.buffers:
        used = [place[user] for user in buffer.users if user != buffer.maker]
        need[buffer.maker] = min([need.get(buffer.maker, len(place)), *used])
    return need
