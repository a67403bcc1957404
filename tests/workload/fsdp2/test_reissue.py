"""A step that is built with prefetch lists and one that is issued again with them: two ways through the same hooks."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step import build_step, load_rules


def built(model: str, **settings: Any) -> IssuedStep:
    layout = ParallelLayout(**{"data": 4, "zero_stage": 3, "global_batch": 4, **settings})
    shallow = replace(load_model(model), num_layers=5)
    return build_step(shallow, layout, seq_len=256, rules=load_rules("fsdp2"))


def waits_of(step: Iteration) -> list[tuple[str, set[str]]]:
    """Operators in their order of issue with what they wait for, without the collective before on the communicator.

    A step that is issued again leaves that to the simulation: its gathers may have moved.
    """
    communicator = {op.name: op.communicator for op in step.comms}
    return [
        (op.name, {dep for dep in op.deps if op.name not in communicator or communicator.get(dep) != op.communicator})
        for op in step.ops
    ]


@pytest.mark.parametrize("model", ["llama-3-8b", "phi-2"])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_step_issued_again_with_prefetch_lists_is_the_one_that_is_built_with_them(model: str, prefetch: int) -> None:
    own, told = built(model), built(model, forward_prefetch=prefetch, backward_prefetch=prefetch)
    settings = Fsdp2Settings(
        units=units_of(visits_of(own.iteration)), forward_prefetch=prefetch, backward_prefetch=prefetch
    )
    again = reissued(own.iteration, own.issued, settings)
    assert [op.name for op in again.ops] != [op.name for op in own.issued.ops]
    assert waits_of(again) == waits_of(told.issued)


def drawn(units: tuple[str, ...], seed: int) -> Fsdp2Settings:
    """Settings that keys of a job say: the last units are kept, none or all."""
    random = Random(seed)
    num_kept = random.choice((0, 0, 1, 2, 4, len(units)))
    return Fsdp2Settings(
        units=units,
        forward_prefetch=random.choice((0, 1, 2, 3)),
        backward_prefetch=random.choice((0, 1, 2, 3)),
        kept=units[len(units) - num_kept :],
        reduce_buffers=random.choice((1, 2, 4)),
        separate_reduce_group=random.random() < 0.5,
    )


@pytest.mark.parametrize("model", ["llama-3-8b", "phi-2", "llama-3.2-1b"])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_issued_again_with_settings_is_the_one_that_is_built_with_the_keys_that_say_them(
    model: str, seed: int
) -> None:
    """Llama-3.2-1B's table is tied: the root's, which has no lists and is never freed."""
    own = built(model)
    settings = drawn(units_of(visits_of(own.iteration)), seed)
    told = built(model, **settings.keys())
    again = reissued(own.iteration, own.issued, settings)
    assert waits_of(again) == waits_of(told.issued)
    assert [op.communicator for op in again.comms] == [op.communicator for op in told.issued.comms]


def test_settings_that_no_key_of_a_job_says_are_refused_as_keys() -> None:
    units = ("a", "b", "c")
    assert Fsdp2Settings(units=units, kept=units).keys()["zero_stage"] == 2
    assert Fsdp2Settings(units=units, kept=("b", "c")).keys()["kept_units"] == 2
    for settings in (Fsdp2Settings(units=units, kept=("a",)), Fsdp2Settings(units=units, reduce_in_param_dtype=True)):
        with pytest.raises(JobError, match="a job keeps the last units"):
            settings.keys()
