"""`OnlineTuner`: two lines in a training loop that tune its collectives while it runs.

    tuner = OnlineTuner(model, optimizer)
    for batch in loader:
        with tuner.step():
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
    tuner.save("lagom.json")

What is decided, when, and how ranks agree: `leader`, `member`, `exchange`. Here it meets torch: the store of the
default process group, the route, the adapters, the user's own profiler, the end of the process.
"""

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as everybody calls it

from lagom_overlap import __version__
from lagom_overlap.collective import ConfigKey, LaunchConfig
from lagom_overlap.collective.sites import RoleCycle, SiteSetting, key_of, role_cycles
from lagom_overlap.errors import BackendError, BundleError, LagomError
from lagom_overlap.export.saved import SavedSettings, check_adapters, read_saved, write_saved
from lagom_overlap.online.device import (
    DeviceEvent,
    collectives_issued,
    engine_in_use,
    job_device,
    longest_wait_s,
    nccl_in_use,
    note_model,
)
from lagom_overlap.online.graph_captures import GRAPH_CAPTURES
from lagom_overlap.online.job_profiler import OWN_PROFILER, why_not_now
from lagom_overlap.online.job_store import refuse_others, roll_call, store_of
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.launch_steps import is_pipelined
from lagom_overlap.online.options import DISABLE_VARIABLE, OnlineOptions, is_disabled
from lagom_overlap.online.ranks.exchange import Exchange, Store, StoreLost
from lagom_overlap.online.ranks.member import Adopted, Member, calls_so_far
from lagom_overlap.online.ranks.messages import SETTLED, SwitchState
from lagom_overlap.online.ranks.presence import Presence
from lagom_overlap.online.replaced_ranks import REPLACED_RANKS
from lagom_overlap.online.routes.base import GLOO, Route
from lagom_overlap.online.routes.carve_out import open_compute_route
from lagom_overlap.online.routes.compute import BothSidesRoute, ComputeRoute
from lagom_overlap.online.routes.plugin_owner import PLUGIN_OWNER
from lagom_overlap.online.step_clock import EventClock
from lagom_overlap.record import utc_now
from lagom_overlap.signal_handlers import handing_over
from lagom_overlap.tuners.registry import check_tuner_name, searches_launches

if TYPE_CHECKING:  # one rank checks, and it alone loads what does; few jobs have a listener
    from lagom_overlap.online.live import Announcer, OnEvent
    from lagom_overlap.online.ranks.check import Check
    from lagom_overlap.results.contest import ContestResult

_log = logging.getLogger(__name__)

PROFILED_APART: Final = 2
"""Where the profiler times the steps, every second one at most: see `job_profiler`."""
_instances = count()
"""Tuners of this process so far: each speaks under a prefix of its own."""


