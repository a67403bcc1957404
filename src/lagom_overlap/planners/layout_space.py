"""Which layouts a model has on a number of GPUs: degrees of parallelism, schedule, sharding, recomputation.

What a framework has no word for, or cannot cut the model into, is not in it. Overlap that costs nothing is on, as
published recipes have it: of gradients and parameters (Megatron-LM's distributed optimizer), of transfers between
interleaved stages, and sequence parallelism. Switches that need a judgement are `lagom plan`'s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from lagom_overlap.workload.layer_kinds import Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import PipelineSchedule, Recompute, RecomputeModule
from lagom_overlap.workload.step.framework_file import has_switch
from lagom_overlap.workload.step.rules import IssueRules, Sharding

Value = bool | int | float | str | tuple[str, ...]
Keys = Mapping[str, Value]
"""Keys of `[parallel]`, as a job file gives them."""

MICRO_BATCHES: Final = (1, 2, 4)
"""Sequences; larger ones fill a GPU no better at the sequence lengths of today."""
LEAST_TOKENS: Final = 2048
"""Of a sequence on each rank of context parallelism: below, attention no longer hides the exchange of keys."""
MOST_CHUNKS: Final = 8
"""Model chunks per GPU: recipes of NVIDIA's Megatron-Bridge have up to 5 to 8 of them."""
NOT_TRIED: Final = (
    f"micro-batches above {MICRO_BATCHES[-1]} sequences",
    f"context parallelism that leaves a rank fewer than {LEAST_TOKENS} tokens of a sequence",
    "tensor parallelism beyond a node",
    f"more than {MOST_CHUNKS} model chunks per GPU",
    "stages of unequal numbers of layers (pipeline_layout), but for odd numbers of layers",
    "other sets of recomputed modules than one per kind of model",
    "DualPipe and zero-bubble schedules",
    "8-bit products",
)
"""What a ranking says that it did not price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """A model on `num_gpus` GPUs, `gpus_per_node` of them behind one switch; sequences of `seq_len` tokens."""

    model: TransformerModel
    rules: IssueRules
    num_gpus: int
    gpus_per_node: int
    seq_len: int
    global_batch: int

    def degrees(self) -> Iterator[Mapping[str, int]]:
        """Tensor, context and pipeline parallelism with the data parallelism that fills the GPUs."""
        for tensor in _divisors(self.gpus_per_node):
            for context in _divisors(self.num_gpus // tensor if self.num_gpus % tensor == 0 else 0):
                if context > 1 and self.seq_len // context < LEAST_TOKENS:
                    continue
                for pipeline in _divisors(self.num_gpus // (tensor * context)):
                    if pipeline > self.model.num_layers:
                        continue
                    data = self.num_gpus // (tensor * context * pipeline)
                    if self.global_batch % data == 0:
                        yield {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}

    def layouts(self, degrees: Mapping[str, int]) -> Iterator[Keys]:
        """Every layout with those degrees, what needs the least memory first."""
        zero_stages = self._zero_stages(degrees)
        for zero, recompute, micro_batch in product(zero_stages, self._recomputations(), self._micro_batches(degrees)):
            for experts in self._experts(degrees):
                for schedule in self._schedules(degrees, micro_batch):
                    yield self._keys(degrees, zero, micro_batch) | dict(recompute) | dict(experts) | dict(schedule)

    @property
    def _shards(self) -> bool:
        """Whether the framework shards parameters, and says so with `fsdp`."""
        return self.rules.sharding is Sharding.FSDP2

    def _zero_stages(self, degrees: Mapping[str, int]) -> tuple[int, ...]:
        if degrees["data"] * degrees["context"] == 1:
            return () if self._shards else (0,)
        if not self._shards:
            return (1, 0)
        if degrees["data"] == 1:
            return ()
        return (3,) if degrees["pipeline"] > 1 else (3, 2)  # between stages parameters stay whole under either

    def _keys(self, degrees: Mapping[str, int], zero: int, micro_batch: int) -> dict[str, Value]:
        """Degrees above 1 and what goes with them; in the order of a job file."""
        data = {"fsdp": degrees["data"]} if self._shards else {"data": degrees["data"]}
        keys: dict[str, Value] = {"framework": self.rules.name, **data}
        keys |= {key: degrees[key] for key in ("tensor", "context", "pipeline") if degrees[key] > 1}
        if degrees["tensor"] > 1:
            keys["sequence_parallel"] = True
        if not self._shards and degrees["data"] * degrees["context"] > 1:
            keys |= {"zero_stage": zero, "overlap_gradients": True}
            if zero == 1 and has_switch(self.rules.name, "overlap_parameters"):
                keys["overlap_parameters"] = True
        elif zero == 2:
            keys["zero_stage"] = zero
        return keys | {"micro_batch": micro_batch, "global_batch": self.global_batch}

    def _micro_batches(self, degrees: Mapping[str, int]) -> tuple[int, ...]:
        each = self.global_batch // degrees["data"]
        return tuple(size for size in MICRO_BATCHES if each % size == 0)

    def _recomputations(self) -> tuple[Keys, ...]:
        """From the least memory to the most."""
        full: Keys = {"recompute": str(Recompute.FULL)}
        kinds = {*self.model.kind_counts}
        if self.rules.eager is not None:  # torchtitan's modes, which wrap modules of any eager job
            is_plain = kinds == {next(iter(kinds))} and Mixer.ATTENTION in {kind.mixer for kind in kinds}
            has_products = is_plain and self.model.gated and not self.model.num_experts
            products: tuple[Keys, ...] = ({"recompute": str(Recompute.PRODUCTS)},) if has_products else ()
            return (full, {"recompute": str(Recompute.LAYERS)}, *products, {})
        if not has_switch(self.rules.name, "recompute_modules"):
            return (full, {})
        modules = [RecomputeModule.LAYERNORM]
        modules += [RecomputeModule.MLA_UP_PROJ] if any(kind.mixer is Mixer.LATENT for kind in kinds) else []
        modules += [RecomputeModule.MOE_ACT] if self.model.num_experts else []
        modules += [RecomputeModule.MLP] if any(kind.mlp is Mlp.MLP for kind in kinds) else []
        named = tuple(str(module) for module in modules)
        return (full, {"recompute": str(Recompute.SELECTIVE), "recompute_modules": named}, {})

    def _experts(self, degrees: Mapping[str, int]) -> tuple[Keys, ...]:
        """Expert parallelism; tensor parallelism leaves experts whole, as recipes have it."""
        if not self.model.num_experts:
            return ({},)
        whole = degrees["tensor"] > 1
        ranks = degrees["data"] * degrees["context"] * degrees["tensor"]
        sizes = [size for size in _divisors(self.model.num_experts) if ranks % size == 0]
        choices: list[Keys] = []
        for size in reversed(sizes):
            if size > 1:
                choices.append({"expert": size} | ({"whole_experts": True} if whole else {}))
            else:
                choices.append({})
        return tuple(choices)

    def _schedules(self, degrees: Mapping[str, int], micro_batch: int) -> Iterator[Keys]:
        """One forward, one backward; interleaved with every number of chunks that divides a stage's layers."""
        pipeline = degrees["pipeline"]
        if pipeline == 1:
            yield {}
            return
        num = self.global_batch // (degrees["data"] * micro_batch)
        hidden: Keys = {} if self._shards else {"overlap_p2p": True}
        for chunks in range(1, MOST_CHUNKS + 1):
            cut = self._cut(pipeline * chunks)
            if cut is None or (chunks > 1 and num % pipeline):
                continue
            if chunks == 1:
                yield cut
            else:
                yield {"schedule": str(PipelineSchedule.INTERLEAVED), "chunks": chunks, **hidden, **cut}

    def _cut(self, num_chunks: int) -> Keys | None:
        """How the layers are cut into that many model chunks: equal ones, embedding and head as layers, or by name.

        By name only where the number of layers has no other way into two halves, as DeepSeek-V3's 61.
        """
        layers = self.model.num_layers
        if layers % num_chunks == 0:
            return {}
        if (layers + 2) % num_chunks == 0 and (layers + 2) // num_chunks > 1:
            return {"tables_as_layers": True}
        if self._shards or layers % 2 == 0:
            return None
        places = layers + 2 + self.model.mtp_layers
        each, more = divmod(places, num_chunks)
        if each < 2 + self.model.mtp_layers:
            return None
        # The last chunks, which hold the head, are the shorter ones.
        sizes = [each + 1] * more + [each] * (num_chunks - more)
        sizes[0] -= 1
        sizes[-1] -= 1 + self.model.mtp_layers
        chunks = ["t" * size for size in sizes]
        return {"pipeline_layout": "E" + "|".join(chunks) + "m" * self.model.mtp_layers + "L"}


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)
