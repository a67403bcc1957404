"""A few random programs on gloo ranks, finds of longer runs, and defects put in, which random programs find.

More of them: benchmarks/fuzz_jobs.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import Ranks, Result
from mutants import MUTANTS
from programs import Program, drawn, program_of, smaller

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(240)]


def plain(family: str, *features: tuple[object, ...], mode: str = "route", num_ranks: int = 2) -> Program:
    return Program(seed=1, num_ranks=num_ranks, mode=mode, family=family, num_steps=7, features=features)


FINDS = {
    "modules that share a parameter group": plain("fsdp2", ("sharded", "together")),
    "a hook on a parameter that is not sharded reads sharded gradients": plain("moe", ("hook", "post")),
    "a model that is pickled and copied": plain("ddp", ("pickle", 3), mode="launched"),
    "a backward pass that leaves a bucket half full": plain(
        "ddp", ("frozen_from", "c", 2), ("ddp", "gradient_as_bucket_view", True), mode="saved"
    ),
    "a backward pass that raises between two gradients": plain(
        "ddp",
        ("ddp", "gradient_as_bucket_view", True),
        ("raise", 5, "post", "RuntimeError", "inside", "resets"),
        mode="saved",
    ),
    "a tuner that is closed in the last step leaves no thread": plain("fsdp2", mode="saved"),
}
"""What the fuzzer found, made small."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_random_programs_of_two_ranks_compute_the_same_bits(pair: Ranks) -> None:
    programs = [drawn(seed, 2, mode=mode) for seed, mode in enumerate(["route"] * 8 + ["saved", "sibling", "observe"])]
    results = [pair.run(program) for program in programs]
    assert [result.line() for result in results if result.is_find] == []
    assert sum(num_used(result) > 0 for result in results) >= 3


def num_used(result: Result) -> int:
    """Calls of a program in which a setting was in force."""
    return sum(watch["used"] for watch in result.stats.values() if isinstance(watch, dict))


@pytest.mark.parametrize("mode", ["route", "saved", "sibling", "online", "launched", "relaunched"])
def test_settings_are_in_force_in_every_way_in_which_programs_are_run(pair: Ranks, mode: str) -> None:
    """A fuzzer that sets nothing finds nothing."""
    result = pair.run(replace(plain("fsdp2", mode=mode), num_steps=24))
    assert not result.is_find, result.line()
    assert num_used(result) > 0, result.stats


@pytest.mark.parametrize("name", FINDS)
def test_what_was_found_stays_mended(pair: Ranks, name: str) -> None:
    result = pair.run(FINDS[name])
    assert not result.is_find, result.line()


ONE_RANKS = ("call", "all_reduce", "float32", 2304, "some", "sum", "now", "after")


@pytest.mark.parametrize(
    ("mutant", "program"),
    [
        ("D1", plain("fsdp2", ("order", "acb"), ("evaluate", 2, "no_grad", "average"))),
        ("D3", plain("ddp", num_ranks=3)),
        ("D4", plain("calls", ("subgroup", 0), ONE_RANKS, ("coalesce", 2))),
    ],
)
def test_defects_that_were_mended_are_found_again(mutant: str, program: Program) -> None:
    with Ranks(program.num_ranks, mutant=mutant) as ranks:
        assert ranks.run(program).kind == "differs"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_to_put_in_is_one_of_todays_sources(name: str) -> None:
    mutant = MUTANTS[name]
    spec = find_spec(mutant.module)
    assert spec is not None
    assert Path(str(spec.origin)).read_text(encoding="utf-8").count(mutant.old) == 1


def test_a_program_is_the_same_on_every_rank_and_after_its_text() -> None:
    for seed in range(50):
        program = drawn(seed, 3)
        assert drawn(seed, 3) == program == program_of(program.text())


def test_smaller_programs_have_less_in_them() -> None:
    program = replace(drawn(3, 2), features=(("adam",), ("clip", 1.0), ("retain",)))
    found = list(smaller(program))
    assert all(len(one.features) < 3 or one.num_steps < program.num_steps for one in found)
    assert {one.features for one in found} >= {(("adam",), ("clip", 1.0)), (("adam",), ("retain",))}
