"""Training programs drawn at random, as data: a family, and features that can each be left out.

Every rank draws the same program from its number, so no rank is told anything. A feature is a name with arguments; a
program without any is the plainest of its family, which is what makes finds small: `smaller` leaves features out.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Feature = tuple[Any, ...]
MODES = ("route",) * 6 + ("saved", "sibling", "online", "launched", "relaunched") * 2 + ("observe",)
"""How the job is run with us; `saved` and `relaunched` are two runs, the first of which learns what there is to set."""
STEPS = {"online": 70, "launched": 70, "relaunched": 14, "observe": 8}
"""Enough to search, or to watch and check what is saved; 7 in other modes."""
BY_HAND = frozenset({"route", "sibling"})
"""Modes that switch at steps with numbers, which all ranks have to come to."""
BRIEF = frozenset({"route", "sibling", "saved"})
"""Modes in which wide models run: a search would cut each of their messages into a thousand slices."""
LEAVING = frozenset({"join_all", "leaves"})
UNEQUAL = LEAVING | {"skips", "repeats", "scaler", "local", "extra", "raise_alone", "mode"}
"""Features of one rank: its steps are not those of the others."""
OF_PROCESSES = frozenset({"no_backend", "spawned", "launches", "again", "dies", "without"})
"""Features that only ranks can have that are started for the program."""
FAMILIES = ("fsdp2",) * 6 + ("ddp",) * 4 + ("calls",) * 3 + ("hsdp",) * 2 + ("tp", "moe", "moe", "pipeline")
NAMES = "abc"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a job does; `features` in the order in which they were drawn."""

    seed: int
    num_ranks: int
    mode: str
    family: str
    num_steps: int
    features: tuple[Feature, ...] = ()

    def all(self, name: str) -> list[Feature]:
        """The arguments of every feature of a name."""
        return [feature[1:] for feature in self.features if feature[0] == name]

    def get(self, name: str) -> Feature | None:
        """The arguments of the first one, None if there is none."""
        return next(iter(self.all(name)), None)

    def has(self, name: str) -> bool:
        """Whether there is one."""
        return self.get(name) is not None

    def equal(self, num_steps: int) -> "Program":
        """So many steps of it, the same on all ranks."""
        kept = tuple(feature for feature in self.features if feature[0] not in UNEQUAL)
        return replace(self, num_steps=num_steps, features=kept)

    def alone(self) -> "Program":
        """Without what is about processes."""
        return replace(self, features=tuple(feature for feature in self.features if feature[0] not in OF_PROCESSES))

    def text(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))


