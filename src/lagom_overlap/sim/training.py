"""A training iteration of a model under a layout on a cluster: stages, schedule, data parallelism, optimizer.

One rank per distinct role is simulated: the stages of one pipeline. Tensor-parallel ranks run in step, data-parallel
ones are equal. Within a stage a pass is the sum of its kernels and of the collectives its stream waits for;
asynchronous collectives run beside kernels at the rates of the contention model. Stages are then run against each
other slot by slot (`sim.pipeline`). Gradients are reduced after the last backward, or in buckets beside it; with
ZeRO 2 and 3 beside every backward, and with 3 the parameters are gathered beside both passes (`sim.streams`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.contention import l2_miss_share
from lagom_overlap.cost.operators import FrameworkConstants, GroupLinks, GroupTerms, OperatorConstants, OperatorTimes
from lagom_overlap.cost.operators.passes import CommTimes, PassTimes, pass_times
from lagom_overlap.cost.persistent import as_persistent
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Cluster
from lagom_overlap.sim.pipeline import SlotRun, SlotTimes, run_pipeline
from lagom_overlap.sim.streams import Fixed, QueuedComm, run_streams
from lagom_overlap.workload import Gemm, Kernel
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import (
    BatchedGemm,
    CommStep,
    ComputeStep,
    GroupKind,
    ParallelLayout,
    Pass,
    Recompute,
    StagePlan,
    layer_passes,
    plan_stages,
    stage_slots,
)
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES, layer_params_per_gpu, reduced_layer_params
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE
from lagom_overlap.workload.parallel.stage import embedding_passes, head_passes

SLICE_BYTES = 1 << 20
"""A slice of NCCL's Simple protocol; the FIFO that collectives keep in the L2 is channels x 4 of them."""
TOUCHES_USER, TOUCHES_FIFO = 1.0, 2.0
SHARDED_GRADIENTS = 2
"""ZeRO stage from which gradients are reduced beside every backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's iteration in seconds.

    `end_s` is when its last backward ends, `busy_s` what its slots take in all; what is left is the pipeline's bubble.
    `gradients_s` and `optimizer_s` follow the last backward.
    """

    rank: int
    busy_s: float
    end_s: float
    compute_s: float
    host_s: float
    comms: dict[GroupKind, CommTimes]
    gradients_s: float
    optimizer_s: float

    @property
    def bubble_s(self) -> float:
        """Waiting for other stages before the last backward."""
        return max(0.0, self.end_s - self.busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """One iteration: its time, what each stage does with it, and the slots in order."""

    iteration_s: float
    stages: tuple[StageTimes, ...]
    runs: tuple[tuple[SlotRun, ...], ...]
    model_flops: float

    def mfu(self, num_gpus: int, peak_flops: float) -> float:
        """Model FLOPs per second over the GPUs' peak; recomputation does not count."""
        return self.model_flops / (self.iteration_s * num_gpus * peak_flops)


@dataclass(frozen=True, slots=True)
class _ChunkTimes:
    """Forward and backward of one chunk of one stage."""

    forward: PassTimes
    backward: PassTimes


def model_flops(model: TransformerModel, global_batch: int, seq_len: int) -> float:
    """FLOPs of one iteration without recomputation: 6 per matrix parameter and token, 12 s per attention column.

    For a GPT this is Narayanan et al. (arXiv 2104.04473, Eq. 3) with a factor 72 instead of 96; attention counts in
    full, causal or not.
    """
    tokens = global_batch * seq_len
    matrices = model.num_layers * model.active_layer_params + model.vocab * model.hidden
    return tokens * (6.0 * matrices + 12.0 * model.num_layers * seq_len * model.attention_columns)


class TrainingSimulator:
    """Prices one layout; `times` gives the iteration."""

    def __init__(
        self,
        model: TransformerModel,
        layout: ParallelLayout,
        *,
        seq_len: int,
        cluster: Cluster,
        operators: OperatorConstants,
        framework: FrameworkConstants,
        profile: Profile,
        sm_carveout: int | None = None,
    ) -> None:
        self._model, self._layout, self._seq_len = model, layout, seq_len
        self._shards_gradients = layout.zero_stage >= SHARDED_GRADIENTS and layout.data > 1
        self._framework, self._profile = framework, profile
        self._times = OperatorTimes(cluster.gpu, operators, framework.memory_efficiency)
        self._links = GroupLinks(cluster, layout, operators.links)
        self._contention = ContentionModel(cluster, profile, sm_carveout)
        self._cluster = cluster

    # Prices.

    def _kernel(self, step: ComputeStep) -> Kernel:
        """A step as the contention model sees it; with a carve-out, products are persistent kernels."""
        kernel, carved = self._times.step_kernel(step, self._profile), self._contention.persistent_carve_out_sms
        if carved is None or not isinstance(step.work, Gemm | BatchedGemm):
            return kernel
        return as_persistent(kernel, self._cluster.gpu.num_sms, carved)

    def _seconds(self, step: ComputeStep) -> float:
        """A step alone."""
        if self._contention.persistent_carve_out_sms is None:
            return self._times.step_seconds(step)
        return self._contention.kernel_seconds(self._kernel(step))

    def _cost(self, kind: CollectiveKind, num_bytes: float, group: GroupKind) -> CollectiveCost:
        """A collective of a group as the contention model sees it."""
        gpu, one_node = self._cluster.gpu, self._links.shape(group).num_nodes == 1
        terms = self._terms(kind, num_bytes, group)
        link = self._cluster.intra if one_node else self._cluster.inter
        fifo_bytes = terms.num_channels * 4.0 * SLICE_BYTES
        miss = 0.0 if link.host_fifo else l2_miss_share(fifo_bytes, gpu.l2_bytes, self._profile.l2_share)
        return CollectiveCost(
            num_channels=terms.num_channels,
            wire_bytes=terms.wire_bytes,
            chunk_bytes=2.0 * SLICE_BYTES,
            num_slices=2,
            slice_s=0.0,
            exposed_hop_s=0.0,
            channel_bytes_per_s=self._profile.for_gpu(gpu.name).channel_bytes_per_s,
            link=link.kind,
            link_bytes_per_s=terms.bytes_per_s,
            base_s=terms.latency_s,
            steps_s=0.0,
            hops_s=0.0,
            fill_bytes=0.0,
            fifo_bytes=fifo_bytes,
            touches=TOUCHES_USER + TOUCHES_FIFO * miss,
            link_sharpness=self._profile.link_sharpness,
            load_sensitivity=self._profile.load_sensitivity,
        )

    def _terms(self, kind: CollectiveKind, num_bytes: float, group: GroupKind) -> GroupTerms:
        """A collective over a group; the framework may limit what data parallelism reaches between nodes."""
        terms = self._links.terms(kind, max(1, ceil(num_bytes)), group)
        limit = self._framework.data_bytes_per_s
        if group is not GroupKind.DATA or not limit or self._links.shape(group).num_nodes == 1:
            return terms
        return replace(terms, bytes_per_s=min(terms.bytes_per_s, limit))

    def _data_seconds(self, kind: CollectiveKind, num_bytes: float) -> float:
        if self._layout.data == 1 or not num_bytes:
            return 0.0
        return self._terms(kind, num_bytes, GroupKind.DATA).seconds

    def _beside(self, comm: CommStep, kernels: tuple[ComputeStep, ...]) -> CommTimes:
        pieces = [self._kernel(step) for step in kernels]
        cost = self._cost(comm.kind, comm.num_bytes, comm.group)
        run = run_streams(pieces, [QueuedComm(cost, 0)], self._contention)
        return CommTimes(run.comm_s, run.exposed_s, run.stretched_s)

    def _pass(self, one: Pass) -> PassTimes:
        framework = self._framework
        return pass_times(
            one,
            self._seconds,
            self._links,
            self._beside,
            launch_s=framework.launch_s,
            launch_norm=framework.launch_norm,
        )

    def _chunks(self, stage: StagePlan) -> list[_ChunkTimes]:
        """Every chunk of a stage, sending included."""
        layout = self._layout
        forward, backward = self._sharded_layers(stage) if self._shards_gradients else self._layers(stage)
        chunks = []
        last = layout.num_chunks - 1
        for chunk in range(layout.chunks):
            place = chunk * layout.pipeline + stage.rank
            ahead, back = forward, backward
            if place == 0:
                first, first_back = embedding_passes(self._model, layout, self._seq_len)
                ahead, back = ahead + self._pass(first), back + self._pass(first_back)
            if place == last:
                head, head_back = head_passes(self._model, layout, self._seq_len)
                ahead, back = ahead + self._pass(head), back + self._pass(head_back)
            if place in (0, last) and self._shards_gradients:
                gathers, reduces = self._sharded_tables(stage)
                ahead, back = ahead + gathers, back + gathers + reduces
            if layout.pipeline > 1:
                ahead = ahead + self._send(place < last)
                back = back + self._send(place > 0)
            chunks.append(_ChunkTimes(ahead, back))
        return chunks

    def _layers(self, stage: StagePlan) -> tuple[PassTimes, PassTimes]:
        """Forward and backward of a chunk's layers."""
        layer = layer_passes(self._model, self._layout, self._seq_len)
        forward = self._pass(layer.forward)
        again = forward if self._layout.recompute is Recompute.FULL else self._pass(layer.recompute)
        backward = again + self._pass(layer.backward)
        return forward * stage.layers_per_chunk, backward * stage.layers_per_chunk

    def _send(self, sends: bool) -> PassTimes:
        if not sends:
            return PassTimes()
        seconds = self._transfer_s()
        exposed_s = 0.0 if self._layout.overlap_p2p else seconds
        return PassTimes(comms={GroupKind.PIPELINE: CommTimes(seconds, exposed_s)})

    def _transfer_s(self) -> float:
        """One stage's activations, or their gradients, to its neighbour."""
        layout = self._layout
        num_bytes = layout.micro_batch * self._seq_len * self._model.hidden * ELEMENT_BYTES
        if layout.sequence_parallel or layout.scatter_gather:
            num_bytes //= layout.tensor
        return self._links.seconds(CollectiveKind.SEND_RECV, num_bytes, GroupKind.PIPELINE)

    # After and beside the last backward.

    def _gradients(self, stage: StagePlan) -> CommTimes:
        """Reducing the gradients of a stage after its last backward, and gathering what the optimizer wrote."""
        layout = self._layout
        reduce = CollectiveKind.REDUCE_SCATTER if layout.zero_stage else CollectiveKind.ALL_REDUCE
        seconds = self._data_seconds(reduce, stage.reduced_params(layout) * layout.gradient_bytes)
        return CommTimes(seconds, seconds)

    def _bucketed(self, stage: StagePlan, last: PassTimes) -> CommTimes:
        """The same in buckets beside the stage's last backward: what it lengthens the iteration by."""
        layout = self._layout
        kind = CollectiveKind.REDUCE_SCATTER if layout.zero_stage else CollectiveKind.ALL_REDUCE
        layer = layer_passes(self._model, layout, self._seq_len)
        steps = (*layer.recompute.kernels, *layer.backward.kernels)
        pieces: list[Kernel | Fixed] = []
        per_layer = [self._kernel(step) for step in steps]
        alone_s = sum(self._seconds(step) for step in steps)
        extra = Fixed(max(0.0, last.seconds / stage.num_layers - alone_s))
        comms, filled = [], 0.0
        reduced = stage.reduced_params(layout) * layout.gradient_bytes
        layer_bytes = reduced * stage.layer_share / stage.num_layers
        for _ in range(stage.num_layers):
            pieces += [*per_layer, extra]
            filled += layer_bytes
            if filled >= layout.bucket_bytes:
                comms.append(QueuedComm(self._cost(kind, filled, GroupKind.DATA), len(pieces)))
                filled = 0.0
        rest = filled + reduced * (1.0 - stage.layer_share)
        if rest > 0:
            comms.append(QueuedComm(self._cost(kind, rest, GroupKind.DATA), len(pieces)))
        run = run_streams(pieces, comms, self._contention)
        return CommTimes(run.comm_s, run.makespan_s - run.comp_end_s, run.stretched_s)

    def _after(self, stage: StagePlan) -> tuple[float, float]:
        """Seconds after the reduction: tied embeddings and parameters to gather, optimizer."""
        layout, framework = self._layout, self._framework
        shard = stage.shard_params(layout) if layout.zero_stage else stage.num_params
        rate = self._times.constants.stream_bytes_per_s
        optimizer_s = shard * (framework.optimizer_bytes + framework.gradient_pass_bytes) / rate
        gather_s = 0.0
        if layout.zero_stage in (1, 2):
            gather_s = self._data_seconds(CollectiveKind.ALL_GATHER, stage.reduced_params(layout) * ELEMENT_BYTES)
        tied_s = 0.0
        if stage.tied_params:
            wire = stage.tied_params * layout.gradient_bytes
            tied_s = wire / self._links.bytes_per_s(GroupKind.PIPELINE)
        return gather_s + tied_s, optimizer_s

    # ZeRO 2 and 3: every micro-batch with sharded gradients and parameters.

    def _sharded_pass(self, one: Pass, count: int, gathers: bool, reduces: bool) -> PassTimes:
        """`count` equal layers; each waits for its parameters and sends its gradients while the next one runs."""
        layout = self._layout
        plain = self._pass(one)
        kernels: list[Kernel | Fixed] = [self._kernel(step) for step in one.kernels]
        fixed_s = plain.seconds - plain.compute_s
        if fixed_s > 0:
            kernels.append(Fixed(fixed_s))
        params = reduced_layer_params(self._model, layout)
        gather = self._cost(CollectiveKind.ALL_GATHER, params * ELEMENT_BYTES, GroupKind.DATA)
        reduce = self._cost(CollectiveKind.REDUCE_SCATTER, params * layout.gradient_bytes, GroupKind.DATA)
        size = len(kernels)
        queue = []
        for index in range(count):
            if gathers:
                queue.append(
                    (
                        max(0, index - layout.prefetch) * size,
                        0,
                        QueuedComm(gather, max(0, index - layout.prefetch) * size, index * size),
                    )
                )
            if reduces:
                queue.append(((index + 1) * size, -1, QueuedComm(reduce, (index + 1) * size)))
        queue.sort(key=lambda entry: entry[:2])
        run = run_streams(kernels * count, [entry[2] for entry in queue], self._contention)
        result = plain * count
        comms = dict(result.comms)
        comms[GroupKind.DATA] = CommTimes(run.comm_s, run.exposed_s, run.stretched_s)
        return PassTimes(result.compute_s, result.host_s, comms)

    def _sharded_layers(self, stage: StagePlan) -> tuple[PassTimes, PassTimes]:
        """Forward and backward of a chunk's layers, gradients (and with stage 3 parameters) sharded."""
        layer = layer_passes(self._model, self._layout, self._seq_len)
        full = self._layout.zero_stage == MAX_ZERO_STAGE
        forward = self._sharded_pass(layer.forward, stage.layers_per_chunk, full, False)
        both = Pass((*layer.recompute.steps, *layer.backward.steps))
        return forward, self._sharded_pass(both, stage.layers_per_chunk, full, True)

    def _sharded_tables(self, stage: StagePlan) -> tuple[PassTimes, PassTimes]:
        """Gathering the stage's embedding and head, which nothing hides, and reducing their gradients."""
        tables = stage.num_params - stage.num_layers * layer_params_per_gpu(self._model, self._layout)
        gather_s = 0.0
        if self._layout.zero_stage == MAX_ZERO_STAGE:
            gather_s = self._data_seconds(CollectiveKind.ALL_GATHER, tables * ELEMENT_BYTES)
        reduce_s = self._data_seconds(CollectiveKind.REDUCE_SCATTER, tables * self._layout.gradient_bytes)
        gathers, reduces = (
            PassTimes(comms={GroupKind.DATA: CommTimes(seconds, seconds)}) for seconds in (gather_s, reduce_s)
        )
        return gathers, reduces

    # The iteration.

    def times(self) -> TrainingTimes:
        """The iteration."""
        layout = self._layout
        stages = plan_stages(self._model, layout)
        chunks = [self._chunks(stage) for stage in stages]
        orders = [stage_slots(layout, stage.rank) for stage in stages]
        transfer_s = self._transfer_s() if layout.overlap_p2p else 0.0
        slot_times = [
            SlotTimes(tuple(c.forward.seconds for c in own), tuple(c.backward.seconds for c in own), transfer_s)
            for own in chunks
        ]
        runs = run_pipeline(orders, slot_times)
        rows, ends = [], []
        for stage, own, run in zip(stages, chunks, runs, strict=True):
            one = _sum(c.forward + c.backward for c in own)
            total = one * layout.num_micro_batches
            data = CommTimes()
            if layout.data > 1 and not self._shards_gradients:
                last = _sum(c.backward for c in own)
                data = self._bucketed(stage, last) if layout.overlap_gradients else self._gradients(stage)
            after_s, optimizer_s = self._after(stage)
            comms = dict(total.comms)
            if layout.data > 1:
                comms[GroupKind.DATA] = comms.get(GroupKind.DATA, CommTimes()) + data + CommTimes(after_s, after_s)
            gradients_s = data.exposed_s + data.stretched_s + after_s
            rows.append(
                StageTimes(
                    rank=stage.rank,
                    busy_s=total.seconds,
                    end_s=run[-1].end_s,
                    compute_s=total.compute_s,
                    host_s=total.host_s,
                    comms=comms,
                    gradients_s=gradients_s,
                    optimizer_s=optimizer_s,
                )
            )
            ends.append(run[-1].end_s + gradients_s + optimizer_s)
        flops = model_flops(self._model, layout.global_batch, self._seq_len)
        return TrainingTimes(iteration_s=max(ends), stages=tuple(rows), runs=runs, model_flops=flops)


def _sum(parts: Iterable[PassTimes]) -> PassTimes:
    total = PassTimes()
    for part in parts:
        total = total + part
    return total
