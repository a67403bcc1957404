"""What one rank of a random program does and the others do not, or not as often; stock PyTorch goes on with it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import WIDTH, width_of
from programs import Program
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

Note = Callable[[str, Any], None]


class Counting(TorchDispatchMode):
    """Sees every operator, and lets it be."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class Unequal:
    """This rank's part of it; `note` keeps what came of it."""

    def __init__(self, program: Program, note: Note) -> None:
        self._program, self._note, self._rank = program, note, dist.get_rank()
        self.num_steps = program.num_steps
        if (joined := program.get("join_all")) is not None and self._is_me(joined[0]):
            self.num_steps += joined[1]
        self._left = program.get("leaves")
        self._scaler = torch.amp.GradScaler("cpu") if program.has("scaler") else None
        self._locals = [_Local(*feature) for feature in program.all("local")]

    def _is_me(self, rank: int) -> bool:
        """Programs are made smaller: then the last rank takes the place of those that are no more."""
        return self._rank == min(rank, dist.get_world_size() - 1)

    def _is_mine(self, name: str, number: int) -> bool:
        return any(self._is_me(feature[0]) and feature[1] == number for feature in self._program.all(name))

    def raises(self) -> tuple[Any, ...] | None:
        """As `raise` has it."""
        alone = self._program.get("raise_alone")
        return alone[1:] if alone is not None and self._is_me(alone[0]) else self._program.get("raise")

    # Ranks that end before others. ------------------------------------------------------------------------------------

    def has_left(self, number: int) -> bool:
        """Whether this rank makes no such step any more; dies here if that is how it leaves."""
        if self._is_mine("dies", number):
            time.sleep(0.5)  # what is under way to others arrives
            os.kill(os.getpid(), signal.SIGKILL)
        return self._left is not None and self._is_me(self._left[0]) and number > self._left[1]

    def is_alone(self, number: int) -> bool:
        """Whether a rank has left: nothing is exchanged any more."""
        return self._left is not None and number > self._left[1]

    @contextlib.contextmanager
    def joined(self, model: nn.Module) -> Iterator[None]:
        """Around the whole training, of which one rank has more."""
        joined = self._program.get("join_all")
        if joined is None or not isinstance(model, DistributedDataParallel):
            yield
        else:
            with model.join(divide_by_initial_world_size=joined[2]):
                yield

    # Within steps. ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def mode(self, number: int) -> Iterator[None]:
        """A dispatch mode that is active in some steps, on all ranks or on one (-1: all)."""
        kind, who, first, last = self._program.get("mode") or ("", 0, 0, 0)
        if not (first <= number < last and (who < 0 or self._is_me(who))):
            yield
            return
        mode = CommDebugMode() if kind == "comm" else Counting()
        with mode:
            yield
        # Settings in force count otherwise, as the guide says; where a mode is always active there are none.
        if who < 0 and self._program.mode in {"online", "launched"} and last - first >= self._program.num_steps:
            counts = mode.get_total_counts() if isinstance(mode, CommDebugMode) else mode.num_collectives
            self._note(f"step {number}: collectives that a mode saw", counts)

    def at(self, when: str, number: int) -> None:
        """A place of the step: "before", "micro" (after each batch), "after", "between" (steps)."""
        for local in self._locals:
            if self._is_me(local.rank) and local.when == when and number % local.every == 0:
                self._note(f"step {number}: loss of the local model {when}", local.train(number))
        if when == "between" and self._is_mine("launches", number):
            self._note(f"step {number}: another job", launched(self._program))

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward begins with."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def update(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """As often as this rank makes it."""
        if self._is_mine("skips", number):
            return
        if self._scaler is None:
            optimizer.step()
        else:
            if self._is_mine("scaler", number):
                for parameter in optimizer.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.grad.fill_(torch.inf)
            self._scaler.step(optimizer)
            self._scaler.update()
        if self._is_mine("repeats", number):
            optimizer.step()

    def extra_steps(
        self, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, around: Callable[[], Any]
    ) -> None:
        """Steps of the model that this rank makes by itself, without exchanging gradients."""
        for rank, step, count in self._program.all("extra"):
            if not (self._is_me(rank) and step == number and isinstance(model, DistributedDataParallel)):
                continue
            for extra in range(count):
                with around(), model.no_sync():
                    loss = model(torch.full((2, width_of(self._program)), 1.0 + extra)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                self._note(f"step {number}: loss of extra step {extra}", loss.item())


class _Local:
    """A tiny model of one rank, with an optimizer of its own; `how` is "plain", or "ddp" in a group of that rank."""

    def __init__(self, rank: int, when: str, every: int, how: str) -> None:
        self.rank, self.when, self.every = min(rank, dist.get_world_size() - 1), when, every
        self._model: nn.Module = nn.Linear(8, 8)
        if how == "ddp":
            group = dist.new_group([self.rank])
            if dist.get_rank() == self.rank:
                self._model = DistributedDataParallel(self._model, process_group=group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def train(self, number: int) -> float:
        loss = self._model(torch.full((2, 8), 1.0 + number)).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def launched(program: Program) -> list[Any]:
    """A job of another torchrun, started by a rank of this one: how it ended, and what it computed."""
    small = Program(seed=program.seed, num_ranks=2, mode=program.mode, family="ddp", num_steps=12)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = Path(os.environ["TMPDIR"]) / "job nested"
    rank = [str(Path(__file__).with_name("fresh_rank.py")), "env", "2", "0", sys.argv[4], small.text(), str(out)]
    code = subprocess.run([*command, *rank], check=False).returncode
    return [code, *(out.with_name(f"{out.name}{number}").read_text() for number in range(2))]


# Calls whose arguments are of another kind on one rank. ---------------------------------------------------------------


class Subclass(torch.Tensor):
    """As a library may have one."""


def unlike_call(rank: int, what: str, kind: str, first: int, step: int) -> list[torch.Tensor]:
    """A call that `rank`, from a step on, makes with a tensor, or split sizes, of another kind; what it gave."""
    n, me = dist.get_world_size(), dist.get_rank()
    rank, is_unlike = min(rank, n - 1), step >= first
    whole = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH) + 100 * me + step
    if kind == "splits":
        # Given by all ranks, as the guide asks for: even ones, but for what `rank` keeps to itself.
        least = WIDTH * WIDTH // n
        counts = [[least] * n for _ in range(n)]
        if is_unlike:
            counts[rank][rank] -= 5
        arriving, leaving = [row[me] for row in counts], counts[me]
        arrived = torch.empty(sum(arriving))
        splits = (arriving, leaving) if is_unlike else ()
        dist.all_to_all_single(arrived, whole.flatten()[: sum(leaving)], *splits)
        return [arrived]
    x = _as_it_is_there(whole, what) if is_unlike and me == rank else whole
    match kind:
        case "all_reduce":
            dist.all_reduce(x)
            return [x.detach().as_subclass(torch.Tensor)]
        case "all_gather":
            out = torch.empty(n * WIDTH, WIDTH)
            dist.all_gather_into_tensor(out, x)
        case "all_to_all":
            out = torch.empty(WIDTH, WIDTH)
            dist.all_to_all_single(out, x)
        case _:
            out = torch.empty(WIDTH // n, WIDTH)
            dist.reduce_scatter_tensor(out, x)
    return [out]


def _as_it_is_there(x: torch.Tensor, what: str) -> torch.Tensor:
    match what:
        case "transposed":
            return x.t()
        case "gaps":
            return torch.zeros(WIDTH, 2 * WIDTH)[:, ::2].copy_(x)
        case "subclass":
            return x.as_subclass(Subclass)
        case _:
            with torch.inference_mode():
                return x.clone()