class OnlineTuner:
    """Tunes the collectives of a model's training steps; made on every rank, after the process group and the model.

    Without `route` it is the job's own: NCCL's (`nccl_route`) or gloo's. `adapters` names what to attach on gloo
    (`"fsdp2"`, `"ddp"`, `"calls"`); None takes those that fit. `compute` sets the computation's side, torch's SM
    carve-out where there is one. `config` is a file that `save` wrote: the job starts with it and searches only if it
    drifts, or if the file is of another job. `optimizer` only says what a step is; `step()` counts them. Neither it nor
    the model is kept alive. `enabled` False leaves the job alone, and so does `LAGOM_DISABLE=1`: from the start, or,
    looked at before each report, from the end of a window on all ranks, until the state is `done`. `on_event` is called
    on this rank after each step in which state, reason or settings changed (`online/live.py`). All ranks must make the
    same tuners in the same order; options other than the journal's path are rank 0's.

    Raises:
        BackendError: if there is no process group.
        BundleError: if `config` is no file, on rank 0, which reads it; the other ranks then run untouched.
        JobError: if an adapter is named twice.
        UnknownNameError: if a tuner or adapter does not exist.
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        options: OnlineOptions | None = None,
        config: str | Path | None = None,
        journal: str | Path | None = None,
        adapters: Sequence[str] | None = None,
        route: Route | None = None,
        compute: ComputeRoute | None = None,
        enabled: bool = True,
        on_event: "OnEvent | None" = None,
        **changes: object,
    ) -> None:
        chosen = replace(options or OnlineOptions(), **changes)  # type: ignore[arg-type]  # checked by the class
        for name in (chosen.tuner, *chosen.compare):
            check_tuner_name(name)
        check_adapters(adapters or ())
        self.options = chosen
        note_model(model)
        self._member: Member | None = None
        self._collectives: Route | None = None
        self._is_in_step = self._is_pipelined = False
        self._announcer: Announcer | None = None
        if on_event is not None:
            from lagom_overlap.online import live  # noqa: PLC0415

            self._announcer = live.Announcer(on_event)
        self._off_reason = ""
        self._rank, self._pid, self._engine = 0, os.getpid(), ""
        self._adapters = tuple(adapters or ())
        if not dist.is_available() or not dist.is_initialized():
            raise BackendError("online tuning needs a process group: call torch.distributed.init_process_group first")
        self._world_size, self._rank = dist.get_world_size(), dist.get_rank()
        if self._world_size == 1:
            _log.info("online tuning: one rank has no collectives to tune")
            self._take_no_part("one rank has no collectives to tune")
            return
        name = str(next(_instances))
        store = store_of(name, chosen.timeout_s)
        # Connections of their own: what waits at one holds up nobody who speaks to the others.
        presence = Presence(
            store_of(name, chosen.timeout_s),
            rank=self._rank,
            num_ranks=self._world_size,
            counts=self._calls_so_far,
            issued=self._issued_so_far,
            marks=self._issued_at_last,
        )
        who_is_here = roll_call(self._world_size, chosen.timeout_s)
        exchange = Exchange(
            store,
            rank=self._rank,
            num_ranks=self._world_size,
            timeout_s=chosen.timeout_s,
            reopen=partial(store_of, name, chosen.timeout_s),
            trouble=lambda: presence.trouble() or who_is_here(),
            longest_s=longest_wait_s,
        )
        refuse = partial(refuse_others, exchange, name)
        if why := handing_over(partial(self._why_off, exchange, enabled=enabled)):
            refuse(why)
            self._take_no_part(f"rank {self._rank}: it {why}")
            return
        if self._rank == 0 and (warning := chosen.budget_warning):
            _log.warning("online tuning: %s", warning)
        with contextlib.ExitStack() as undo:
            undo.callback(refuse, "could not begin")
            self._engine = engine_in_use()
            computation = compute or open_compute_route()
            self.options = chosen = _settable(chosen, computation)
            own_store = store_of(name, chosen.timeout_s)
            self._collectives = route or _open_route(model, own_store, chosen, adapters)
            self._route: Route = BothSidesRoute(self._collectives, computation)
            self._is_pipelined = self._collectives.name == GLOO and is_pipelined()
            undo.callback(self._route.close)
            undo.callback(presence.close)
            presence.start()
            self._member = self._join(model, exchange, presence, config, journal or chosen.journal)
            undo.pop_all()  # all went well
        atexit.register(_leave, weakref.ref(self))

    @property
    def _own(self) -> Member | None:
        """The rank's part, but not in a child that it forked: two processes on one connection garble it for both."""
        return self._member if os.getpid() == self._pid else None

    def step(self) -> contextlib.AbstractContextManager[None]:
        """The job's next step, all of it: forward, backward, optimizer."""
        member = self._own
        return contextlib.nullcontext() if member is None else _Step(self, member)

    def updated(self) -> None:
        """The step's update is made: what follows until the step ends (data, checkpoints) is not the step's time."""
        if self._is_in_step and (member := self._own) is not None:
            member.mark_end()

    @property
    def state(self) -> SwitchState:
        """What the tuner is doing; OFF where it was never on."""
        return self._member.plan.state if self._member is not None else SwitchState.OFF

    @property
    def reason(self) -> str:
        """Why, in words: the trial under way, the verdict, or what ended the tuning."""
        return self._member.plan.reason if self._member is not None else self._off_reason

    def _take_no_part(self, reason: str) -> None:
        self._off_reason = reason
        self._announce()

    def _announce(self) -> None:
        if self._announcer is not None:
            state = self.state
            self._announcer.after_step(self.num_steps, state, state.words, self.reason, len(self.settings))

    @property
    def settings(self) -> tuple[SiteSetting, ...]:
        """What is set now, by call site; empty where everything is as without us."""
        return self._member.settings if self._member is not None else ()

    @property
    def num_steps(self) -> int:
        """Steps of the job so far, as the tuner counts them."""
        return 0 if self._member is None else self._member.num_steps

    @property
    def num_steps_left(self) -> int:
        """The most steps until the state under way ends, on rank 0; 0 elsewhere and where it is settled."""
        leader = None if self._member is None else self._member.leader
        return 0 if leader is None else leader.num_steps_left

    @property
    def start_check(self) -> "Check | None":
        """The check of the settings that the job was started with, on rank 0, under way or over; None without one."""
        leader = None if self._member is None else self._member.leader
        return None if leader is None else leader.start_check

    @property
    def priorities(self) -> Mapping[str, Mapping[str, float]]:
        """Lagom's metric H by group and collective in the trial under way, on rank 0; the least climbs next."""
        leader = None if self._member is None else self._member.leader
        return {} if leader is None else leader.priorities

    @property
    def contest(self) -> "ContestResult | None":
        """How the tuners of `compare` and `tuner` did against the default, on rank 0 once that is decided."""
        leader = None if self._member is None else self._member.leader
        return None if leader is None else leader.contest

    @property
    def is_settled(self) -> bool:
        """Whether the search is over, one way or the other."""
        return self.state in (SwitchState.WATCH, SwitchState.DONE, SwitchState.OFF)

    def save(self, path: str | Path) -> bool:
        """Writes what the job was tuned to, on rank 0; False if there is nothing to write.

        That is what is settled. While a job is tuned again, or is off, it is what an earlier verdict of this job
        adopted, if any did and none has overturned it since; the file and the log then say so.

        Raises:
            OutputError: if the file cannot be written.
        """
        adopted = self._found()
        if adopted is None:
            if self._rank == 0:
                _log.warning("nothing to save: online tuning is at %r (%s)", str(self.state), self.reason)
            return False
        if self._rank == 0:
            saved = SavedSettings(
                world_size=self._world_size,
                route=self._route.name,
                is_adopted=bool(adopted.settings),
                settings=adopted.settings,
                cycles=role_cycles(self._member.cycles) if self._member is not None else (),
                size_octaves=adopted.size_octaves,
                adapters=self._adapters,
                engine=self._engine,
                verdict=adopted.verdict,
                date=utc_now(),
            )
            write_saved(Path(path), saved)
        return True

    def _found(self) -> Adopted | None:
        """What there is to save; without settings the default was not beaten. None where nothing was found out."""
        if self._member is None:
            return None
        adopted, is_settled = self._member.adopted, self.state in SETTLED
        if is_settled and (self.settings or adopted is None):
            return Adopted(self.settings, self.reason, self._member.size_octaves)
        if adopted is None or self.state is SwitchState.CHECK:  # what is checked stays until it has lost
            return adopted
        is_over = is_settled or self.state in (SwitchState.FROZEN, SwitchState.OFF)
        since = "later online tuning was" if is_over else "a new search was under way, at"
        words = f"{since} {str(self.state)!r} ({self.reason})"
        if self._rank == 0:
            _log.warning("saving the settings adopted before: %s", words)
        return replace(adopted, verdict=f"{adopted.verdict}; {words}")

    def freeze(self, reason: str = "frozen by the job") -> None:
        """Goes back to the untouched job for good, at the end of this window, on all ranks."""
        if (member := self._own) is not None:
            member.stop(reason)

    def release(self) -> None:
        """For a job that destroys its process groups: no step can follow, and nothing of ours is left open for one."""
        if (member := self._own) is not None:
            member.release("the job destroyed its process groups")
            if self._collectives is not None and self._collectives.name == GLOO:
                self._collectives.close()

    def close(self) -> None:
        """Ends the tuning on all ranks, after this window if they go on. Done by itself when the process ends."""
        PLUGIN_OWNER.release(self._collectives)
        if (member := self._own) is not None:
            member.close("the job closed its tuner")

    # Asked by the thread of `Presence`, which so keeps a tuner that the job dropped until the job's end: only there is
    # it closed in time, before Python takes the threads down.

    def _calls_so_far(self) -> dict[str, int]:
        return {} if self._collectives is None else calls_so_far(self._collectives)

    def _issued_so_far(self) -> dict[str, int]:
        """Collectives of all kinds and sizes."""
        if self._collectives is None or self._collectives.name != GLOO:
            return collectives_issued("nccl", "cuda")
        # gloo counts what stages send each other, in which they differ.
        return {} if self._is_pipelined else collectives_issued(GLOO, "cpu")

    def _issued_at_last(self) -> dict[str, int]:
        """How many had been issued with the last that can be set, where the route notes it."""
        counts = () if self._collectives is None else self._collectives.counts().values()
        return {count.wire: count.issued_at_last for count in counts if count.issued_at_last is not None}

    def _join(
        self,
        model: nn.Module,
        exchange: Exchange,
        presence: Presence,
        config: str | Path | None,
        journal: str | Path | None,
    ) -> Member:
        route = self._route
        is_profiled = route.name != GLOO
        if is_profiled:
            OWN_PROFILER.watch()
        leader = None
        if exchange.rank == 0:
            from lagom_overlap.online.ranks.leader import Leader  # noqa: PLC0415 - one rank searches
            from lagom_overlap.online.ranks.search import study_factory  # noqa: PLC0415

            started, cycles, octaves = _started(
                config, self._world_size, self._engine, route.is_exact if self.options.deterministic else None
            )
            leader = Leader(
                self.options,
                study_factory(self.options),
                num_ranks=self._world_size,
                route_name=route.name,
                started=started,
                cycles=cycles,
                size_octaves=octaves,
                steps_apart=PROFILED_APART if is_profiled else 1,
                has_one_clock=not is_profiled or not _has_virtual_steps(os.environ),
            )
        # On a GPU the host's clock does not tell how long a step takes.
        device = job_device() if is_profiled else None
        keeps = exchange.rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        return Member(
            exchange,
            route,
            leader=leader,
            journal=JournalFile(Path(journal) if journal and keeps else None),
            is_exact_only=self.options.deterministic,
            why_stop=_why_stop,
            why_not=_why_not if is_profiled else why_not_now,
            why_hold=why_hold,
            presence=presence,
            why_alone=partial(_why_alone, weakref.WeakSet(part for part in model.modules() if isinstance(part, DDP))),
            steps=EventClock(partial(DeviceEvent, device)) if device is not None else None,
        )

    @staticmethod
    def _why_off(exchange: Exchange, *, enabled: bool) -> str:
        """Why this rank takes no part; empty if it does."""
        if not enabled or is_disabled():
            return "is disabled there"
        try:
            others = exchange.greet(__version__)
        except StoreLost as error:
            return f"found that {error}"
        except Exception as error:  # ours: it must not end the job
            _log.exception("online tuning is off on rank %d", exchange.rank)
            return f"failed: {error}"
        if others == __version__:
            return ""
        why = f"runs lagom-overlap {__version__}, another rank {others}: install the same release on every machine"
        level = logging.WARNING if exchange.rank == 0 else logging.INFO
        _log.log(level, "online tuning is off, everything runs untouched: rank %d %s", exchange.rank, why)
        return why


