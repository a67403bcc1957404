"""FSDP2's hooks: what they issue and what the gather streams wait for, worked by hand from PyTorch's source."""

from dataclasses import dataclass, field

import pytest

from lagom_overlap.workload.fsdp2.hooks import GatherHooks, awaited_reduction, prefetched


@dataclass(frozen=True)
class Gathering:
    parameters: str
    is_forward: bool = True


@dataclass
class Issued:
    """Writes down what the hooks have it issue."""

    lines: list[str] = field(default_factory=list)

    def gather(self, gathering: Gathering) -> None:
        self.lines.append(f"gather {gathering.parameters}{'' if gathering.is_forward else '_d'}")

    def wait_for_computations(self, batch: int) -> None:
        self.lines.append(f"wait for all before {batch}")

    def hold_back(self, name: str) -> None:
        self.lines.append(f"wait for {name}")


def enter(hooks: GatherHooks[Gathering], gathering: Gathering) -> None:
    """A module's pre-forward or pre-backward, but for what it prefetches."""
    hooks.unshard(gathering)
    hooks.before_copy_out(gathering)
    hooks.after_copy_out(gathering, f"copy-out of {gathering.parameters}")


def test_two_modules_forward_and_backward_are_issued_as_pytorch_does() -> None:
    """`_fsdp_param_group.py`, 2.13: `_wait_all_gather_streams_on_event` of the copy-out before, of the own in backward.

    In backward b is prefetched by nobody and a by b, behind b's copy-out.
    """
    issued = Issued()
    hooks = GatherHooks(issued)
    hooks.begin_forward(0)
    for name in "ab":
        enter(hooks, Gathering(name))
        hooks.reshard(name)
    assert issued.lines == ["wait for all before 0", "gather a", "gather b", "wait for copy-out of a"]
    issued.lines.clear()
    enter(hooks, Gathering("b", is_forward=False))
    hooks.unshard(Gathering("a", is_forward=False))
    assert issued.lines == ["wait for copy-out of b", "gather b_d", "wait for copy-out of b", "gather a_d"]
    issued.lines.clear()
    enter(hooks, Gathering("a", is_forward=False))
    assert issued.lines == ["wait for copy-out of a"]


def test_what_is_not_resharded_is_not_gathered_again() -> None:
    issued = Issued()
    hooks = GatherHooks(issued)
    hooks.unshard(Gathering("a"))
    hooks.unshard(Gathering("a", is_forward=False))
    assert issued.lines == ["gather a"]
    hooks.reshard("a")
    hooks.unshard(Gathering("a", is_forward=False))
    assert issued.lines == ["gather a", "gather a_d"]


@pytest.mark.parametrize(
    ("place", "count", "is_forward", "expected"),
    [
        (1, 2, True, "cd"),
        (2, 2, True, "d"),
        (3, 1, True, ""),
        (2, 2, False, "ba"),
        (1, 2, False, "a"),
        (0, 1, False, ""),
    ],
)
def test_a_module_prefetches_what_is_needed_next(place: int, count: int, is_forward: bool, expected: str) -> None:
    assert list(prefetched(["a", "b", "c", "d"], place, count, is_forward=is_forward)) == list(expected)
    assert not prefetched(["a", "b", "c", "d"], place, 0, is_forward=is_forward)


def test_a_reduction_waits_for_the_one_whose_buffer_it_takes() -> None:
    """With one buffer for the one before; with two a reduction may still run when the next one's copy-in begins."""
    reductions = ["r0", "r1", "r2"]
    assert [awaited_reduction(reductions, n, 1) for n in range(3)] == [None, "r0", "r1"]
    assert [awaited_reduction(reductions, n, 2) for n in range(3)] == [None, None, "r0"]
