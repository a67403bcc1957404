"""An iteration while it is being rewritten: operators by name, who waits for whom, issue order, buffers.

Issue order is a key per operator. What takes an operator's place gets its key with a number appended, so that no other
operator moves; keys are compared as tuples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Buffer, Iteration
from lagom_overlap.workload.ops import CommOp, Op
from lagom_overlap.workload.sharding import ShardSpec, TensorUse

Key = tuple[int, ...]
_BEHIND_ALL: Final = 1 << 60
"""In a key: behind every piece of the operator before."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What takes an operator's place, in issue order, and what those who waited for it wait for instead.

    `join` is one more operator, issued just before the first of those who wait for it, or behind `ops`. The first of
    `ops` makes one of `num_parts` equal parts of what the operator made; where others need the whole, the last makes
    that anew. `made` is what each of `ops` makes in a tensor of its own, by what the operator made; empty where they
    share one tensor.
    `copied_bytes` is what each of `ops` copies of its inputs for itself.
    """

    ops: tuple[Op, ...]
    results: tuple[str, ...]
    join: Op | None = None
    num_parts: int = 1
    made: tuple[Fraction, ...] = ()
    copied_bytes: tuple[int, ...] = ()

    @property
    def gather(self) -> str | None:
        """Who makes the whole next to the part that it reads; None if nobody does."""
        return self.ops[-1].name if self.num_parts > 1 and len(self.ops) > 1 else None


@dataclass(slots=True, eq=False)
class _DraftBuffer:
    name: str
    num_bytes: int
    maker: str
    users: list[str]
    is_copy: bool = False
    """Of inputs, for the operators that read it: no result, and nobody else needs it."""


class Draft:
    """A mutable copy of an iteration; `finished` makes an iteration of it again."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration
        self._ops: dict[str, Op] = {}
        self._keys: dict[str, Key] = {}
        self._followers: dict[str, dict[str, None]] = {}
        for number, op in enumerate(iteration.ops):
            self._insert(op, (number,))
        self._buffers = [_DraftBuffer(b.name, b.num_bytes, b.maker, list(b.users)) for b in iteration.buffers]
        self._buffers_of: dict[str, list[_DraftBuffer]] = {}
        for buffer in self._buffers:
            for name in {buffer.maker, *buffer.users}:
                self._buffers_of.setdefault(name, []).append(buffer)

    def _insert(self, op: Op, key: Key) -> None:
        if op.name in self._ops:
            raise JobError(f"iteration {self._iteration.name!r}: a rewrite makes {op.name!r}, which exists already")
        self._ops[op.name] = op
        self._keys[op.name] = key
        self._followers.setdefault(op.name, {})
        for dep in op.deps:
            self._followers.setdefault(dep, {})[op.name] = None

    def op(self, name: str) -> Op:
        """The operator of that name.

        Raises:
            JobError: if there is none: the plan belongs to another graph.
        """
        op = self._ops.get(name)
        if op is None:
            raise JobError(
                f"a plan for another graph: iteration {self._iteration.name!r} has no operator {name!r} at this point"
            )
        return op

    def comm(self, name: str) -> CommOp:
        """The collective of that name.

        Raises:
            JobError: if there is none, or it is a computation.
        """
        comm = self.op(name)
        if not isinstance(comm, CommOp):
            raise JobError(f"a plan for another graph: {name!r} is a computation, the plan needs a collective there")
        return comm

    def key(self, name: str) -> Key:
        """The operator's place in issue order."""
        return self._keys[name]

    def followers(self, name: str) -> tuple[str, ...]:
        """Operators that wait for it."""
        return tuple(self._followers[name])

    def bytes_made(self, name: str) -> int:
        """Bytes of the buffers that an operator makes; 0 where none is known."""
        return sum(buffer.num_bytes for buffer in self._results_of(name))

    def _results_of(self, name: str) -> list[_DraftBuffer]:
        return [one for one in self._buffers_of.get(name, ()) if one.maker == name and not one.is_copy]

    def outlives(self, name: str) -> bool:
        """Whether what an operator makes is read after the step."""
        return not self._followers[name] or any(not buffer.users for buffer in self._results_of(name))

    def between(self, starts: Iterable[str], last: Key) -> set[str]:
        """What follows `starts`, on any path, and is issued before `last`."""
        between: set[str] = set()
        stack = list(starts)
        while stack:
            for follower in self._followers[stack.pop()]:
                if follower not in between and self._keys[follower] < last:
                    between.add(follower)
                    stack.append(follower)
        return between

    def replace(self, replacements: Mapping[str, Replacement]) -> None:
        """Puts others in the places of operators; whoever waited for one waits for its results."""
        for old, new in replacements.items():
            for follower in self._followers[old]:
                if follower not in replacements:
                    self._rewire(follower, old, new.results)
        read_by = {}
        for old, new in replacements.items():
            op = self._ops.pop(old)
            reads = [one.name for one in new.ops if not set(op.deps).isdisjoint(one.deps)]
            read_by[old] = reads or [one.name for one in new.ops] or list(new.results)
            for dep in op.deps:
                if dep in self._followers:
                    self._followers[dep].pop(old, None)
            del self._followers[old]
        for old, new in replacements.items():
            key = self._keys.pop(old)
            for number, op in enumerate(new.ops):
                self._insert(op, (*key, number))
            if new.join is not None:
                waiting = [self._keys[name] for name in self._followers.get(new.join.name, ())]
                first = min(waiting, default=(*key, len(new.ops) + 1))
                self._insert(new.join, (*first[:-1], first[-1] - 1, _BEHIND_ALL, *key))
            self._move_buffers(old, [*(op.name for op in new.ops), *new.results][0], read_by[old])
        self._size_buffers(replacements)

    def _size_buffers(self, replacements: Mapping[str, Replacement]) -> None:
        """After operators were replaced: what each of the new ones holds."""
        gathers = {name for new in replacements.values() if (name := new.gather) is not None}
        members = {op.name for new in replacements.values() for op in new.ops} - gathers
        for new in replacements.values():
            if new.num_parts > 1:
                self._part_buffers(new, members, gathers)
            if new.made:
                self._piece_buffers(new, members)
            for op, num_bytes in zip(new.ops, new.copied_bytes, strict=False):
                if num_bytes:
                    self._add_copy(op.name, num_bytes)

    def _part_buffers(self, new: Replacement, members: set[str], gathers: set[str]) -> None:
        """A part lives until the last of its readers, its gather among them; the whole is a buffer of the gather's."""
        part, gather = new.ops[0].name, new.gather
        for buffer in self._buffers_of.get(part, [])[:]:
            buffer.users = [user for user in buffer.users if user not in gathers]  # these read parts only
            if buffer.maker != part or buffer.is_copy:
                continue
            whole_bytes = buffer.num_bytes
            buffer.num_bytes = -(-whole_bytes // new.num_parts)
            if gather is None:
                continue
            outside = [user for user in buffer.users if user not in members] or ([gather] if buffer.users else [])
            self._add_buffer(gather, whole_bytes, gather, outside)
            inside = [user for user in (*buffer.users, *self._followers[part]) if user in members]
            buffer.users = [*inside, gather]
            for name in {*inside, gather}:
                if buffer not in self._buffers_of.setdefault(name, []):
                    self._buffers_of[name].append(buffer)

    def _piece_buffers(self, new: Replacement, members: set[str]) -> None:
        """A piece lives until its last reader; the whole, where others need it, is the join's or the last piece's."""
        first, last = new.ops[0].name, new.ops[-1].name
        join = None if new.join is None else new.join.name
        for buffer in self._results_of(first):
            whole, users = buffer.num_bytes, set(buffer.users)
            readers = users | {op.name for op in new.ops} | ({join} if join else set())
            self._drop_buffer(buffer)
            outside = [one for one in buffer.users if one not in members]
            is_joined = join is not None or (new.made[-1] < 1 and bool(outside or not users))
            for number, (op, share) in enumerate(zip(new.ops, new.made, strict=True)):
                read = [one for one in self._followers[op.name] if one in readers]
                if is_joined and join is None:
                    read = [*(one for one in read if one in members), last]
                if not read and (users or op.name != last):
                    read = [last]
                self._add_buffer(f"{buffer.name}#{number}", ceil(whole * share), op.name, read)
            if is_joined:
                self._add_buffer(buffer.name, whole, join or last, outside)

    def _add_copy(self, name: str, num_bytes: int) -> None:
        self._add_buffer(f"{name}:copied", num_bytes, name, [name], is_copy=True)

    def _add_buffer(self, name: str, num_bytes: int, maker: str, users: list[str], *, is_copy: bool = False) -> None:
        buffer = _DraftBuffer(name, num_bytes, maker, users, is_copy)
        self._buffers.append(buffer)
        for known in {maker, *users}:
            self._buffers_of.setdefault(known, []).append(buffer)

    def _rewire(self, follower: str, old: str, results: tuple[str, ...]) -> None:
        op = self._ops[follower]
        deps: dict[str, None] = {}
        for dep in op.deps:
            deps.update(dict.fromkeys(results if dep == old else (dep,)))
        shards = renamed_source(op.shards, old, results[-1] if len(results) == 1 else "")
        self._ops[follower] = replace(op, deps=tuple(deps), shards=shards)
        for name in results:
            self._followers.setdefault(name, {})[follower] = None

    def _move_buffers(self, old: str, maker: str, readers: list[str]) -> None:
        for buffer in self._buffers_of.pop(old, []):
            if buffer.maker == old:
                buffer.maker = maker
            if old in buffer.users:
                buffer.users = [n for user in buffer.users for n in (readers if user == old else (user,))]
            for name in {buffer.maker, *buffer.users}:
                known = self._buffers_of.setdefault(name, [])
                if buffer not in known:
                    known.append(buffer)

    def join(self, members: tuple[str, ...], joined: CommOp, after: Iterable[str]) -> None:
        """Puts one operator in the place of the last of several; the operators `after` move behind it, in their order.

        `members` are in issue order.
        """
        key = self._keys[members[-1]]
        for number, name in enumerate(sorted(after, key=self._keys.__getitem__)):
            self._keys[name] = (*key, 1, number)
        gone = {name: Replacement((), (joined.name,)) for name in members[:-1]}
        self.replace(gone | {members[-1]: Replacement((joined,), (joined.name,))})
        self._fused_buffers(joined)

    def _fused_buffers(self, fused: CommOp) -> None:
        """The inputs are copied into one tensor, the results come in one; of a gather's every member's is copied out.

        Inputs that nobody else needs are released before the result is made, which is where both are counted at once.
        """
        call = fused.collective
        gathers = call.kind is CollectiveKind.ALL_GATHER
        known, results = self._buffers_of.get(fused.name, ()), self._results_of(fused.name)
        released = sum(one.num_bytes for one in known if set(one.users) == {fused.name})
        copied = call.num_bytes // (call.num_ranks if gathers else 1)
        if more := copied - min(released, sum(one.num_bytes for one in results)):
            self._add_copy(fused.name, max(1, more))
        if not results:
            return
        readers: list[str] = []
        for result in results:
            if gathers and result.users:
                result.maker = min(result.users, key=self._keys.__getitem__)
                self._buffers_of[fused.name].remove(result)
            readers += [result.maker] if gathers else result.users
        stays = not (gathers or all(result.users for result in results))
        self._add_buffer(fused.name, sum(one.num_bytes for one in results), fused.name, [] if stays else readers)
        if not gathers:
            for result in results:
                self._drop_buffer(result)

    def _drop_buffer(self, buffer: _DraftBuffer) -> None:
        for known in {buffer.maker, *buffer.users}:
            self._buffers_of[known].remove(buffer)
        self._buffers.remove(buffer)

    def finished(self) -> Iteration:
        """The iteration, its operators in issue order."""
        order = sorted(self._ops, key=self._keys.__getitem__)
        return Iteration(
            self._iteration.name,
            tuple(self._ops[name] for name in order),
            is_dataflow=self._iteration.is_dataflow,
            buffers=tuple(
                Buffer(name=b.name, num_bytes=b.num_bytes, maker=b.maker, users=_unique(b.users)) for b in self._buffers
            ),
            resident_bytes=self._iteration.resident_bytes,
        )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def renamed_source(shards: ShardSpec | None, old: str, new: str) -> ShardSpec | None:
    """The same axes with another name for one source."""
    if shards is None or all(use.source != old for use in shards.inputs):
        return shards
    uses = tuple(TensorUse(new, use.axes) if use.source == old else use for use in shards.inputs)
    return replace(shards, inputs=uses)
