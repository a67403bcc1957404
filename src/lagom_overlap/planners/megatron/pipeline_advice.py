"""What interleaving, the overlap of transfers and more micro-batches are predicted to bring a pipeline.

From the seconds of one forward, one backward and one transfer of a stage; the rules are `pipeline`'s. The optimizer and
uneven stages are left out: they are the same with and without each switch; gradients count where micro-batches are
launched together (`pipeline_group`).
"""

from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.planners.megatron.pipeline import MICRO_BATCHES_PER_STAGE, SlotSeconds, bubble_share, pipeline_s
from lagom_overlap.planners.megatron.pipeline_group import NO_COMMS, ChunkComms, launched_together, least_launched
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule

GROUP_SWITCH: Final = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAdvice:
    """A switch, the pipeline's time (s) without and with it; `virtual_layers` are a chunk's, if it is interleaving.

    `group` micro-batches launched together are a switch for the interleaving with `virtual_layers`.
    """

    switch: str
    without_s: float
    with_s: float
    virtual_layers: int | None = None
    group: int | None = None

    @property
    def gain(self) -> float:
        """How much longer the pipeline is without it, relative to the pipeline with it."""
        return self.without_s / self.with_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCheck:
    """The share of the pipeline's time that transfers add, its bubble over busy time, and the notes' rule m >= 4 p."""

    transfer_share: float
    bubble: float
    num_micro_batches: int
    wanted_micro_batches: int

    @property
    def is_enough(self) -> bool:
        """Whether there are as many micro-batches as the notes ask for."""
        return self.num_micro_batches >= self.wanted_micro_batches


def pipeline_advice(
    layout: ParallelLayout, seconds: SlotSeconds, layers_per_stage: int, comms: ChunkComms = NO_COMMS
) -> tuple[PipelineAdvice, ...]:
    """The effect of each switch on a pipeline; `seconds` and `comms` are of a whole stage, whatever its chunks."""
    found = []
    for chunks in _chunk_counts(layout, layers_per_stage):
        interleaved = replace(layout, schedule=PipelineSchedule.INTERLEAVED, chunks=chunks, overlap_p2p=False)
        parts = _per_chunk(seconds, chunks)
        plain = replace(layout, schedule=PipelineSchedule.ONE_F_ONE_B, chunks=1, overlap_p2p=False)
        without_s = pipeline_s(plain, seconds, overlap_p2p=False)
        overlapped_s = pipeline_s(interleaved, parts, overlap_p2p=True)
        waited_s = pipeline_s(interleaved, parts, overlap_p2p=False)
        per_chunk = layers_per_stage // chunks
        switch = f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
        advice = PipelineAdvice(switch=switch, without_s=without_s, with_s=overlapped_s, virtual_layers=per_chunk)
        found.append(advice)
        transfers = f"overlapped transfers (default; not --no-overlap-p2p-communication), {per_chunk} layers a chunk"
        found.append(PipelineAdvice(switch=transfers, without_s=waited_s, with_s=overlapped_s))
        each = ChunkComms(gather_s=comms.gather_s / chunks, reduce_s=comms.reduce_s / chunks)
        tried = launched_together(interleaved, parts, each)
        least = least_launched(tried)
        if least.group > layout.pipeline:
            held = f"the first stage holds {least.held} chunks' activations for {tried[0].held}"
            found.append(
                PipelineAdvice(
                    switch=f"{GROUP_SWITCH} {least.group}, {per_chunk} layers a chunk ({held})",
                    without_s=tried[0].iteration_s,
                    with_s=least.iteration_s,
                    virtual_layers=per_chunk,
                    group=least.group,
                )
            )
    return tuple(found)


def check_micro_batches(layout: ParallelLayout, seconds: SlotSeconds) -> PipelineCheck:
    """The layout as it is against the notes' rule; `seconds` are of a whole stage."""
    parts = _per_chunk(seconds, layout.chunks)
    free = replace(parts, transfer_s=0.0)
    with_s = pipeline_s(layout, parts, overlap_p2p=layout.overlap_p2p)
    without_s = pipeline_s(layout, free, overlap_p2p=layout.overlap_p2p)
    return PipelineCheck(
        transfer_share=1.0 - without_s / with_s,
        bubble=bubble_share(layout.pipeline, layout.num_micro_batches, layout.chunks),
        num_micro_batches=layout.num_micro_batches,
        wanted_micro_batches=MICRO_BATCHES_PER_STAGE * layout.pipeline,
    )


def _per_chunk(seconds: SlotSeconds, chunks: int) -> SlotSeconds:
    """A chunk computes its share of the stage and sends as much."""
    return replace(seconds, forward_s=seconds.forward_s / chunks, backward_s=seconds.backward_s / chunks)


def _chunk_counts(layout: ParallelLayout, layers_per_stage: int) -> list[int]:
    """Two chunks a stage, and as many as there are layers; none where Megatron's schedule does not fit."""
    if layout.pipeline < 2 or layout.num_micro_batches % layout.pipeline:
        return []
    return sorted({count for count in (2, layers_per_stage) if count > 1 and layers_per_stage % count == 0})
