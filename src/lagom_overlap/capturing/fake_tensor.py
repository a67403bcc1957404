"""A training step of any module, captured on the CPU with tensors that have shapes and no data.

The model is built and run once under FakeTensorMode in a world of fake ranks; every operator that PyTorch dispatches is
recorded in program order (`recorder.py`). Parallelism is the user's own: `fully_shard`, DTensor plans, functional
collectives. What runs on the CPU names its kernels as the CPU does (`_scaled_dot_product_flash_attention_for_cpu`); a
fused RMS norm or optimizer of the GPU shows up as the operators it is made of.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lagom_overlap.capturing.communicators import Communicators
from lagom_overlap.capturing.data_parallel import data_parallel_stand_in, reducing_group
from lagom_overlap.capturing.fake_world import MAIN_STREAM, FakeStreams, fake_world
from lagom_overlap.capturing.recorder import StepRecorder
from lagom_overlap.capturing.whereabouts import Whereabouts
from lagom_overlap.errors import JobError
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.streams import COMPUTE, DDP_REDUCER, FSDP2

MAX_RANKS: Final = 1 << 20
"""Chosen, far above any job that is known."""

_READS_ONE: Final = "aten::_local_scalar_dense"
_FINDS: Final = "aten::nonzero"
UNSHARDED: Final = (
    "The step has no collective: the model is not sharded over the {ranks} ranks. Shard it where it is built "
    "(fully_shard, parallelize_module, DistributedDataParallel), or name a model with --parallel fsdp={ranks}; "
    "[parallel] auto = [{ranks}] in a job file searches for a sharding."
)
COMPILED: Final = (
    "torch.compile: {count} modules are compiled, and captured as they run without it. Inductor fuses chains of "
    "element-wise operators, which makes those shorter than here; collectives outside of graphs stay what they are."
)
_SILENT: Final = frozenset({"prim::device"})
_LABELS: Final = frozenset({"profiler::_record_function_enter_new", "profiler::_record_function_exit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What one training step is made of.

    `loss` turns what `model(*inputs, **keyword_inputs)` returns into a scalar. `optimizers` step one after the other
    (multi-tensor ones need parameters of one device mesh each); none leaves that part of the step out. `context`
    surrounds forward and backward (`loss_parallel`, an autocast). With `num_micro_batches` forward and backward run so
    often before the optimizer; `before_micro_batch` gets the number of each. `read_value` answers where the step reads
    what a tensor holds, which a capture does not know: it is given the tensor (of the right shape and type, without
    data) and returns the number that `item` or `tolist` would find, or of a mask how many entries are true.
    """

    model: nn.Module
    inputs: tuple[Any, ...] = ()
    keyword_inputs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    num_micro_batches: int = 1
    before_micro_batch: Callable[[int], None] | None = None
    read_value: Callable[[torch.Tensor], float] | None = None

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise JobError(f"num_micro_batches is {self.num_micro_batches}, must be at least 1")


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Hands every dispatched operator on local tensors to the recorder."""

    def __init__(
        self,
        recorder: StepRecorder,
        whereabouts: Whereabouts,
        streams: FakeStreams,
        read_value: Callable[[torch.Tensor], float] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._read_value = read_value
        self._recorder = recorder
        self._whereabouts = whereabouts
        self._streams = streams
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is handed on for a while."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:  # a DTensor or an asynchronous collective's result first turns into local tensors
            if is_traceable_wrapper_subclass_type(kind):
                return NotImplemented
        schema_name = func._schema.name
        result: Any
        is_host_read = True
        try:
            result = func(*args, **kwargs)
            is_host_read = False  # also of `item` where the value is known: a scalar that never was on the device
        except DataDependentOutputException:
            if self._read_value is None or schema_name != _READS_ONE:
                raise
            result = self._read_value(args[0])
        except DynamicOutputShapeException:
            if self._read_value is None or schema_name != _FINDS:
                raise
            result = args[0].new_empty((int(self._read_value(args[0])), args[0].dim()), dtype=torch.int64)
        if self._is_paused or schema_name in _SILENT:
            return result
        where = self._whereabouts
        if schema_name in _LABELS:
            where.label(schema_name, args)
            return result
        where.note_forward()
        stream = self._streams.current.name
        self._recorder.record(
            func,
            args,
            kwargs,
            result,
            origin=where.origin(schema_name.replace("::", ".")),
            stream=COMPUTE if stream == MAIN_STREAM else stream,
            forward_node=where.forward_node,
            is_host_read=is_host_read,
        )
        return result


class _Clock:
    """Tells the recorder's clock what streams do, under the recorder's names."""

    def __init__(self, recorder: StepRecorder, whereabouts: Whereabouts) -> None:
        self._recorder, self._whereabouts = recorder, whereabouts
        self._clock = recorder.clock

    @staticmethod
    def _name(stream: str) -> str:
        return COMPUTE if stream == MAIN_STREAM else stream

    def record(self, stream: str, event: int) -> None:
        self._clock.record(self._name(stream), event)

    def wait_event(self, stream: str, event: int) -> None:
        self._clock.wait_event(self._name(stream), event)

    def wait_stream(self, stream: str, other: str) -> None:
        self._clock.wait_stream(self._name(stream), self._name(other))

    def synchronize_event(self, event: int) -> None:
        self._synchronize(self._clock.of_event(event))

    def synchronize(self, stream: str | None) -> None:
        self._synchronize(self._clock.all_so_far() if stream is None else self._clock.so_far(self._name(stream)))

    def _synchronize(self, waited: frozenset[int]) -> None:
        self._recorder.synchronize(waited, origin=self._whereabouts.origin("synchronize"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (_local(value) for value in state.values() if isinstance(value, torch.Tensor))


def _make_optimizer_state(step: TrainingStep) -> None:
    """One step on zero gradients, unrecorded: the moments exist before the step that is captured."""
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def train_once(
    step: TrainingStep,
    *,
    on_micro_batch: Callable[[int], None] = lambda number: None,
    on_optimizer: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """One step: forward and backward of all micro-batches, then the optimizers; the losses."""
    losses = []
    for number in range(step.num_micro_batches):
        on_micro_batch(number)
        if step.before_micro_batch is not None:
            step.before_micro_batch(number)
        with step.context():
            loss = step.loss(step.model(*step.inputs, **step.keyword_inputs))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        losses.append(loss.detach())
    on_optimizer()
    for optimizer in step.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _run(step: TrainingStep, whereabouts: Whereabouts) -> None:
    def begun(number: int) -> None:
        whereabouts.microbatch = number

    def ended() -> None:
        whereabouts.microbatch, whereabouts.in_optimizer = 0, True

    train_once(step, on_micro_batch=begun, on_optimizer=ended)


@contextmanager
def _resizes_reported(recorder: StepRecorder) -> Iterator[None]:
    """FSDP frees and allocates gathered parameters by resizing their storage, which is no operator."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        recorder.storages.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]  # undone below
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


