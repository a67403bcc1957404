"""What a Triton kernel of Inductor's moves, read off its source and the tensors that it is launched with.

Each place of a tensor that is loaded or stored counts once: no more of it than there are points along the axes in each
expression that addresses it (a part of a large buffer, rows of a table, a scale for each row), and no more than the
tensor has elements (what is broadcast). A value that a reduction loads again in a later loop, or stored in an earlier
one, comes from the L2 cache as long as the rows that all SMs work on at once fit there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Self

_FUNCTION: Final = re.compile(r"^def \w+\((?P<parameters>[^)]*)\)", re.MULTILINE)
_SIZE: Final = re.compile(r"^\s+(?P<name>[xyz]numel|r\d+_numel) = (?P<size>\d+)\s*$", re.MULTILINE)
_SIZE_NAME: Final = re.compile(r"[xyz]numel|r\d+_numel")
_ACCESS: Final = re.compile(r"\bfor \w+ in |\btl\.(?P<what>load|store|atomic_\w+)\(")
_POINTER: Final = re.compile(r"\b\w*ptr\d*\b")
_AXIS: Final = re.compile(r"\b(?:(?P<outer>[xyz])\d+|(?P<inner>r\d+_)\d+)\b")
_LOADED: Final = re.compile(r"\btmp\d+")


@dataclass(frozen=True, slots=True)
class Residency:
    """Rows that a GPU's SMs reduce at once, and the bytes of its L2 cache."""

    num_rows: int
    l2_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A kernel's parameters and accesses.

    `sizes` are those of its index space that the source states; None where it states several (kernels put together).
    `loads` and `stores` are expressions by pointer, with the number of the loop that they are in. `outputs` are stored
    and not loaded, at places that do not follow from what was loaded (rows of a table that keeps others). `turns`: it
    works on tiles, as Inductor makes it where tensors lie in different orders.
    """

    parameters: tuple[str, ...]
    sizes: dict[str, int] | None
    loads: dict[str, tuple[tuple[int, str], ...]]
    stores: dict[str, tuple[tuple[int, str], ...]]
    outputs: tuple[str, ...]
    turns: bool

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The kernel in a module's text; None where there is none."""
        function = _FUNCTION.search(text)
        if function is None:
            return None
        parameters = tuple(each.partition(":")[0].strip() for each in function["parameters"].split(","))
        body = text[function.end() :]
        found = {(each["name"], int(each["size"])) for each in _SIZE.finditer(body)}
        sizes = dict(found) if len(dict(found)) == len(found) else None
        loads: dict[str, list[tuple[int, str]]] = {}
        stores: dict[str, list[tuple[int, str]]] = {}
        loop = 0
        for access in _ACCESS.finditer(body):
            if access["what"] is None:
                loop += 1
                continue
            where = _first_argument(body, access.end())
            pointer = _POINTER.search(where)
            if pointer is None or pointer[0] not in parameters:
                continue
            if access["what"] != "store":
                loads.setdefault(pointer[0], []).append((loop, where))
            if access["what"] != "load":
                stores.setdefault(pointer[0], []).append((loop, where))
        return cls(
            parameters=parameters,
            sizes=sizes,
            loads={name: tuple(each) for name, each in loads.items()},
            stores={name: tuple(each) for name, each in stores.items()},
            outputs=tuple([name for name in stores if name not in loads and _are_plain(stores[name])]),
            turns="ynumel" in parameters
            and not any(_SIZE_NAME.fullmatch(each) and each[0] == "r" for each in parameters),
        )

    def bytes_moved(self, args: Sequence[Any], residency: Residency | None = None) -> int:
        """Bytes of a launch with these arguments; where nothing is said of a GPU, rows fit into its cache."""
        given = dict(zip(self.parameters, args, strict=False))
        sizes = self._sizes(given)
        streams = sizes is not None and residency is not None and self._streams(given, sizes, residency)
        total = 0
        for name in self.loads.keys() | self.stores.keys():
            tensor = given.get(name)
            if tensor is None or not hasattr(tensor, "numel"):
                continue
            held, width = int(tensor.numel()), int(tensor.element_size())
            loads, stores = self.loads.get(name, ()), self.stores.get(name, ())
            if not streams:
                loads = tuple([load for load in loads if not _is_own(load, stores)])
            for expressions in (*_by_loop(loads, apart=streams), frozenset(where for _, where in stores)):
                if expressions:
                    total += width * min(held, sum(_points(where, sizes, held) for where in expressions))
        return total

    def overwritten(self, args: Sequence[Any]) -> list[Any]:
        """The tensors that a launch with these arguments writes and does not read, by this or by another pointer."""
        given = {name: each for name, each in zip(self.parameters, args, strict=False) if hasattr(each, "data_ptr")}
        read = {given[name].data_ptr() for name in self.loads if name in given}
        return [given[name] for name in self.outputs if name in given and given[name].data_ptr() not in read]

    def _sizes(self, given: dict[str, Any]) -> dict[str, int] | None:
        if self.sizes is None:
            return None
        told = {name: each for name, each in given.items() if _SIZE_NAME.fullmatch(name) and isinstance(each, int)}
        return told | self.sizes

    def _streams(self, given: dict[str, Any], sizes: dict[str, int], residency: Residency) -> bool:
        """Whether rows that are loaded again have left the cache by then."""
        row = prod(size for name, size in sizes.items() if name[0] == "r")
        again = [name for name, loads in self.loads.items() if self._is_read_again(name, loads)]
        widths = sum(int(given[name].element_size()) for name in again if hasattr(given.get(name), "element_size"))
        num_rows = min(residency.num_rows, prod(size for name, size in sizes.items() if name[0] != "r"))
        return num_rows * row * widths > residency.l2_bytes

    def _is_read_again(self, name: str, loads: Sequence[tuple[int, str]]) -> bool:
        stores = self.stores.get(name, ())
        return len({loop for loop, _ in loads}) > 1 or any(_is_own(load, stores) for load in loads)


def _is_own(load: tuple[int, str], stores: Sequence[tuple[int, str]]) -> bool:
    """Whether an earlier loop stored what is loaded."""
    return any(where == load[1] and loop < load[0] for loop, where in stores)


def _are_plain(stores: Sequence[tuple[int, str]]) -> bool:
    return not any(_LOADED.search(where) for _, where in stores)


def _points(where: str, sizes: dict[str, int] | None, held: int) -> int:
    """Places that an expression can address: along its axes, or along all where it follows what was loaded."""
    if sizes is None:
        return held
    axes = {f"{each['outer'] or each['inner']}numel" for each in _AXIS.finditer(where)}
    if _LOADED.search(where) or not axes <= sizes.keys():
        return prod(sizes.values())
    return prod(sizes[axis] for axis in axes)


def _by_loop(loads: Sequence[tuple[int, str]], *, apart: bool) -> list[frozenset[str]]:
    """Expressions that are loaded; `apart`: anew by each loop."""
    if not apart:
        return [frozenset(where for _, where in loads)]
    return [frozenset(where for loop, where in loads if loop == number) for number in {loop for loop, _ in loads}]


def _first_argument(text: str, begin: int) -> str:
    """What stands from here up to the comma or bracket that ends it."""
    depth = 0
    for at in range(begin, len(text)):
        if text[at] in "([":
            depth += 1
        elif text[at] in ")]":
            if not depth:
                return text[begin:at]
            depth -= 1
        elif text[at] == "," and not depth:
            return text[begin:at]
    return text[begin:]