def program_of(text: str) -> Program:
    """What `Program.text` gave."""
    found = json.loads(text)
    return Program(**{**found, "features": tuple(_tuples(feature) for feature in found["features"])})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the much smaller ones first."""
    features = program.features
    size = len(features) // 2
    while size:
        for start in range(0, len(features), size):
            yield replace(program, features=features[:start] + features[start + size :])
        size //= 2
    if program.num_ranks > 2 and program.family != "pipeline":
        yield replace(program, num_ranks=program.num_ranks - 1)
    for num_steps in (2, program.num_steps // 2, program.num_steps - 1):
        if 0 < num_steps < program.num_steps:
            yield replace(program, num_steps=num_steps)


def drawn(seed: int, num_ranks: int, *, mode: str | None = None, family: str | None = None) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    mode = mode or rng.choice(MODES)
    family = family or rng.choice(FAMILIES)
    if family == "pipeline" and num_ranks == 1:
        family = "fsdp2"
    num_steps = STEPS.get(mode, 7)
    features = [*_FEATURES_OF.get(family, _of_nothing)(rng, num_ranks)]
    if mode in BY_HAND:
        features = [feature for feature in features if feature[0] not in LEAVING]
    if not any(feature[0] in LEAVING for feature in features):
        features += _of_any(rng, num_ranks, num_steps, family)
        features += _of_one_rank(rng, num_ranks, num_steps, family, mode)
    if family == "calls" and not any(feature[0] == "call" for feature in features):
        features.append(("call", "all_reduce", "float32", 2304, "world", "sum", "wait", "before"))
    return Program(
        seed=seed,
        num_ranks=num_ranks,
        mode=mode,
        family=family,
        num_steps=num_steps,
        features=tuple(
            feature
            for feature in features
            if not _is_wrong_alone(feature, features, family) and not (feature == ("wide",) and mode not in BRIEF)
        ),
    )


def _is_wrong_alone(feature: Feature, features: Sequence[Feature], family: str) -> bool:
    """What hangs in stock PyTorch (PowerSGD of odd sizes, pipelines in anomaly mode) or ends its parent's workers."""
    names = {each[0] for each in features}
    is_scaled = "scaler" in names
    match feature:
        case ("raise_alone", *_):  # what the others do in the step, this rank does not
            return bool(names & {"raise", "join", "coalesce", "wrong"}) or any("after" in each for each in features)
        case ("skips" | "repeats" | "raise_alone", *_) if family == "tp":  # gradients of norms are summed in the update
            return True
        case ("skips", *_):  # or it would not raise where the others do
            return any(each[0] == "raise" and each[2] == "optimizer" for each in features)
        case ("extra", *_):  # where DDP exchanges more than gradients, or holds what all have to do alike
            options = {each[1] for each in features if each[0] == "ddp"}
            return bool(names & {"join", "norm", "second_model"} | options & {"static_graph", "find_unused_parameters"})
        case ("clip" | "optimizer_in_backward" | "raise" | "no_update" | "retain" | "second_model", *_) if is_scaled:
            return True
        case ("hook", _) if is_scaled:
            return True
        case ("comm_hook", "powersgd", _):
            return "odd" in names
        case ("anomaly",):
            return family == "pipeline"
        case ("fork", _, "runs exit handlers"):
            return "loader" in names
        case _:
            return False


def _of_nothing(_rng: random.Random, _num_ranks: int) -> Iterator[Feature]:
    yield from ()


def _of_layers(rng: random.Random) -> Iterator[Feature]:
    """What holds for any model of layers."""
    orders = ["".join(rng.sample(NAMES, 3))]
    for _ in range(rng.choice([0, 0, 1, 2])):
        orders.append("".join(rng.choices(NAMES, k=rng.randint(1, 4))))
    if orders != ["abc"]:
        yield ("order", *orders)
    if rng.random() < 0.25:
        yield ("frozen", rng.choice(NAMES))
    if rng.random() < 0.1:
        yield ("frozen_from", rng.choice(NAMES), rng.randint(1, 5))
    if rng.random() < 0.1:
        yield ("shared", *rng.sample(NAMES, 2))
    if rng.random() < 0.2:
        yield ("nested", rng.choice(NAMES))
    if rng.random() < 0.15:
        yield ("norm", rng.choice(NAMES), rng.choice(["layer", "batch"]))
    if rng.random() < 0.1:
        yield ("dropout", 0.3)
    if rng.random() < 0.25:
        yield ("recompute", rng.choice([*NAMES, "all"]), rng.choice(["reentrant", "not"]))
    if rng.random() < 0.015:
        yield ("compile", rng.choice(NAMES), rng.choice(["eager", "aot_eager"]))
    if rng.random() < 0.02:
        yield ("wide",)
    if rng.random() < 0.15:
        yield ("odd",)


