"""A step that is built with prefetch lists and one that is issued again with them: two ways through the same hooks."""

from dataclasses import replace

import pytest

from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step import build_step, load_rules


def built(model: str, prefetch: int | None) -> IssuedStep:
    layout = ParallelLayout(data=4, zero_stage=3, global_batch=4)
    shallow = replace(load_model(model), num_layers=5)
    return build_step(shallow, layout, seq_len=256, rules=load_rules("fsdp2"), explicit_prefetch=prefetch)


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
    own, told = built(model, None), built(model, prefetch)
    settings = Fsdp2Settings(
        units=units_of(visits_of(own.iteration)), forward_prefetch=prefetch, backward_prefetch=prefetch
    )
    again = reissued(own.iteration, own.issued, settings)
    assert [op.name for op in again.ops] != [op.name for op in own.issued.ops]
    assert waits_of(again) == waits_of(told.issued)