class _Step(contextlib.AbstractContextManager[None]):
    """A step of the job; a class, because in a settled job it runs in every step and a generator takes longer."""

    __slots__ = ("_member", "_tuner")

    def __init__(self, tuner: OnlineTuner, member: Member) -> None:
        self._tuner, self._member = tuner, member

    def __enter__(self) -> None:
        tuner = self._tuner
        if tuner._is_in_step:
            raise ValueError("tuner.step() is open already: one step at a time, closed before the next begins")
        tuner._is_in_step = True
        try:
            handing_over(self._member.begin_step)
        except BaseException:
            tuner._is_in_step = False
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        try:
            if kind is None:
                handing_over(self._member.end_step)
            else:
                self._member.fail_step(f"its step ended with {kind.__name__}")
            if self._tuner._announcer is not None:
                self._tuner._announce()
        finally:
            self._tuner._is_in_step = False


def _why_stop() -> str:
    """Why this rank wants the job untouched from now on; empty if it does not."""
    if is_disabled():
        return f"{DISABLE_VARIABLE} is set"
    return f"{REPLACED_RANKS.by} replaces ranks while the others run on" if REPLACED_RANKS.by else ""


def why_hold() -> str:
    """Why nothing may be switched now; empty if it may.

    A dispatch mode of the job's (CommDebugMode, a counter of flops) sees what PyTorch is asked to run: other
    collectives, where ours take their place. So it sees the same in all of its steps. What calls itself a part of the
    machinery (emulated GPUs, fake tensors) is no mode of the job's.
    """
    count = getattr(torch._C, "_len_torch_dispatch_stack", int)  # without that private name nothing is held
    modes = [type(torch._C._get_dispatch_stack_at(place)) for place in range(count())]
    is_held = not all(getattr(mode, "is_infra_mode", bool)() for mode in modes)
    return "a dispatch mode of the job's is active" if is_held else ""


