"""The operators of a step in columns: what one object has is asked once, however many layers share it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.workload import CommOp, Iteration, Op, Work
from lagom_overlap.workload.step.rolled import RolledStep


class Columns:
    """`distinct` are the operators that are different objects, `of` the number of each operator's among them.

    `distinct_works` are works that are not equal, `works` the number of each computation's, -1 for collectives.
    `batches` and `layers` are the micro-batch and the layer of every operator, -1 where there is none.
    """

    def __init__(self, step: Iteration | RolledStep) -> None:
        objects = list(map(id, step.ops))
        distinct = dict(zip(objects, step.ops, strict=True))
        numbers = {one: number for number, one in enumerate(distinct)}
        self.distinct: tuple[Op, ...] = tuple(distinct.values())
        self.of = np.fromiter(map(numbers.__getitem__, objects), np.intp, len(objects))
        works: dict[Work, int] = {}
        numbered = [-1 if isinstance(op, CommOp) else works.setdefault(op.work, len(works)) for op in self.distinct]
        self.distinct_works: tuple[Work, ...] = tuple(works)
        self.works = np.array(numbered, np.intp)[self.of]
        self.batches = np.array(step.batches, np.intp)
        self.layers = np.array(step.layers, np.intp)

    def flags(self, holds: Callable[[Op], bool]) -> NDArray[np.bool_]:
        """Of which operators something holds."""
        return np.array([holds(op) for op in self.distinct], bool)[self.of]

    def values(self, value: Callable[[Op], float]) -> NDArray[np.float64]:
        """A number of every operator."""
        return np.array([value(op) for op in self.distinct], float)[self.of]

    def numbers(self, number: Callable[[Op], int]) -> NDArray[np.intp]:
        """A whole number of every operator."""
        return np.array([number(op) for op in self.distinct], np.intp)[self.of]