def _of_training(rng: random.Random, num_steps: int = 7) -> Iterator[Feature]:
    """What a loop does in its steps and between them."""
    some_step: Callable[[], int] = lambda: rng.randint(1, num_steps - 1)  # noqa: E731
    if rng.random() < 0.3:
        yield ("accumulate", rng.choice([2, 3]), rng.choice(["last", "all", "odd"]))
    if rng.random() < 0.25:
        yield ("clip", rng.choice([0.01, 1.0]))
    if rng.random() < 0.3:
        yield ("adam",)
    if rng.random() < 0.12:
        yield ("keep_grads",)
    if rng.random() < 0.3:
        yield (
            "evaluate",
            rng.randint(1, 4),
            rng.choice(["no_grad", "no_grad", "inference_mode", "eval", "set_grad_enabled"]),
            rng.choice(["average", "average", "own"]),
        )
    if rng.random() < 0.25:
        first = some_step()
        yield ("checkpoint", first, min(num_steps - 1, first + 2), rng.choice(["state", "file", "dcp", "full"]))
    if rng.random() < 0.2:
        yield (
            "raise",
            some_step(),
            rng.choice(["forward", "backward", "loss", "post", "hook", "optimizer", "between"]),
            rng.choice(["ValueError", "ArithmeticError", "KeyboardInterrupt", "StopIteration", "RuntimeError"]),
            rng.choice(["inside", "inside", "outside", "not"]),
            rng.choice(["resets", "goes on"]),
        )
    if rng.random() < 0.12:
        yield ("hook", rng.choice(["full_backward", "full_backward_pre", "tensor", "post", "global"]))
    if rng.random() < 0.06:
        yield ("optimizer_in_backward",)
    if rng.random() < 0.06:
        yield ("retain",)
    if rng.random() < 0.05:
        yield ("two_losses",)
    if rng.random() < 0.04:
        yield ("no_update", rng.randint(2, 4))


def _fsdp2(rng: random.Random, _num_ranks: int) -> Iterator[Feature]:
    yield from _of_layers(rng)
    yield from _of_sharding(rng)
    yield from _of_training(rng)


def _of_sharding(rng: random.Random) -> Iterator[Feature]:
    sharded = rng.choice(["abc", "abc", "ac", "b", "", "cba", "together"])
    if sharded != "abc":
        yield ("sharded", sharded)
    if rng.random() < 0.3:
        yield ("reshard", rng.choice([True, False, "alternating"]))
    if rng.random() < 0.25:
        yield ("mixed", "bfloat16", rng.choice(["", "float32"]), rng.random() < 0.3)
    if rng.random() < 0.2:
        yield ("prefetch", rng.choice(["forward", "backward"]), *rng.sample(NAMES, 2))
    for name, arguments in (
        ("set_gradient_divide_factor", (rng.choice([1.0, 3.0, 4.0]),)),
        ("set_reshard_after_backward", (False,)),
        ("set_unshard_in_backward", (False,)),
        ("set_force_sum_reduction_for_comms", (True,)),
        ("set_allocate_memory_from_process_group_for_comm", (True,)),
        ("set_reduce_scatter_unused_params", (True,)),
        ("set_reduce_scatter_max_input_buffers", (2,)),
    ):
        if rng.random() < 0.05:
            yield ("method", rng.choice(["", *NAMES]), name, *arguments)
    if rng.random() < 0.1:
        yield ("unshard", rng.choice(NAMES), rng.random() < 0.5)
    if rng.random() < 0.06:
        yield ("ignored", rng.choice(NAMES))
    if rng.random() < 0.06:
        yield ("placement", 1)
    if rng.random() < 0.06:
        yield ("second_model",)
    if rng.random() < 0.1:
        yield ("calls_too",)


def _hsdp(rng: random.Random, num_ranks: int) -> Iterator[Feature]:
    shapes = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (2, 2), (4, 1)]}[num_ranks]
    yield ("mesh", *rng.choice(shapes))
    if rng.random() < 0.2:
        yield ("method", "", "set_requires_all_reduce", False)
    yield from _fsdp2(rng, num_ranks)


def _ddp(rng: random.Random, num_ranks: int) -> Iterator[Feature]:
    if rng.random() < 0.25:
        yield from _of_uneven_batches(rng, num_ranks)
        return
    found = [*_of_layers(rng)]
    yield from found
    varies = any(feature[0] == "order" and len(feature) > 2 for feature in found)
    finds_unused = varies or rng.random() < 0.2
    if finds_unused:
        yield ("ddp", "find_unused_parameters", True)
    if rng.random() < 0.2 and not varies:
        yield ("ddp", "static_graph", True)
    for name, values in (
        ("gradient_as_bucket_view", (True,)),
        ("broadcast_buffers", (False,)),
        ("batched_grad_copy", (True,)),
        ("bucket_cap_mb", (0.001, 0.01, 1)),
        ("skip_all_reduce_unused_params", (True,)),
    ):
        if rng.random() < 0.25 * (1 if name in {"gradient_as_bucket_view", "bucket_cap_mb"} else 0.3):
            yield ("ddp", name, rng.choice(values))
    if rng.random() < 0.15:
        hooks = ["fp16", "bf16", "own", "noop", "builtin"]
        yield ("comm_hook", rng.choice(hooks if finds_unused else [*hooks, "powersgd"]), rng.choice([0, 0, 3]))
    if rng.random() < 0.1:
        yield ("pickle", rng.randint(1, 5))
    if rng.random() < 0.06:
        yield ("second_model",)
    if rng.random() < 0.1:
        yield ("calls_too",)
    yield from _of_training(rng)