def _why_alone(models: Iterable[DDP]) -> str:
    """Why ranks may make unequal numbers of steps; empty where they do not, as far as the job says."""
    is_uneven = any(getattr(getattr(model, "_join_config", None), "enable", False) for model in models)
    return "its inputs may be uneven (DDP's join)" if is_uneven else ""


def _why_not() -> str:
    """Why a step on a GPU cannot be measured; empty if it can."""
    return GRAPH_CAPTURES.why_not() or OWN_PROFILER.why_not()


def _has_virtual_steps(environment: Mapping[str, str]) -> bool:
    """Whether steps take an emulated GPU's time, and the host's clock tells another one's."""
    is_emulated = bool(environment.get("LAGOM_EMULATION_SOCKET"))
    return is_emulated and environment.get("LAGOM_EMULATION_PYTHON_CLOCK") != "virtual"


def _leave(reference: "weakref.ref[OnlineTuner]") -> None:
    tuner = reference()
    if tuner is not None:
        tuner.close()


def _open_route(model: nn.Module, store: Store, options: OnlineOptions, adapters: Sequence[str] | None) -> Route:
    """The route of the job's backend."""
    nccl = nccl_in_use()
    if nccl is not None:
        # Not at the top, here and below: the side of gloo or of NCCL is loaded by a job on it.
        from lagom_overlap.online.routes.nccl import open_nccl_route  # noqa: PLC0415

        return open_nccl_route(model, nccl, new_algorithms=options.new_algorithms)
    from lagom_overlap.online.adapters.gloo import open_gloo_route  # noqa: PLC0415

    return open_gloo_route(model, store, min(options.timeout_s, longest_wait_s()), adapters)


