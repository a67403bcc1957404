"""Symmetric ranks, in a process of the job: only the first host runs, and its ranks have the world of all hosts.

A rank of another host is absent: it is taken to do what the rank with the same place on the first host does. Whoever
waits for it in a collective waits for nobody more, and finds what that rank gave. The emulated NCCL must know which
ranks of the job a communicator is made of, which NCCL's interface does not say: it is told the group that PyTorch
names, makes or calls in this thread, right before. What needs a process that is not there is refused by one line.

PyTorch has no public place where a group's ranks and its communicator meet. Two private functions of
`torch.distributed.distributed_c10d` are wrapped; a release without them is refused.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, Final, NoReturn, Protocol

from lagom_emulate.settings import SYMMETRIC_HOSTS_VARIABLE
from lagom_overlap.errors import LagomError
from lagom_overlap.stderr import write_lines

_WORLDS: Final = ("WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
_C10D: Final = "torch.distributed.distributed_c10d"


class SymmetricRanksError(LagomError, RuntimeError):
    """Raised in the job where it needs a rank that is not started."""


class SymmetricDevice(Protocol):
    """What this module asks of the emulated driver."""

    def name_group(self, num_started: int, ranks: Sequence[int], own: int, peer: int) -> None:
        """The ranks of the communicator that this thread makes next, by their numbers in the job; none: not known."""

    def refuse(self, text: str) -> None:
        """Ends the job with a line."""


def enter_world(environment: MutableMapping[str, str]) -> None:
    """Gives a rank the world of all hosts; a launcher, and whom a rank starts, are left as they are."""
    num_hosts = environment.get(SYMMETRIC_HOSTS_VARIABLE, "")
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if not num_hosts or not local or environment.get("WORLD_SIZE") != local:
        return
    for name in _WORLDS:
        if environment.get(name, "").isdecimal():
            environment[name] = str(int(environment[name]) * int(num_hosts))
    # Otherwise one rank in 128 would make a unique id, and all would wait for the absent ranks.
    environment["TORCH_NCCL_RANKS_PER_ROOT"] = environment["WORLD_SIZE"]


def groups_of_job(torch: Any, device: SymmetricDevice) -> "SymmetricGroups | None":
    """The groups of a rank among symmetric ones, begun; None for any other process.

    Raises:
        SymmetricRanksError: if something in its environment cannot be had with ranks that are not started.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not os.environ.get(SYMMETRIC_HOSTS_VARIABLE) or not local.isdecimal() or not torch.distributed.is_available():
        return None
    groups = SymmetricGroups(device, import_module(_C10D), int(os.environ["RANK"]), int(local))
    groups.start(os.environ)
    return groups


class SymmetricGroups:
    """The process groups of one rank. `rank` is its number in the job, the ranks below `num_started` are processes."""

    def __init__(self, device: SymmetricDevice, c10d: Any, rank: int, num_started: int) -> None:
        self._device, self._c10d, self._rank, self._num_started = device, c10d, rank, num_started
        self._members: dict[str, Sequence[int]] = {}
        self._has_told = False

    def start(self, environment: Mapping[str, str]) -> None:
        """Wraps what makes PyTorch's groups.

        Raises:
            SymmetricRanksError: if this release or this environment cannot be had.
        """
        world = self._num_started * int(environment.get(SYMMETRIC_HOSTS_VARIABLE) or 1)
        if environment.get("WORLD_SIZE", str(world)) != str(world) or self._rank >= self._num_started:
            self._refuse(
                f"rank {self._rank} of WORLD_SIZE {environment.get('WORLD_SIZE')} with LOCAL_WORLD_SIZE "
                f"{self._num_started}; what is started must be all ranks of one host"
            )
        if environment.get("LAGOM_RUN_MODE") == "online":
            self._refuse("online tuning decides with all ranks; emulate fewer hosts without --symmetric")
        if environment.get("TORCH_DIST_INIT_BARRIER") == "1":
            self._refuse("with TORCH_DIST_INIT_BARRIER=1 every group waits for all ranks on the store")
        try:
            naming, making = self._c10d._process_group_name, self._c10d._new_process_group_helper
            places = signature(making)
            if not {"group_size", "global_ranks_in_group", "backend", "group_name"} <= places.parameters.keys():
                raise AttributeError("_new_process_group_helper has other parameters")
        except AttributeError as error:
            self._refuse(f"not with this release of PyTorch: {error}")

        def named(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            name = naming(ranks, *args, **kwargs)
            self._members[str(name)] = tuple(ranks)
            self._announce(tuple(ranks))  # split_group makes its communicators right after
            return name

        def made(*args: Any, **kwargs: Any) -> Any:
            given = places.bind(*args, **kwargs)
            values = given.arguments
            ranks = tuple(values["global_ranks_in_group"]) or tuple(range(values["group_size"]))
            self._members[str(values["group_name"])] = ranks
            values["backend"] = self._with_processes(ranks, values["backend"])
            self._announce(ranks)
            try:
                return making(*given.args, **given.kwargs)
            finally:
                self._announce(())

        self._c10d._process_group_name, self._c10d._new_process_group_helper = named, made

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """What `call`, an operator that communicates, gives: communicators may be made at their first use."""
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        ranks = self._members.get(self._group_name(values), ())
        peer = values.get("dst", values.get("src"))
        is_sent = func._schema.name in ("c10d::send", "c10d::recv_")
        self._announce(ranks, ranks[peer] if is_sent and isinstance(peer, int) and peer < len(ranks) else -1)
        try:
            return call()
        finally:
            self._announce(())

    def _group_name(self, values: Mapping[str, Any]) -> str:
        group = values.get("process_group")
        if group is None:
            return str(values.get("group_name", ""))
        return str(self._c10d.ProcessGroup.unbox(group).group_name)

    def _announce(self, ranks: Sequence[int], peer: int = -1) -> None:
        is_member = self._rank in ranks
        own = ranks.index(self._rank) if is_member else -1
        self._device.name_group(self._num_started, ranks if is_member else (), own, peer)

    def _with_processes(self, ranks: Sequence[int], backend: Any) -> Any:
        """The backend without gloo, which connects the processes of all ranks, where NCCL serves the GPUs' tensors."""
        if self._rank not in ranks or max(ranks) < self._num_started:
            return backend
        devices = self._c10d.BackendConfig(self._c10d.Backend(backend)).get_device_backend_map()
        kept = {device: name for device, name in devices.items() if str(name).startswith("nccl")}
        if not kept:
            self._refuse(f"a {backend} group connects ranks that are not started ({_few(ranks)})")
        if len(kept) == len(devices):
            return backend
        if not self._has_told and self._rank == 0:
            self._has_told = True
            write_lines(
                "lagom emulate: --symmetric: groups over several hosts have NCCL only; collectives of CPU tensors "
                "would need ranks that are not started"
            )
        return ",".join(f"{device}:{name}" for device, name in kept.items())

    def _refuse(self, text: str) -> NoReturn:
        line = f"--symmetric: {text}"
        self._device.refuse(line)
        raise SymmetricRanksError(line)


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    return f"ranks {shown}{', ...' if len(ranks) > 4 else ''}"