def _of_uneven_batches(rng: random.Random, num_ranks: int) -> Iterator[Feature]:
    """What else ranks do in a step, or may raise, must not come to those that have no batch, or have left."""
    match rng.choice(["join", "join_all", "leaves"]):
        case "join":
            yield ("join", rng.random() < 0.5)
        case "join_all":
            yield ("join_all", rng.randrange(num_ranks), rng.choice([1, 3, 9]), rng.random() < 0.5)
        case _:
            yield ("leaves", rng.randrange(num_ranks), rng.randint(1, 6))
    if rng.random() < 0.3:
        yield ("ddp", "gradient_as_bucket_view", True)
    if rng.random() < 0.3:
        yield ("adam",)


def _tp(rng: random.Random, num_ranks: int) -> Iterator[Feature]:
    yield ("mesh", *rng.choice({1: [(1, 1)], 2: [(1, 2)], 3: [(1, 3)], 4: [(2, 2), (2, 2), (1, 4)]}[num_ranks]))
    if rng.random() < 0.5:
        yield ("sequence",)
    if rng.random() < 0.3:
        yield ("mixed", "bfloat16", "float32", False)
    yield from _of_training(rng)


def _moe(rng: random.Random, _num_ranks: int) -> Iterator[Feature]:
    yield ("splits", rng.choice(["even", "uneven", "uneven", "some empty"]))
    yield ("dense", rng.choice(["fsdp2", "ddp", "by hand"]))
    if rng.random() < 0.2:
        yield ("overlapped",)
    yield from _of_training(rng)


def _pipeline(rng: random.Random, num_ranks: int) -> Iterator[Feature]:
    if num_ranks == 4 and rng.random() < 0.5:
        yield ("dp", "fsdp2")  # with DDP stock PyTorch's schedules hang over gloo
    yield ("schedule", rng.choice(["GPipe", "1F1B", "Interleaved1F1B"]), rng.choice([1, 2]))
    if rng.random() < 0.4:
        yield ("adam",)


KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("gather in place", "scatter in place", "gather overlapping", "exchange overlapping"),
    *("uneven", "broadcast", "list", "object", "ring"),
)
WAITS = ("now", "wait", "wait", "future", "result", "asked", "timeout", "then", "dropped")


def _of_any(rng: random.Random, num_ranks: int, num_steps: int, family: str) -> Iterator[Feature]:
    """What any job does besides."""
    num_calls = rng.randint(1, 5) if family == "calls" else rng.choice([0, 0, 0, 1, 2])
    has_some = family == "calls" or num_calls
    if has_some and rng.random() < 0.5:
        yield ("subgroup", *sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks))))
    for _ in range(num_calls):
        dtype = rng.choice(["float32"] * 5 + ["float64", "int64", "bfloat16"])
        yield (
            "call",
            rng.choice(KINDS[:4] if rng.random() < 0.6 else KINDS),
            dtype,
            rng.choice([1, 12, 1200, 2304, 2304, 9216, 9217]) if rng.random() < 0.95 else 3 << 17,
            rng.choice(["world", "world", "some"]),
            rng.choice(["sum"] * 6 + ["avg", "max", "product"] if dtype != "int64" else ["sum", "max"]),
            rng.choice(WAITS),
            rng.choice(["before", "after", "within"]),
        )
    if num_calls and rng.random() < 0.1:
        yield ("coalesce", rng.randint(1, 3))
    if num_calls and rng.random() < 0.1:
        yield ("wrong", rng.choice(["shape", "type", "keyword", "gather", "scatter"]))
    if rng.random() < 0.06:
        made = rng.randint(0, num_steps - 2)
        yield ("group", made, rng.randint(made + 1, num_steps))
    if rng.random() < 0.04:
        yield ("fork", rng.randint(1, num_steps - 1), rng.choice(["leaves", "runs exit handlers"]))
    if rng.random() < 0.03:
        yield ("loader", rng.choice([1, 2]))
    if rng.random() < 0.05:
        yield ("disable", rng.randint(1, num_steps - 1))
    if rng.random() < 0.1:
        yield ("close", rng.randint(1, num_steps - 1))
    if rng.random() < 0.05:
        yield ("anomaly",)
    if rng.random() < 0.05:
        yield ("profile", rng.randint(0, num_steps - 2))