def _settable(options: OnlineOptions, compute: ComputeRoute) -> OnlineOptions:
    """The options without carve-outs where they cannot be set."""
    if not options.sm_carveouts:
        return options
    try:
        compute.check(LaunchConfig(sm_carveout=options.sm_carveouts[-1]))
    except LagomError as error:
        _log.warning("%s; tuning the collectives only", error)
        return replace(options, sm_carveouts=())
    if not searches_launches(options.tuner):
        words = "sm_carveouts are not searched: tuner %r knows the collectives only, 'both_sides' searches both"
        _log.warning(words, options.tuner)
    return options


def _started(
    config: str | Path | None, world_size: int, engine: str, is_exact: Callable[[ConfigKey], bool] | None
) -> tuple[tuple[SiteSetting, ...], tuple[RoleCycle, ...], int]:
    """The settings in a file, a step's calls and how wide its classes of sizes are.

    Where the file is not of this job there are none, with a warning, and the job is tuned as if without it. `is_exact`,
    if given, must hold of a site, or the site is left alone.

    Raises:
        BundleError: if there is no such file: a slip at the start of a job, which a search would only hide.
    """
    if config is None:
        return (), (), 0
    if not Path(config).is_file():
        raise BundleError(f"config {str(config)!r} is no file; give one that OnlineTuner.save wrote, or None to search")
    try:
        saved = read_saved(Path(config), world_size=world_size, engine=engine)
        settings = saved.settings
        kept = tuple(s for s in settings if is_exact is None or is_exact(key_of(s.site)))
    except (BundleError, ValueError) as error:  # a site may be none that there can be
        _log.warning("%s; searching as if there were none", error)
        return (), (), 0
    if len(kept) < len(settings):
        words = "deterministic: %d of %d saved settings are left out, they could reorder a reduction"
        _log.warning(words, len(settings) - len(kept), len(settings))
    return (kept, saved.cycles, saved.size_octaves) if kept else ((), (), 0)


__all__ = ["LagomError", "OnlineOptions", "OnlineTuner"]
