"""Dispatched operators become an iteration: data dependences through storages, memory lifetimes, shard axes, streams.

An operator depends on the last writers of what it reads, and must follow the readers and the writer of what it
overwrites; views, allocations and waits make no operator but hand their storage on. An overwriting dependence that the
others already imply is left out, so that in-place steps of an optimizer stay readable. Operators that draw random
numbers follow each other: in another order they would draw others. Where the host reads what a tensor holds, that is an
operator, which all that is issued behind it follows (`Iteration`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import torch
import torch.distributed as dist

from lagom_overlap.capturing.collectives import (
    NAMESPACES,
    WAITS,
    CollectiveCall,
    UnknownCollectiveError,
    collective_call,
    is_ignored,
    tensors_in,
)
from lagom_overlap.capturing.communicators import Communicators
from lagom_overlap.capturing.lifetimes import CaptureLifetimes
from lagom_overlap.capturing.shard_rules import ShardRule, shard_rule
from lagom_overlap.capturing.storages import Layout, StorageTable, StoredTensor, aligned_dims, storage_key
from lagom_overlap.capturing.work import work_of
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload import (
    CommOp,
    CompOp,
    Gemm,
    Iteration,
    MemoryBound,
    Op,
    Origin,
    Phase,
    ShardSpec,
    TensorUse,
)
from lagom_overlap.workload.clock import StreamClock
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.streams import COMPUTE

_ALLOCATIONS: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_HANDS_ON: Final = frozenset({"_unsafe_view", "lift_fresh", "lift", "alias", "detach", "_reshape_alias"})
_OVERWRITES: Final = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_"})
_COPY_IN: Final = "fsdp::all_gather_copy_in"
_COPY_OUT: Final = frozenset({"fsdp::split_with_sizes_copy", "aten::split_with_sizes_copy"})
_WAITED_BYTES: Final = 8
"""A wait of the host moves nothing; what it takes on the device is a launch, as a read of one number does."""
_PREFIX: Final = {
    Phase.FORWARD: "fwd",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "bwd",
    Phase.WEIGHT_GRAD: "bwd",
    Phase.RECOMPUTE: "rec",
    Phase.OPTIMIZER: "opt",
}


@dataclass(slots=True)
class _Touched:
    """What one operator reads and writes."""

    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


class StepRecorder:
    """Collects the operators of one step in program order."""

    def __init__(self, *, is_graph: bool = False) -> None:
        """Of a graph, what is allocated like another tensor needs that tensor: it is an input of the node."""
        self._is_graph = is_graph
        self._last_random: int | None = None
        self.clock = StreamClock()
        self.storages = StorageTable()
        self.communicators = Communicators()
        self._lifetimes = CaptureLifetimes()
        self._ops: list[Op] = []
        self._ancestors: list[int] = []
        self._waits: list[set[int]] = []
        self._names: dict[str, int] = {}
        self._parameter_nodes: set[int] = set()
        self._schema_names: dict[object, tuple[str, ...]] = {}
        self._notes: dict[str, int] = {}

    def add_parameters(self, tensors: Iterable[torch.Tensor]) -> None:
        """Names the local tensors of parameters, there before the step."""
        for tensor in tensors:
            self.storages.external(tensor).is_parameter = True

    def arguments_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by the names of its schema; what was left at its default is absent."""
        names = self._schema_names.get(func)
        if names is None:
            names = self._schema_names[func] = tuple(argument.name for argument in func._schema.arguments)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def record(
        self,
        func: Any,  # OpOverload; torch's own annotations say Callable
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
        *,
        origin: Origin,
        stream: str = COMPUTE,
        name: str | None = None,
        forward_node: int | None = None,
        is_host_read: bool = False,
    ) -> str | None:
        """Takes one dispatched operator; its name in the iteration, None if it made none.

        `forward_node` is the number of the autograd node that a forward operator and its backward ones share.
        `is_host_read`: the host waits for what the operator finds (`item`; how many entries of `nonzero`).
        """
        namespace, _, short = func._schema.name.rpartition("::")
        outputs = tensors_in(result)
        if short in _ALLOCATIONS:
            likes = [self.storages.external(like) for like in tensors_in(list(args))] if self._is_graph else []
            for tensor in outputs:
                entry = self.storages.fresh(tensor)
                entry.made_from = next((like.writer for like in likes if like.writer is not None), None)
            return None
        arguments = self.arguments_of(func, args, kwargs)
        if is_host_read and not outputs:
            return self._read(arguments["self"], origin=origin, stream=stream, name=name)
        if namespace in NAMESPACES:
            return self._communicate(func, short, arguments, result, origin=origin, stream=stream, name=name)
        if func.is_view or short in _HANDS_ON:
            self._hand_on(arguments, outputs)
            return None
        touched = self._touched(func, short, arguments, outputs)
        work = work_of(short, arguments, touched.reads, touched.writes) if touched.writes else None
        if work is None:
            return None
        rule = shard_rule(func, arguments, outputs)
        phase = self._phase(short, touched, origin, forward_node, is_product=isinstance(work, Gemm))
        origin = origin if phase is origin.phase else replace(origin, phase=phase)
        number = len(self._ops)
        is_random = _draws(func, arguments)
        shards = None if is_random else self._shards(rule, touched)
        deps = self._depend(number, touched, is_random=is_random)
        self._ops.append(
            CompOp(
                name=self._named(name, origin, short),
                work=work,
                stream=stream,
                deps=deps,
                origin=origin,
                shards=None if is_host_read else shards,  # its result is of a size that the values decide
                is_host_read=is_host_read,
            )
        )
        self._waits.append(self.clock.issue(number, stream))
        if func._schema.name in _COPY_OUT:
            self._note_copy_out(touched)
        elif short == "_to_copy":
            self._pass_on_parameters(touched)
        return self._ops[-1].name

    def _read(self, tensor: torch.Tensor, *, origin: Origin, stream: str, name: str | None) -> str:
        """The host reads one value of a tensor: a copy to the host, on the stream of what it reads.

        `tolist` reads value after value of what one copy brings: reads with nothing between them are one operator,
        unless a graph names each (`name`).
        """
        last = self._ops[-1] if self._ops else None
        is_same = name is None and isinstance(last, CompOp) and last.is_host_read and last.stream == stream
        if not isinstance(last, CompOp) or not is_same or not isinstance(last.work, MemoryBound):
            number = len(self._ops)
            deps = self._depend(number, _Touched((tensor,), ()))
            name = self._named(name, origin, "item")
            work = MemoryBound(2 * tensor.element_size())
            self._ops.append(CompOp(name=name, work=work, stream=stream, deps=deps, origin=origin, is_host_read=True))
            self._waits.append(self.clock.issue(number, stream))
            return name
        number, ancestors = len(self._ops) - 1, self._ancestors.pop()
        deps = tuple(dict.fromkeys((*last.deps, *self._depend(number, _Touched((tensor,), ())))))
        self._ancestors[-1] |= ancestors
        work = MemoryBound(last.work.num_bytes + 2 * tensor.element_size())
        self._ops[-1] = replace(last, deps=deps, work=work)
        self._waits[-1] |= self.clock.issue(number, stream)
        return last.name

    def synchronize(self, waited: Iterable[int], *, origin: Origin) -> None:
        """The host waits for operators, and so for all that ran before them on their streams, or that these waited for.

        Like a read of the host: what the program issues behind it may depend on it (a buffer on the host that a copy
        fills), and what it waits for may not be put behind it. Nothing is recorded where an earlier read or wait of the
        host has waited for all of it.
        """
        ended: set[int] = set()
        left = set(waited)
        while left:
            last = left.pop()
            stream = self._ops[last].stream
            before = {place for place in range(last + 1) if self._ops[place].stream == stream} - ended
            ended |= before
            left |= {wait for place in before for wait in self._waits[place]} - ended
        deps: list[str] = []
        ancestors = 0
        for place in sorted(ended, reverse=True):
            if not ancestors >> place & 1:
                deps.append(self._ops[place].name)
                ancestors |= self._ancestors[place] | 1 << place
        reads = (place for place, op in enumerate(self._ops) if isinstance(op, CompOp) and op.is_host_read)
        if not ancestors or any(not ancestors & ~(self._ancestors[place] | 1 << place) for place in reads):
            return
        number = len(self._ops)
        name = self._named(None, origin, "synchronize")
        work = MemoryBound(_WAITED_BYTES)
        self._ops.append(
            CompOp(name=name, work=work, stream=COMPUTE, deps=tuple(reversed(deps)), origin=origin, is_host_read=True)
        )
        self._ancestors.append(ancestors)
        self._waits.append(self.clock.issue(number, COMPUTE))

    def _touched(
        self, func: Any, short: str, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> _Touched:
        if func._schema.name == _COPY_IN:
            return _Touched(tensors_in(arguments["all_gather_inputs"]), (outputs[0],))
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for argument in func._schema.arguments:
            if argument.name not in arguments:
                continue
            tensors = tensors_in(arguments[argument.name])
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written:
                writes += tensors
            if not is_written or not (argument.kwarg_only or short in _OVERWRITES):
                reads += tensors
        given = {storage_key(tensor) for tensor in (*reads, *writes)}
        writes += [tensor for tensor in outputs if storage_key(tensor) not in given]
        return _Touched(tuple(reads), tuple(writes))

    def _hand_on(self, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> None:
        """A view or a wait: its outputs are its input, also where they are given a storage of their own."""
        inputs = tensors_in(list(arguments.values()))
        if not inputs:
            return
        known = self.storages.external(inputs[0])
        for tensor in outputs:
            self.storages.alias(tensor, known)

    # Collectives.

    def _communicate(
        self,
        func: Any,
        short: str,
        arguments: Mapping[str, Any],
        result: object,
        *,
        origin: Origin,
        stream: str,
        name: str | None,
    ) -> str | None:
        outputs = tensors_in(result)
        if short in WAITS:
            self._hand_on(arguments, outputs)
            waited = [self.storages.external(tensor).writer for tensor in outputs]
            self.clock.hold_back(stream, [number for number in waited if number is not None])
            return None
        if is_ignored(short):
            return None
        try:
            call = collective_call(short, arguments, result)
        except UnknownCollectiveError as error:
            self._note(f"{func._schema.name} {error}: left out")
            return None
        touched = _Touched(call.reads, call.writes or call.reads)
        shards = self._shards(shard_rule(func, arguments, outputs), touched)
        number = len(self._ops)
        deps = self._depend(number, _Touched(call.reads, call.writes))
        ranks = tuple(dist.get_process_group_ranks(call.group))
        if len(ranks) < 2:
            work = MemoryBound(2 * max(1, call.num_bytes))
            self._ops.append(
                CompOp(name=self._named(name, origin, short), work=work, stream=stream, deps=deps, origin=origin)
            )
            self._waits.append(self.clock.issue(number, stream))
            return self._ops[-1].name
        communicator = self.communicators.name_of(call.group, ranks)
        self._waits.append(self._issue_collective(number, call, communicator, stream))
        if call.kind is CollectiveKind.ALL_GATHER:
            self._pass_on_parameters(touched)
        self._ops.append(
            CommOp(
                name=self._named(name, origin, call.kind),
                collective=Collective(call.kind, max(1, call.num_bytes), len(ranks)),
                stream=stream if stream != COMPUTE else communicator,
                communicator=communicator,
                deps=deps,
                origin=origin,
                shards=shards,
            )
        )
        return self._ops[-1].name

    def _issue_collective(self, number: int, call: CollectiveCall, communicator: str, stream: str) -> set[int]:
        """Waits of a collective: on the caller's stream where that is FSDP's, else on a stream of its communicator.

        A collective that is not asynchronous runs on the caller's stream; on the stream of computations that is told by
        waits both ways, so that collectives and computations never share a stream.
        """
        if stream != COMPUTE:
            return self.clock.issue(number, stream) | self.clock.communicate(number, communicator)
        waits = set(self.clock.so_far(COMPUTE)) | self.clock.issue(number, communicator)
        waits |= self.clock.communicate(number, communicator)
        if not call.is_async:
            self.clock.hold_back(COMPUTE, [number])
        return waits

    # Dependences, memory, axes.

    def _depend(self, number: int, touched: _Touched, *, is_random: bool = False) -> tuple[str, ...]:
        """Records what operator `number` reads and writes; the names of the operators that it must follow."""
        needed: set[int] = set()
        if is_random:
            needed |= set() if self._last_random is None else {self._last_random}
            self._last_random = number
        follows: set[int] = set()
        for tensor in touched.reads:
            entry = self.storages.external(tensor)
            if entry.writer is not None:
                needed.add(entry.writer)
            if entry.readers is None:
                entry.readers = []
            entry.readers.append(number)
            self._touch(entry, number)
        for tensor in touched.writes:
            entry = self.storages.fresh(tensor)
            follows.update(reader for reader in entry.readers or () if reader != number)
            if entry.writer is not None:
                follows.add(entry.writer)
            elif entry.made_from is not None:
                needed.add(entry.made_from)
        for tensor in touched.writes:
            entry = self.storages.fresh(tensor)
            entry.writer, entry.layout, entry.readers = number, Layout.of(tensor), []
            self._touch(entry, number)
        ancestors = 0
        for dep in needed:
            ancestors |= self._ancestors[dep] | 1 << dep
        for dep in sorted(follows - needed, reverse=True):
            if not ancestors >> dep & 1:
                needed.add(dep)
                ancestors |= self._ancestors[dep] | 1 << dep
        self._ancestors.append(ancestors)
        return tuple(self._ops[dep].name for dep in sorted(needed))

    def _pass_on_parameters(self, touched: _Touched) -> None:
        """A gathered or converted parameter is one too."""
        if all(self.storages.external(tensor).is_parameter for tensor in touched.reads):
            for tensor in touched.writes:
                self.storages.fresh(tensor).is_parameter = True

    def _note_copy_out(self, touched: _Touched) -> None:
        """FSDP2 copies a gathered buffer into its parameters."""
        gathered = self.storages.external(touched.reads[0]).buffer
        for tensor in touched.writes:
            entry = self.storages.fresh(tensor)
            entry.is_parameter = True
            if gathered is not None and entry.buffer is not None:
                self._lifetimes.copied_out(gathered, entry.buffer)

    def _touch(self, entry: StoredTensor, number: int) -> None:
        if entry.buffer is not None:
            self._lifetimes.touch(entry.buffer, entry.num_bytes, number)

    def _shards(self, rule: ShardRule | None, touched: _Touched) -> ShardSpec | None:
        """The rule in terms of the operators that made the inputs; call before the operator's own writes are recorded.

        None where the operator overwrites something, or an input's axis is none of what its maker wrote.
        """
        if rule is None or any(self.storages.find(tensor) is not None for tensor in touched.writes):
            return None
        sizes = list(rule.sizes)
        lost: set[int] = set()
        uses: list[tuple[str, list[int | None]]] = []
        for tensor, axes in rule.inputs:
            entry = self.storages.find(tensor)
            if entry is None or entry.writer is None or entry.layout is None:
                uses.append(("", list(axes)))
                continue
            if self._ops[entry.writer].shards is None:  # its maker is whole: the piece is cut from the view
                uses.append((self._ops[entry.writer].name, list(axes)))
                continue
            base: list[int | None] = [None] * len(entry.layout.shape)
            for axis, dim in zip(axes, aligned_dims(entry.layout, Layout.of(tensor)), strict=True):
                if axis is not None and dim is None:
                    lost.add(axis)
                elif axis is not None and dim is not None:
                    base[dim] = axis
                    sizes[axis] = gcd(sizes[axis], entry.layout.shape[dim])
            uses.append((self._ops[entry.writer].name, base))
        keep = [axis for axis in range(len(sizes)) if axis not in lost and sizes[axis] > 1]
        if not keep:
            return None
        renumbered = {old: new for new, old in enumerate(keep)}
        return ShardSpec(
            inputs=tuple(
                TensorUse(source, tuple(None if axis is None else renumbered.get(axis) for axis in axes))
                for source, axes in uses
            ),
            combine=tuple(rule.combine[axis] for axis in keep),
            sizes=tuple(sizes[axis] for axis in keep),
        )

    def _phase(
        self, short: str, touched: _Touched, origin: Origin, forward_node: int | None, *, is_product: bool
    ) -> Phase | None:
        """Tells the product for a weight's gradient from the one for its input's: it does not read the weight."""
        if short == "embedding_dense_backward":
            return Phase.WEIGHT_GRAD
        if not is_product or forward_node is None:
            return origin.phase
        entries = [self.storages.find(tensor) for tensor in touched.reads]
        reads_parameter = any(entry is not None and entry.is_parameter for entry in entries)
        if origin.phase is not Phase.BACKWARD:
            if reads_parameter:
                self._parameter_nodes.add(forward_node)
            return origin.phase
        return Phase.WEIGHT_GRAD if not reads_parameter and forward_node in self._parameter_nodes else Phase.BACKWARD

    # Names, and the result.

    def _named(self, given: str | None, origin: Origin, short: str) -> str:
        if given is not None:
            return given
        prefix = _PREFIX.get(origin.phase, "op") if origin.phase is not None else "op"
        micro = f"mb{origin.microbatch}" if origin.microbatch else ""
        stem = ".".join(part for part in (micro, prefix, origin.module, short.strip("_")) if part)
        seen = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if seen == 1 else f"{stem}_{seen}"

    def _note(self, text: str) -> None:
        self._notes[text] = self._notes.get(text, 0) + 1

    def keep(self, tensor: torch.Tensor) -> None:
        """`tensor` outlives the step: nothing frees its memory."""
        entry = self.storages.find(tensor)
        if entry is not None and entry.buffer is not None:
            self._lifetimes.keep(entry.buffer)

    def keep_alive(self) -> None:
        """Keeps whatever is still held by somebody at the end of the step."""
        for entry in self.storages.alive():
            if entry.buffer is not None:
                self._lifetimes.keep(entry.buffer)

    def finish(self, name: str, num_ranks: int, stream_names: Mapping[str, str] | None = None) -> IssuedStep:
        """The step; `stream_names` gives the framework's streams names that people know."""
        streams = stream_names or {}
        ops = tuple(replace(op, stream=streams[op.stream]) if op.stream in streams else op for op in self._ops)
        comms = {number for number, op in enumerate(ops) if isinstance(op, CommOp)}
        buffers = self._lifetimes.buffers([op.name for op in ops], comms)
        waits = {}
        for number, waited in enumerate(self._waits):
            names = [ops[place].name for place in sorted(waited)]
            beyond = tuple(wait for wait in names if wait not in ops[number].deps)
            if beyond:
                waits[ops[number].name] = beyond
        return IssuedStep(
            iteration=Iteration(name, ops, True, buffers, self.storages.resident_bytes()),
            num_ranks=num_ranks,
            groups=self.communicators.ranks,
            waits=waits,
            notes=tuple(f"{text} ({count} times)" for text, count in self._notes.items()),
        )


def _draws(func: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = {argument.name for argument in func._schema.arguments}
    return "dropout_p" not in names or bool(arguments.get("dropout_p"))