def _of_one_rank(rng: random.Random, num_ranks: int, num_steps: int, family: str, mode: str) -> Iterator[Feature]:
    """What one rank does and the others do not, or not as often; what is of all ranks stands above."""
    if rng.random() < 0.5:
        return
    kinds = ["skips", "skips", "repeats", "local", "local", "raise_alone", "mode"]
    if family == "ddp":
        kinds += ["extra", "scaler"]
    if family in {"calls", "moe"}:
        kinds += ["unlike"] * 4
    for kind in rng.sample(kinds, rng.choice([1, 1, 2])):
        rank, step = rng.randrange(num_ranks), rng.randint(1, min(num_steps, 30) - 1)
        match kind:
            case "skips" | "repeats" | "scaler":
                yield (kind, rank, step)
            case "local":
                when = rng.choice(["before", "micro", "micro", "after", "between"])
                yield (kind, rank, when, rng.randint(1, 5), rng.choice(["plain", "plain", "ddp"]))
            case "extra":
                yield (kind, rank, max(2, step), rng.randint(1, 9))
            case "raise_alone":
                # A route that is driven by hand is closed by what leaves a step, which is no job's doing.
                where = ["inside", "inside", "outside"] if mode in {"online", "launched", "relaunched"} else ["inside"]
                what = rng.choice(["ValueError", "KeyboardInterrupt", "RuntimeError"])
                yield (kind, rank, step, rng.choice(["optimizer", "between"]), what, rng.choice(where), "goes on")
            case "mode":
                first, last = rng.choice([(0, num_steps), (step, num_steps), (step, step + rng.randint(1, 20))])
                yield (kind, rng.choice(["comm", "dispatch"]), rng.choice([-1, -1, rank]), first, last)
            case _:
                what = rng.choice(["transposed", "gaps", "subclass", "inference", "uneven"])
                calls = {
                    "transposed": ["all_reduce", "all_gather"],  # a reduce-scatter of unlike inputs: `_as_gloo_takes`
                    "gaps": ["all_gather", "reduce_scatter"],
                    "uneven": ["splits"],
                }
                others = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
                yield (kind, rank, what, rng.choice(calls.get(what, others)), max(3, step))


def drawn_fresh(seed: int, num_ranks: int, mode: str, family: str | None = None) -> Program:
    """The program of a number, with what only processes can have that are started for it: once in two programs."""
    rng = random.Random(f"fresh {seed}")
    program = drawn(seed, num_ranks, mode=mode, family=family)
    rank, step = rng.randrange(num_ranks), rng.randint(1, min(program.num_steps, 30) - 1)
    kinds: list[Feature] = [
        ("no_backend",),
        ("spawned",),
        ("launches", rank, step),
        ("again",),
        ("dies", rank, step),
        ("without", rank, rng.choice(["LAGOM_DISABLE", "observe", "stock"])),
    ]
    if rng.random() < 0.5:
        return program
    feature = rng.choice(kinds)
    if feature[0] == "dies":  # what else is under way then may or may not arrive
        program = replace(drawn(seed, num_ranks, mode=mode, family="ddp"), features=())
    return replace(program, features=(*program.features, feature))


_FEATURES_OF: dict[str, Callable[[random.Random, int], Iterator[Feature]]] = {
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "ddp": _ddp,
    "tp": _tp,
    "moe": _moe,
    "pipeline": _pipeline,
}
