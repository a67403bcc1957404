"""Which part of the model a pipeline stage holds: its layers, the embedding on the first, the head on the last."""

from dataclasses import dataclass
from itertools import pairwise

from lagom_overlap.workload.layer_kinds import LayerKind
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import ParallelLayout
from lagom_overlap.workload.parallel.pipeline_layout import parse_pipeline_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A pipeline stage: its layers, whether it ends with the head, its parameters.

    `num_layers` are those of all its chunks; `chunks` are the layers of each, multi-token prediction's behind the
    model's own; `num_predictions` are those that it has. `num_params` and `num_expert_params` are per GPU; the latter
    are part of the former and are reduced over data / expert ranks only.
    """

    rank: int
    num_layers: int
    chunks: tuple[range, ...]
    has_head: bool
    num_predictions: int
    num_params: int
    num_expert_params: int

    def shard_params(self, layout: ParallelLayout) -> int:
        """Parameters per GPU when they are sharded: dense ones over a layout's `shard`, experts over data / expert."""
        dense = self.num_params - self.num_expert_params
        sharers = layout.expert_ranks // layout.replicate
        return dense // layout.shard + self.num_expert_params * layout.expert // sharers


def chunk_layers(model: TransformerModel, layout: ParallelLayout) -> tuple[range, ...]:
    """The layers of every model chunk, of a layout that `check_model` has accepted; one has those of predictions."""
    end = model.num_layers + model.mtp_layers * len(model.mtp_kinds)
    last = layout.mtp_chunk  # chunks behind it have no layers
    if layout.pipeline_layout:
        sizes = parse_pipeline_layout(layout.pipeline_layout).layers
        starts = [sum(sizes[:place]) for place in range(layout.num_chunks)]
    else:
        fewer = 1 if layout.tables_as_layers else 0
        each = (model.num_layers + 2 * fewer) // layout.num_chunks
        starts = [max(0, place * each - fewer) for place in range(layout.num_chunks)]
    before = [range(first, behind) for first, behind in pairwise(starts[: last + 1])]
    return (*before, range(starts[last], end), *(range(end, end) for _ in starts[last + 1 :]))


def layer_params_per_gpu(model: TransformerModel, layout: ParallelLayout, kind: LayerKind) -> int:
    """Parameters of one layer on one GPU: matrices cut by tensor parallelism, experts by expert parallelism too."""
    params = model.params_of(kind)
    return expert_params_per_gpu(model, layout, kind) + params.cut // layout.tensor + params.whole + params.small


def expert_params_per_gpu(model: TransformerModel, layout: ParallelLayout, kind: LayerKind) -> int:
    """Parameters of one layer's experts on one GPU."""
    params = model.params_of(kind)
    return (params.experts + params.expert_small) // (layout.expert_tensor * layout.expert)


def mtp_params_per_gpu(model: TransformerModel, layout: ParallelLayout) -> int:
    """Parameters around the layers of one multi-token prediction on one GPU: its projection and its norms."""
    return 2 * model.hidden * model.hidden // layout.tensor + 3 * model.norm_params


def plan_stages(model: TransformerModel, layout: ParallelLayout) -> tuple[StagePlan, ...]:
    """The stages of a layout that `check_model` has accepted."""
    chunks = chunk_layers(model, layout)
    sizes = {kind: layer_params_per_gpu(model, layout, kind) for kind in {*model.layer_kinds, *model.mtp_kinds}}
    experts = {kind: expert_params_per_gpu(model, layout, kind) for kind in sizes}
    table = model.vocab * model.hidden // layout.tensor
    stages = []
    for rank in range(layout.pipeline):
        first, last = rank == 0, rank == layout.pipeline - 1
        own_chunks = chunks[rank :: layout.pipeline]
        own_end = model.num_layers + model.num_mtp_held * len(model.mtp_kinds)
        kinds = [model.kind_of(layer) for layers in own_chunks for layer in layers if layer < own_end]
        params = sum(sizes[kind] for kind in kinds)
        predicts = model.mtp_layers > 0 and rank == layout.mtp_chunk % layout.pipeline
        if predicts:
            params += model.num_mtp_held * mtp_params_per_gpu(model, layout)
            params += 0 if first or model.tied_embeddings else table
        params += (table + model.learned_positions * model.hidden) * first
        params += (0 if model.tied_embeddings and first else table) * last
        stages.append(
            StagePlan(
                rank=rank,
                num_layers=sum(len(layers) for layers in own_chunks),
                chunks=own_chunks,
                has_head=last,
                num_predictions=model.mtp_layers if predicts else 0,
                num_params=params,
                num_expert_params=sum(experts[kind] for kind in kinds),
            )
        )
    return tuple(stages)