@contextmanager
def _shapes_unrecorded(record: _Record) -> Iterator[None]:
    """DTensor runs an operator on its global shape to learn the result's: that is no part of the step."""
    name = "_propagate_tensor_meta_non_cached"
    plain = getattr(ShardingPropagator, name)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with record.paused():
            return plain(*args, **kwargs)

    setattr(ShardingPropagator, name, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, plain)


def _name_of_world(model: nn.Module, num_ranks: int) -> str:
    """The mesh dimension that spans all ranks: PyTorch gives it the default group; "world" if there are several."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    names = {
        mesh.mesh_dim_names[0]
        for mesh in meshes
        if mesh.ndim == 1 and mesh.mesh_dim_names is not None and mesh.size() == num_ranks
    }
    return names.pop() if len(names) == 1 else "world"


def _stream_names(model: nn.Module, communicators: Communicators) -> dict[str, str]:
    """What the streams of FSDP2 and of DDP's reducer are called, by the recorder's names for them."""
    names: dict[str, str] = {}
    for group in dict.fromkeys(map(reducing_group, model.modules())):
        if group is not None and group.size() > 1:
            communicator = communicators.name_of(group, tuple(dist.get_process_group_ranks(group)))
            names[communicator] = f"{DDP_REDUCER}_{communicator}" if DDP_REDUCER in names.values() else DDP_REDUCER
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        context = getattr(state(), "_comm_ctx", None) if callable(state) else None
        for name in FSDP2:
            stream = getattr(context, f"{name}_stream", None)
            if stream is not None:
                names[stream.name] = name
    return names


def check_ranks(num_ranks: int, rank: int) -> None:
    """Refuses a rank, or a number of them, that no capture has.

    Raises:
        JobError: if it is out of range.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise JobError(f"ranks is {num_ranks}, must be 1 to {MAX_RANKS}")
    if not 0 <= rank < num_ranks:
        raise JobError(f"rank is {rank}, must be 0 to ranks - 1 = {num_ranks - 1}")


def capture_step(
    build: Callable[[], TrainingStep],
    *,
    num_ranks: int,
    rank: int = 0,
    name: str = "step",
    world_name: str | None = None,
) -> IssuedStep:
    """Captures one step of what `build` makes, on rank `rank` of `num_ranks`.

    `build` is called in the fake world, under FakeTensorMode: it may call `init_device_mesh("cpu", ...)`, `new_group`,
    `fully_shard` and so on; no tensor it makes takes memory. `world_name` is what the group of all ranks is called; by
    default the mesh dimension that spans them, where parameters are distributed over one.

    Raises:
        JobError: if ranks are out of range, or `build` returns no `TrainingStep`.
        BackendError: if the process has a default process group.
    """
    check_ranks(num_ranks, rank)
    recorder = StepRecorder()
    fake_mode = FakeTensorMode()  # imports torch._dynamo, which must see torch's own streams
    with fake_world(num_ranks, rank) as streams, data_parallel_stand_in(), fake_mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of a view: nothing writes into it here
        step = build()
        if not isinstance(step, TrainingStep):
            raise JobError(f"the build function returned {type(step).__name__}, must return a TrainingStep")
        whereabouts = Whereabouts(step.model)
        record = _Record(recorder, whereabouts, streams, step.read_value)
        with record.paused(), record:  # what reads values is answered here, too
            _make_optimizer_state(step)
        recorder.add_parameters(_local(parameter) for parameter in step.model.parameters())
        for optimizer in step.optimizers:
            for tensor in _state_tensors(optimizer):
                recorder.storages.external(tensor)
        recorder.communicators.name_world(world_name or _name_of_world(step.model, num_ranks))
        streams.sink = _Clock(recorder, whereabouts)
        with whereabouts, _resizes_reported(recorder), _shapes_unrecorded(record), record:
            _run(step, whereabouts)
        gc.collect()
        recorder.keep_alive()
        issued = recorder.finish(name, num_ranks, _stream_names(step.model, recorder.communicators))
        return replace(issued, notes=(*issued.notes, *_remarks(step.model, issued)))


def _remarks(model: nn.Module, step: IssuedStep) -> Iterator[str]:
    """What a user should know of a capture: nothing is sharded, or a compiler was left out."""
    if step.num_ranks > 1 and not step.iteration.comms:
        yield UNSHARDED.format(ranks=step.num_ranks)
    compiled = sum(
        module._compiled_call_impl is not None or isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        for module in model.modules()
    )
    if compiled:
        yield COMPILED.format(count=compiled)
