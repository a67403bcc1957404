"""Our planner inside `torch.compile`, in one line.

    from lagom_overlap.export.inductor import plan_compiled_graphs

    plan_compiled_graphs()
    step = torch.compile(step, dynamic=False)

Every rank calls it after `init_process_group` and before the first compilation. By default it reorders and nothing
else: results are those of the graph without a plan, bit for bit. Operators are timed alone on the ranks that compile;
a collective during a computation takes longer than alone, which the plan does not know.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import distributed as dist
from torch._inductor import config

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.engines.fx.inductor_pass import Decide, PlanPass
from lagom_overlap.engines.fx.order_settings import keep_order
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.planners.base import Planner, PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.times import ModelTimes, NamedTimes
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.rewrite.steps import Rewrite

PROFILE: Final = "plausible"
_ANY_GPU: Final = "a40_nvlink"
"""The machine if none is named: with measured times its speed only scales split pieces, which our planner makes none
of."""
DEFAULT_WORK: Final = SearchBudget(20.0)
"""The search budget of one graph: about five seconds of one core, less if the search ends early."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerDecision:
    """A planner as a `Decide` of `PlanPass`.

    `cluster` says which ranks share a node and, where a time was not measured, what the cost model takes for it.
    `prefetch` is how many gathered parameter groups may be held at once (None: no limit). `work`, not the clock,
    ends the search: of the same times every rank would make the same plan.
    """

    cluster: Cluster
    planner: Planner = field(default_factory=lambda: Ours(split=False))
    work: SearchBudget = DEFAULT_WORK
    prefetch: int | None = None
    memory_limit_bytes: int | None = None

    def __call__(self, capture: IssuedStep, times_s: Mapping[str, float]) -> Sequence[Rewrite]:
        """The plan of one graph.

        Raises:
            JobError: if no order fits the memory limit.
        """
        placed = capture.placed_on(self.cluster)
        model = ModelTimes(ContentionModel(self.cluster, load_profile(PROFILE)))
        problem = PlanProblem(
            iteration=placed.iteration,
            cluster=self.cluster,
            times=NamedTimes(times_s, placed.iteration, model),
            groups=placed.groups,
            prefetch=self.prefetch,
            memory_limit_bytes=self.memory_limit_bytes,
            exact=True,
            work=self.work,
        )
        plan = self.planner.plan(problem)
        before = predict(problem, replace(placed.issued, is_dataflow=True)).overlap
        after = predict(problem, plan.iteration).overlap
        _log.info(
            "%s: %d collectives, predicted without contention %.3g s -> %.3g s, exposed %.3g s -> %.3g s, bound %.3g s",
            capture.iteration.name,
            len(placed.iteration.comms),
            before.makespan_s,
            after.makespan_s,
            before.exposed_s,
            after.exposed_s,
            plan.lower_bound_s,
        )
        return plan.rewrites if after.makespan_s < before.makespan_s else ()


def plan_compiled_graphs(
    *,
    cluster: str | None = None,
    planner: Planner | None = None,
    decide: Decide | None = None,
    measure: bool = True,
    million_steps: float = DEFAULT_WORK.million_steps,
    budget_s: float | None = None,
    prefetch: int | None = None,
    memory_limit_bytes: int | None = None,
) -> PlanPass:
    """Lets Inductor plan every graph with collectives that it compiles from now on; returns the pass, which knows them.

    `cluster` is a preset (`lagom_overlap.hardware.preset_names`), filled node by node; without one, ranks share nodes
    as the launcher says (LOCAL_WORLD_SIZE). `decide` takes the planner's place (`lagom_overlap.PlanFile`: plans that
    were made before, and nothing is timed). Without `measure` times come from the cost model of that preset. The search
    does `million_steps` of work per graph, which finds the same plan of the same times however loaded the machine is;
    with `budget_s` it ends after that many seconds all the same. Settings of `torch._inductor.config` change:
    `post_grad_custom_post_pass`, after what a list there holds (PyTorch 2.15), and those that would undo the plan,
    which are turned off (`engines.fx.order_settings`).

    Raises:
        JobError: if another pass is in that place already, or no process group is open.
    """
    if not dist.is_initialized():
        raise JobError("plan_compiled_graphs: open the process group first (torch.distributed.init_process_group)")
    there: object = config.post_grad_custom_post_pass
    if not (there is None or isinstance(there, (PlanPass, list))):
        raise JobError("torch._inductor.config.post_grad_custom_post_pass holds another pass: it has place for one")
    decision = PlannerDecision(
        cluster=_cluster(cluster),
        planner=planner or Ours(split=False),
        work=SearchBudget(million_steps, budget_s),
        prefetch=prefetch,
        memory_limit_bytes=memory_limit_bytes,
    )
    plan_pass = PlanPass(decide or decision, measure=measure and decide is None)
    others = [each for each in there if not isinstance(each, PlanPass)] if isinstance(there, list) else None
    passes: Any = plan_pass if others is None else [*others, plan_pass]  # one of two types by PyTorch's release
    config.post_grad_custom_post_pass = passes
    keep_order(config)
    return plan_pass


def _cluster(name: str | None) -> Cluster:
    """The named machine with as many nodes as the ranks fill, or ranks on nodes as they were launched."""
    num_ranks = dist.get_world_size()
    if name is not None:
        preset = load_preset(name)
        return replace(preset, num_nodes=-(-num_ranks // preset.gpus_per_node))
    on_node = os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))
    if not on_node.isdecimal() or not int(on_node) or num_ranks % int(on_node):
        raise JobError(f"LOCAL_WORLD_SIZE is {on_node!r}, must divide the {num_ranks} ranks")
    return replace(
        load_preset(_ANY_GPU), gpus_per_node=int(on_node), num_nodes=num_ranks // int(on_node), max_gpus_per_node=None
    )
