"""Training steps for benchmarks of planners: the layers of recorded captures, repeated and parallelised.

A capture of the shared data (one JSON object per operator) gives the operators of one layer, forward and backward, with
their shapes and bytes; they are repeated over layers and microbatches. Collectives are put in where a strategy has them
(FSDP: gathers of a layer's parameters, reduce-scatters of its gradients; TP: all-gathers and reduce-scatters around
attention and MLP; EP: all-to-alls around the experts). Times are a roofline of an accelerator, scaled so that all
collectives together take `load` times what the computations take. Data flow: forward and data gradients are a chain,
weight gradients hang on it. Tensor-parallel collectives, products and element-wise operators on the chain say how they
read what is before them, so that they can be cut together along the tokens.
"""

import gzip
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload import (
    Buffer,
    CommOp,
    CompOp,
    Gather,
    Gemm,
    Iteration,
    MemoryBound,
    Op,
    Origin,
    Phase,
    Reduce,
    ShardSpec,
    TensorUse,
    Work,
)

FLOPS, BYTES_PER_S, LAUNCH_S = 300e12, 2e12, 3e-6
PIECE_OVERHEAD, PIECE_S, CHUNK_S = 0.03, 8e-6, 15e-6
"""What cutting costs (spec, planners section 5.6): 3 % and 8 us per piece of a computation, 15 us of a collective."""
TOKENS = 2048
GROUPS = {"tp": tuple(range(8)), "fsdp": tuple(range(16)), "ep": tuple(range(16))}
PARAMETER_BYTES, ACTIVATION_BYTES = 400_000_000, 16_000_000


