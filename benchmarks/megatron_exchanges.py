"""The order of slots and exchanges of Megatron-Core's pipelines, as it runs them, against `sim.transfers`.

    python benchmarks/megatron_exchanges.py

Needs megatron-core (0.16.1) and PyTorch, no GPU: every stage's schedule is run alone, with forwards and backwards that
compute nothing and a communicator that notes what it is asked for. Ends with 1 if one differs. Without interleaving,
with it, with and without `overlap_p2p_comm`, for larger groups of micro-batches and for those that all fit the warm-up.
"""

import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules

from lagom_overlap.sim.transfers import StageExchange, stage_program
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule

Step = tuple[object, ...]
"""F or B; or an exchange: to the next stage, to the one before, from it, from the next, and whether it waits."""


class _Communicator:
    """Notes exchanges; what is received is empty."""

    def __init__(self, config: SimpleNamespace, rank: int, num_stages: int, steps: list[Step]) -> None:
        self.config, self._steps = config, steps
        self.pp_group = SimpleNamespace(rank=lambda: rank, size=lambda: num_stages)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool, waits: bool = True) -> Any:
        words = (to_next is not None, to_prev is not None, from_prev, from_next)
        if any(words):
            self._steps.append((*words, waits))
        handles = {"send_next": to_next is not None, "recv_prev": from_prev}
        handles |= {"send_prev": to_prev is not None, "recv_next": from_next}
        waiting = {name: SimpleNamespace(wait=lambda: None) for name, is_there in handles.items() if is_there}
        return (torch.empty(0) if from_prev else None), (torch.empty(0) if from_next else None), waiting

    def recv_forward(self, _: Any, is_first: bool) -> Any:
        return self._exchange(None, None, not is_first, False)[0]

    def recv_backward(self, _: Any, is_last_stage: bool) -> Any:
        return self._exchange(None, None, False, not is_last_stage)[1]

    def send_forward(self, output: Any, is_last: bool) -> None:
        self._exchange(None if is_last else output, None, False, False)

    def send_backward(self, gradient: Any, is_first: bool) -> None:
        self._exchange(None, None if is_first else gradient, False, False)

    def send_forward_recv_backward(self, output: Any, _: Any, is_last: bool) -> Any:
        return self._exchange(None if is_last else output, None, False, not is_last)[1]

    def send_backward_recv_forward(self, gradient: Any, _: Any, is_first: bool) -> Any:
        return self._exchange(None, None if is_first else gradient, not is_first, False)[0]

    def send_forward_recv_forward(
        self, output: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        found, _, handles = self._exchange(output, None, recv_prev, False, not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_backward_recv_backward(
        self, gradient: Any = None, recv_next: bool = False, tensor_shape: Any = None, overlap_p2p_comm: bool = False
    ) -> Any:
        _, found, handles = self._exchange(None, gradient, False, recv_next, not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_forward_backward_recv_forward_backward(
        self, output: Any, gradient: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        return self._exchange(output, gradient, recv_prev, recv_next)[:2]


def theirs(layout: ParallelLayout, rank: int) -> list[Step]:
    """A stage's slots and exchanges as Megatron-Core runs them."""
    steps: list[Step] = []
    is_interleaved = layout.schedule is PipelineSchedule.INTERLEAVED
    config: Any = mock.MagicMock()
    config.configure_mock(
        virtual_pipeline_model_parallel_size=layout.chunks if is_interleaved else None,
        microbatch_group_size_per_vp_stage=layout.micro_batch_group or layout.pipeline,
        overlap_p2p_comm=layout.overlap_p2p,
        batch_p2p_comm=not layout.overlap_p2p,
        hidden_size=1,
        **dict.fromkeys(
            ("overlap_p2p_comm_warmup_flush", "overlap_moe_expert_parallel_comm", "sequence_parallel"), False
        ),
        **dict.fromkeys(("deallocate_pipeline_outputs", "variable_seq_lengths", "calculate_per_token_loss"), False),
        **dict.fromkeys(("fine_grained_activation_offloading", "cuda_graph_impl"), False),
        **dict.fromkeys(("timers", "no_sync_func", "grad_sync_func", "param_sync_func"), None),
        **dict.fromkeys(("finalize_model_grads_func", "num_microbatches_with_partial_activation_checkpoints"), None),
    )
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    communicator = _Communicator(config, rank, layout.pipeline, steps)
    groups = SimpleNamespace(tp=one, cp=one, embd=one, pos_embd=one, pp=communicator.pp_group, dp_cp=one)
    chunks = [torch.nn.Linear(1, 1) for _ in range(layout.chunks)]

    def forward(*_: Any, **__: Any) -> Any:
        steps.append(("F",))
        return (torch.empty(0) if is_interleaved else [torch.empty(0)]), 0

    def backward(*_: Any, **__: Any) -> Any:
        steps.append(("B",))
        return torch.empty(0) if is_interleaved else [torch.empty(0)]

    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if is_interleaved
        else schedules.forward_backward_pipelining_without_interleaving
    )
    with mock.patch.multiple(
        schedules,
        forward_step=forward,
        backward_step=backward,
        get_model_config=lambda _: config,
        get_model_type=lambda _: None,
        is_pp_first_stage=lambda group: group.rank() == 0,  # asks of a group are answered 0 where none was made
        is_pp_last_stage=lambda group: group.rank() == group.size() - 1,
        torch=mock.MagicMock(wraps=torch, zeros=lambda *_, **__: torch.empty(0), nn=torch.nn),
    ):
        run(
            forward_step_func=None,
            data_iterator=[None] * layout.chunks if is_interleaved else None,
            model=chunks if is_interleaved else chunks[0],
            num_microbatches=layout.num_micro_batches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    return steps


def ours(layout: ParallelLayout, rank: int) -> list[Step]:
    """The same of the simulation."""
    return [
        _words(step, rank, layout.pipeline) if isinstance(step, StageExchange) else ("F" if step.forward else "B",)
        for step in stage_program(layout, rank)
    ]


def _words(exchange: StageExchange, rank: int, num_stages: int) -> Step:
    ways = {(each.forward, each.chunk % num_stages == rank) for each in exchange.passes}
    order = ((True, True), (False, True), (True, False), (False, False))
    return (*(way in ways for way in order), exchange.waits)


def layouts() -> Iterator[ParallelLayout]:
    """Two to eight stages, one to four chunks."""
    for pipeline, num in product((2, 3, 4, 8), (1, 2, 4, 8, 16)):
        yield ParallelLayout(pipeline=pipeline, global_batch=num)
        for chunks, overlaps in product((2, 3, 4), (False, True)):
            for group in {0, pipeline + 1, 2 * pipeline, num}:
                if (
                    num % pipeline
                    or not (group == 0 or pipeline <= group <= num)
                    or (group and 0 < num % group < pipeline)
                ):
                    continue
                yield ParallelLayout(
                    pipeline=pipeline,
                    global_batch=num,
                    schedule=PipelineSchedule.INTERLEAVED,
                    chunks=chunks,
                    micro_batch_group=group,
                    overlap_p2p=overlaps,
                )


def main() -> int:
    """Prints which stages differ, and how many were compared."""
    num = num_different = 0
    for layout in layouts():
        for rank in range(layout.pipeline):
            num += 1
            mine, own = ours(layout, rank), theirs(layout, rank)
            if mine != own:
                num_different += 1
                place = next((at for at, pair in enumerate(zip(mine, own, strict=False)) if pair[0] != pair[1]), -1)
                shown = (layout.pipeline, layout.num_micro_batches, layout.chunks, layout.micro_batch_group)
                words = f"stage {rank} of {shown}, goes on {layout.overlap_p2p}: step {place}"
                print(f"{words}: {mine[place : place + 3]}, not {own[place : place + 3]}")
    print(f"{num} stages compared, {num_different} differ")
    return 1 if num_different or not num else 0


if __name__ == "__main__":
    sys.exit(main())
