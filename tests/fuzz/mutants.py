"""Defects put into our sources as they are imported: does the fuzzer find them?

Each is a text of a module and what stands in its place; a text that is no longer there is an error. D1, D3 and D4 are
defects that this project had.
"""

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import spec_from_loader
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`module` with `old` replaced by `new`."""

    module: str
    old: str
    new: str
    what: str


_FSDP2 = "lagom_overlap.online.adapters.fsdp2"
_DDP = "lagom_overlap.online.adapters.ddp"
MUTANTS: dict[str, Mutant] = {
    "D1": Mutant(
        _FSDP2,
        "        undo = [_attach_one(group, route, in_flight) for group in groups]\n",
        "        undo = [_attach_one(group, route, in_flight) for group in groups]\n"
        "        inner = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]\n"
        "        for one, after in zip(inner, inner[1:]):\n"
        "            undo.append(one.register_forward_hook(lambda *_, after=after: after.unshard() and None).remove)\n",
        "modules are gathered ahead in the order of registration, also under no_grad",
    ),
    "D3": Mutant(_DDP, "buffer.mul_(1.0 / num_ranks)", "buffer.div_(num_ranks)", "DDP's hook divides by n"),
    "D4": Mutant(
        "lagom_overlap.online.routes.group_route",
        "        if not isinstance(group, dist.ProcessGroup) or group in c10d._world.pg_coalesce_state:\n",
        "        if False:\n",
        "groups that this rank is not in, and coalesced calls, are taken by the route",
    ),
    "future": Mutant(
        "lagom_overlap.online.routes.gloo_work",
        "    def get_future(self)",
        "    def get_no_future(self)",
        "D4: handles without get_future",
    ),
    "undrained": Mutant(
        _FSDP2,
        "        self._pass = _NO_PASS\n        self.drain()\n",
        "        self._pass = _NO_PASS\n",
        "reduce-scatters are not waited for at the end of backward",
    ),
    "read early": Mutant(
        _FSDP2,
        "            param.sharded_param.grad is not None\n            or param.offload_to_cpu",
        "            param.offload_to_cpu",
        "a reduce-scatter is left in flight where its result is added to a gradient",
    ),
    "hooks": Mutant(
        _FSDP2,
        "    return not (\n        getattr(everywhere,",
        "    return not False if True else not (\n        getattr(everywhere,",
        "reduce-scatters are left in flight under hooks that read gradients in backward",
    ),
    "mean": Mutant(
        "lagom_overlap.online.routes.gloo",
        "            target.div_(len(row[0].communicator.ranks))\n",
        "            pass\n",
        "a mean is left a sum",
    ),
    "stale": Mutant(
        "lagom_overlap.engines.gloo_engine",
        "handles = (post() for post in posts)\n",
        "handles = [post() for post in posts][:-1]\n",
        "the last slice of a call is not waited for",
    ),
    "bounds": Mutant(
        "lagom_overlap.engines.gloo_engine",
        "bounds if num_ranks == 2 or all(sums_by_part(size, num_ranks) for size in sizes) else [(0, part)]",
        "bounds",
        "a sliced reduce-scatter sums in another order on more than two ranks",
    ),
    "joined": Mutant(
        _DDP,
        "is_joinable = model is not None and model._join_config.enable",
        "is_joinable = False",
        "DDP's hook does not know uneven inputs",
    ),
    "threads": Mutant(
        "lagom_overlap.online.routes.gloo",
        "            if group.clock is not None:\n                group.clock.close()\n",
        "            pass\n",
        "the clock's thread is left behind",
    ),
}


def put_in(name: str) -> None:
    """Puts a defect into the module when it is imported."""
    sys.meta_path.insert(0, _Finder(MUTANTS[name]))


class _Finder:
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._mutant.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        spec = spec or PathFinder.find_spec(name, path, target)
        assert spec is not None, name
        assert spec.loader is not None, name
        return spec_from_loader(name, _Loader(spec.loader, self._mutant), origin=spec.origin)


class _Loader:
    def __init__(self, loader: Any, mutant: Mutant) -> None:
        self._loader, self._mutant = loader, mutant

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: Any) -> None:
        source = self._loader.get_source(module.__name__)
        assert source.count(self._mutant.old) == 1, f"{module.__name__} has no such text: {self._mutant.old}"
        exec(
            compile(source.replace(self._mutant.old, self._mutant.new), module.__spec__.origin, "exec"), module.__dict__
        )