def shared_data() -> Path:
    """The folder of shared data."""
    return Path(os.environ.get("LAGOM_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is parallelised how; `in_turn` microbatches start after the data gradients of the one before."""

    fsdp: bool = False
    tp: bool = False
    ep: bool = False
    layers: int = 32
    microbatches: int = 1
    in_turn: bool = True


@dataclass(slots=True)
class Times:
    """Seconds of operators by name, of their pieces by share."""

    whole: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> seconds, size

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        known = self.whole.get(op.name)
        if known is not None:
            return known[0]
        seconds, size = self.whole.get(op.name.partition("#")[0], (0.0, 0.0))
        if op.name.endswith("#join") or not size:
            return LAUNCH_S + _size(op) / BYTES_PER_S
        share = _size(op) / size
        if isinstance(op, CommOp):
            return seconds * share + CHUNK_S
        return seconds * share * (1.0 + PIECE_OVERHEAD) + PIECE_S


def _size(op: Op) -> float:
    if isinstance(op, CommOp):
        return float(op.collective.num_bytes)
    return op.work.flops if isinstance(op.work, Gemm) else float(getattr(op.work, "num_bytes", 0))


@dataclass(frozen=True, slots=True)
class _LayerOp:
    module: str
    kernel: str
    work: Work
    is_weight_grad: bool


def layer_of(capture: str, *, backward: bool) -> list[_LayerOp]:
    """The computations of layer 7 of a recorded capture, in program order."""
    with gzip.open(shared_data() / "captures" / f"{capture}.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    found = []
    for line in lines:
        _, inside, module = f"{line['mod']}.".partition(".layers.7.")
        if line["kind"] == "compute" and inside and line["bw"] == backward and line["in_bytes"] + line["out_bytes"]:
            found.append(_layer_op(line, module.rstrip("."), backward))
    return found


def _layer_op(line: dict[str, Any], module: str, backward: bool) -> _LayerOp:
    kernel = line["op"].removesuffix(".default")
    shapes = line["shapes"]
    if kernel == "aten.mm":
        (m, k), (_, n) = shapes
        return _LayerOp(module, kernel, Gemm(m, n, k), backward and k == TOKENS and m != TOKENS)
    if kernel == "aten._grouped_mm":
        (m, k), n = shapes[0], shapes[1][-1]
        return _LayerOp(module, kernel, Gemm(m, n, k), backward and len(shapes[1]) == 2)
    return _LayerOp(module, kernel, MemoryBound(line["in_bytes"] + line["out_bytes"]), False)


class _Builder:
    def __init__(self, strategy: Strategy, jitter: float, seed: int) -> None:
        self.strategy = strategy
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.times = Times()
        self.weights: dict[str, float] = {}
        self._random = Random(seed)
        self._jitter = jitter

    def noise(self) -> float:
        return self._random.lognormvariate(0.0, self._jitter) if self._jitter else 1.0

    def comp(self, name: str, step: _LayerOp, deps: list[str], origin: Origin) -> str:
        work = step.work
        seconds = LAUNCH_S + (
            work.flops / FLOPS if isinstance(work, Gemm) else getattr(work, "num_bytes", 0) / BYTES_PER_S
        )
        reads = "" if step.is_weight_grad or "attention" in step.kernel else self._chained(deps)
        op = CompOp(name=name, work=work, deps=tuple(deps), origin=origin, shards=_shards(work, reads))
        self.times.whole[name] = (seconds * self.noise(), _size(op))
        self.ops.append(op)
        return name

    def comm(  # noqa: PLR0917 - six things make a collective
        self, name: str, kind: CollectiveKind, group: str, weight: float, deps: list[str], origin: Origin
    ) -> str:
        num_bytes = PARAMETER_BYTES if group == "fsdp" else ACTIVATION_BYTES
        call = Collective(kind, num_bytes, len(GROUPS[group]), None if group == "tp" else 2)
        op = CommOp(name=name, collective=call, stream=group, communicator=group, deps=tuple(deps), origin=origin)
        if group == "tp":
            op = replace(op, shards=_by_tokens(self._chained(deps), TOKENS // len(GROUPS[group])))
        self.ops.append(op)
        self.weights[name] = weight * self.noise()
        return name

    @staticmethod
    def _chained(deps: list[str]) -> str:
        """What comes before on the chain, which is the first wait; parameters come behind it."""
        return deps[0] if deps and not deps[0].endswith(".gather") else ""

    def scaled(self, load: float) -> Times:
        computing = sum(seconds for seconds, _ in self.times.whole.values())
        unit = load * computing / sum(self.weights.values())
        sizes = {op.name: _size(op) for op in self.ops}
        for name, weight in self.weights.items():
            self.times.whole[name] = (weight * unit, sizes[name])
        return self.times


def _shards(work: Work, reads: str) -> ShardSpec | None:
    """The axes of a product, and of an element-wise operator that is on the chain; `reads` is its first input."""
    if isinstance(work, Gemm):
        inputs = (TensorUse(reads, (0, 1)), TensorUse("", (1, 2)))
        return ShardSpec(inputs, (Gather(0), Reduce(), Gather(1)), (work.m, work.k, work.n))
    return _by_tokens(reads, TOKENS) if reads else None


def _by_tokens(reads: str, tokens: int) -> ShardSpec:
    """Cut along the tokens, which lie along the first dimension."""
    return ShardSpec((TensorUse(reads, (0,)),), (Gather(0),), (tokens,))


_FORWARD_GATHERS = ("self_attn.q_proj", "mlp.gate_proj")
_FORWARD_SCATTERS = ("self_attn.o_proj", "mlp.down_proj")
_BACKWARD_GATHERS = ("mlp.down_proj", "self_attn.o_proj")
_BACKWARD_SCATTERS = ("mlp.gate_proj", "self_attn.k_proj")


def build_step(
    capture: str, strategy: Strategy, load: float, jitter: float = 0.1, seed: int = 0
) -> tuple[Iteration, Times]:
    """A step and its times; collectives take `load` times the computations' time in all."""
    forward, backward = layer_of(capture, backward=False), layer_of(capture, backward=True)
    # The capture ran on a CPU, whose attention has no backward kernel of its own in the layer.
    attention = next(op for op in forward if "attention" in op.kernel)
    at = next(n for n, op in enumerate(backward) if op.module.startswith(("self_attn.v", "self_attn.k")))
    backward.insert(at, replace(attention, kernel=f"{attention.kernel}_backward", work=Gemm(2048, 2048, 8192)))
    forward = [replace(op, work=Gemm(2048, 2048, 4096)) if op is attention else op for op in forward]
    builder = _Builder(strategy, jitter, seed)
    last: str | None = None
    for batch in range(strategy.microbatches):
        last = last if strategy.in_turn else None
        for layer in range(strategy.layers):
            last = _row(builder, forward, Phase.FORWARD, layer, batch, last)
        for layer in reversed(range(strategy.layers)):
            last = _row(builder, backward, Phase.BACKWARD, layer, batch, last)
    name = f"{capture} {strategy}"
    return Iteration(name, tuple(builder.ops), True, tuple(builder.buffers)), builder.scaled(load)


def _row(  # noqa: PLR0917 - a row is where it stands
    builder: _Builder, steps: list[_LayerOp], phase: Phase, layer: int, batch: int, last: str | None
) -> str | None:
    strategy, tag = builder.strategy, f"{phase}.{layer}.{batch}"

    def origin(module: str, kernel: str, own: Phase = phase) -> Origin:
        return Origin(phase=own, layer=layer, microbatch=batch, module=f"layers.{layer}.{module}", kernel=kernel)

    gather: str | None = None
    if strategy.fsdp:
        made = origin("parameters", "gather")
        gather = builder.comm(f"{tag}.gather", CollectiveKind.ALL_GATHER, "fsdp", 3.0, [], made)
    gathers = _FORWARD_GATHERS if phase is Phase.FORWARD else _BACKWARD_GATHERS
    scatters = _FORWARD_SCATTERS if phase is Phase.FORWARD else _BACKWARD_SCATTERS
    users, grads = [], []
    seen: set[str] = set()
    products = [n for n, step in enumerate(steps) if "grouped_mm" in step.kernel]
    for number, step in enumerate(steps):
        name = f"{tag}.{number}.{step.kernel}"
        if strategy.tp and step.module in gathers and step.module not in seen:
            deps = [last] if last else []
            last = builder.comm(f"{name}.ag", CollectiveKind.ALL_GATHER, "tp", 0.45, deps, origin(step.module, "ag"))
        if strategy.ep and products and number == products[0]:
            deps = [last] if last else []
            last = builder.comm(f"{name}.a2a", CollectiveKind.ALL_TO_ALL, "ep", 1.0, deps, origin("dispatch", "a2a"))
        seen.add(step.module)
        deps = [last] if last else []
        if gather and isinstance(step.work, Gemm) and not step.is_weight_grad:
            deps.append(gather)
        own = Phase.WEIGHT_GRAD if step.is_weight_grad else phase
        made_op = builder.comp(name, step, deps, origin(step.module, step.kernel, own))
        if step.is_weight_grad:
            grads.append(made_op)
        else:
            last = made_op
            if gather and isinstance(step.work, Gemm):
                users.append(made_op)
        if strategy.tp and _ends(steps, number, scatters):
            assert last is not None
            kind, made = CollectiveKind.REDUCE_SCATTER, origin(step.module, "rs")
            last = builder.comm(f"{name}.rs", kind, "tp", 0.45, [last], made)
        if strategy.ep and products and number == products[-1]:
            assert last is not None
            last = builder.comm(f"{name}.c", CollectiveKind.ALL_TO_ALL, "ep", 1.0, [last], origin("combine", "a2a"))
    if gather:
        builder.buffers.append(
            Buffer(name=f"{tag}.parameters", num_bytes=PARAMETER_BYTES, maker=gather, users=tuple(users))
        )
    if strategy.fsdp and grads:
        made = origin("gradients", "scatter")
        builder.comm(f"{tag}.scatter", CollectiveKind.REDUCE_SCATTER, "fsdp", 3.0, grads, made)
    return last


def _ends(steps: list[_LayerOp], number: int, modules: tuple[str, ...]) -> bool:
    """The last operator of a module."""
    module = steps[number].module
    return module in modules and all(step.module != module for step in steps[number + 1 :])
