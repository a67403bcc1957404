"""An iteration by name: operators, who waits for them, their places in program order."""

from collections.abc import Iterable
from functools import cached_property

from lagom_overlap.workload import CommOp, CompOp, Iteration, Op, Phase
from lagom_overlap.workload.ops import data_deps


class StepIndex:
    """Looks operators up; built once per iteration."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self.ops: dict[str, Op] = {op.name: op for op in iteration.ops}
        self.place = {op.name: number for number, op in enumerate(iteration.ops)}
        self.followers: dict[str, list[str]] = {name: [] for name in self.ops}
        for op in iteration.ops:
            for dep in op.deps:
                self.followers[dep].append(op.name)

    def reached(self, starts: Iterable[str], last: int) -> set[str]:
        """What follows `starts` on any path, up to place `last`, the starts left out."""
        names: set[str] = set()
        stack = list(starts)
        while stack:
            for name in self.followers[stack.pop()]:
                if name not in names and self.place[name] <= last:
                    names.add(name)
                    stack.append(name)
        return names

    @cached_property
    def gradient_comms(self) -> tuple[CommOp, ...]:
        """Collectives of parameters' gradients, in program order.

        All they wait for makes weights' gradients, or is such a collective; or what waits for them is the optimizer
        alone, or such collectives alone (a scatter before the sum over replicas). What the optimizer itself makes (the
        norm of all gradients) is none.
        """
        comms: dict[str, CommOp] = {}
        for op in self.iteration.comms:
            makers = [self.ops[dep] for dep in data_deps(op, self.ops)]
            of_weights = makers and all(m.origin.phase is Phase.WEIGHT_GRAD or m.name in comms for m in makers)
            users = [self.ops[name].origin.phase for name in self.followers[op.name]]
            into_optimizer = users and all(phase is Phase.OPTIMIZER for phase in users)
            is_before = makers and all(m.origin.phase is not Phase.OPTIMIZER for m in makers)
            if of_weights or (into_optimizer and is_before):
                comms[op.name] = op
        for op in reversed(self.iteration.comms):
            readers = self.followers[op.name]
            if readers and all(name in comms for name in readers) and op.name not in comms:
                comms[op.name] = op
        return tuple(sorted(comms.values(), key=lambda op: self.place[op.name]))

    @property
    def computations(self) -> tuple[CompOp, ...]:
        """The computations in program order."""
        return self.iteration.computations
