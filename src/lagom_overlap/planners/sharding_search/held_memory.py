"""What a rank holds at each moment of a sharded step: parameters, optimizer state, tensors from maker to last reader.

A moment is the place of a call in the program. Tensors are held in the layout in which they are made, copies in other
layouts from their first to their last reader; a view holds the tensor behind it.
"""

from collections import defaultdict
from collections.abc import Sequence

from lagom_overlap.planners.sharding_search.mesh_layouts import local_bytes
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem, made_layouts, needed
from lagom_overlap.workload.tensor_program import Value, ValueKind

_NUM_LIKELY = 4
"""Moments that are bounded from the start: the largest ones without any sharding."""


class TensorLifetimes:
    """First and last moment of every tensor of a problem, and of its copies in each part of the step."""

    def __init__(self, problem: ShardingProblem) -> None:
        self._problem = problem
        program, views = problem.program, problem.views
        self._place = {call.name: number for number, call in enumerate(program.calls)}
        self._span: dict[str, list[int]] = {}
        last = len(program.calls)
        for number, call in enumerate(program.calls):
            for operand in call.inputs:
                self._touch(views.chain(operand.value)[0], number)
            for operand in call.outputs:
                self._touch(views.chain(operand.value)[0], number)
        for name in program.results:
            self._touch(views.chain(name)[0], last)
        self._values: dict[str, Value] = {
            name: value
            for name, value in program.values.items()
            if name in self._span and value.kind is not ValueKind.PARAMETER and value.base is None
        }
        self._parameters = [name for name, v in program.values.items() if v.kind is ValueKind.PARAMETER]
        self._copies = self._copy_spans()

    def _touch(self, value: str, moment: int) -> None:
        span = self._span.setdefault(value, [moment, moment])
        span[1] = max(span[1], moment)

    def _copy_spans(self) -> dict[tuple[str, object], list[int]]:
        spans: dict[tuple[str, object], list[int]] = {}
        for node in self._problem.nodes:
            for call in node.calls:
                number = self._place[call.name]
                for operand in call.inputs:
                    need = self._problem.views.need(call, operand, self._problem.mesh.whole)
                    if need is not None:
                        span = spans.setdefault((need.value, need.part), [number, number])
                        span[1] = max(span[1], number)
        return spans

    def held(self, moment: int) -> list[str]:
        """Tensors held at a moment as they are made, parameters included; inputs of the step are not counted."""
        sizes = [
            name
            for name, value in self._values.items()
            if value.kind is ValueKind.MADE and self._span[name][0] <= moment <= self._span[name][1]
        ]
        return self._parameters + sizes

    def copies_held(self, moment: int) -> list[tuple[str, object]]:
        """Tensors, each with a part of the step, whose copies in other layouts are held at a moment."""
        return [key for key, (first, last) in self._copies.items() if first <= moment <= last]

    def likely_peaks(self) -> list[int]:
        """Moments at which much is held if nothing is cut, apart from one another, and the end."""
        change: dict[int, int] = defaultdict(int)
        for name, value in self._values.items():
            first, last = self._span[name]
            change[first] += value.num_bytes
            change[last + 1] -= value.num_bytes
        total, profile = 0, []
        for moment in range(len(self._problem.program.calls)):
            total += change[moment]
            profile.append((total, moment))
        best = sorted(profile, reverse=True)[:_NUM_LIKELY]
        return sorted({moment for _, moment in best} | {len(self._problem.program.calls) - 1})

    def peak(self, choice: Sequence[int]) -> tuple[int, int]:
        """The most that is held under a combination, and when."""
        problem = self._problem
        program, mesh = problem.program, problem.mesh
        options = [node.options[number] for node, number in zip(problem.nodes, choice, strict=True)]
        layouts = made_layouts(options)
        change: dict[int, int] = defaultdict(int)
        for name, value in self._values.items():
            if value.kind is ValueKind.MADE:
                first, last = self._span[name]
                change[first] += local_bytes(value, layouts[name], mesh)
                change[last + 1] -= local_bytes(value, layouts[name], mesh)
        for need in needed(options):
            span = self._copies.get((need.value, need.part))
            if span is not None and need.layout != layouts[need.value]:
                num_bytes = local_bytes(program.values[need.value], need.layout, mesh)
                change[span[0]] += num_bytes
                change[span[1] + 1] -= num_bytes
        total = sum(option.resident_bytes for option in options)
        total += sum(local_bytes(program.values[name], layouts[name], mesh) for name in self._parameters)
        most, at = 0, 0
        for moment in range(len(program.calls)):
            total += change[moment]
            if total > most:
                most, at = total, moment
        return most, at
