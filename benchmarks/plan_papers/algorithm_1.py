"""Algorithm 1 of Centauri's operation tier against every option."""

from collections.abc import Iterator
from random import Random

from lagom_overlap.planners.centauri.operation import MAX_CHUNKS, CommPart, OperationCosts, Parts, algorithm_1, end_s
from lagom_overlap.planners.deadline import SearchBudget
from plan_papers.judged import table

RIGS = (
    ("cluster A, 2 nodes", 300e9, 25e9 / 8, 2, 8, 0.94, 0.002),
    ("cluster B, 2 nodes", 300e9, 100e9 / 8, 2, 8, 0.65, 0.047),
    ("4 nodes of H100, 400 Gb/s per GPU", 450e9, 50e9, 4, 8, 0.18, 0.459),
)
"""Name, bytes per second inside a node and per GPU between nodes, nodes, GPUs of a node; the specification's share of
best options and mean regret of Algorithm 1."""
LATENCY_S, PIECE_S, CASES = 25e-6, 15e-6, 4000


def option_ends(size: float, chain_s: float, free_s: float, rig: tuple[float, float, int, int]) -> dict[str, float]:
    """When the chain ends under every option: even chunks, and the three ways over groups."""
    intra, inter, nodes, in_node = rig
    world = nodes * in_node
    shard = size / world

    def inside(shards: int) -> float:
        return (in_node - 1) * shards * shard / intra + LATENCY_S

    def between(shards: int) -> float:
        return shards * shard / inter + LATENCY_S

    whole_s = (world - 1) / world * size / (in_node * inter)
    ends = {}
    for count in range(1, MAX_CHUNKS + 1):
        parts = [CommPart(0, whole_s / count + LATENCY_S, 1 / count)] * count
        ends[f"even {count}"] = end_s(parts, chain_s, free_s, PIECE_S if count > 1 else 0.0)
    own, node = nodes / world, in_node / world
    groups = {
        Parts.INTER_FIRST: [(between(nodes - 1), own), (inside(nodes), 1 - own)],
        Parts.INTRA_FIRST: [(inside(1), node), (between(world - in_node), 1 - node)],
        Parts.INTRA_FIRST_FINER: [
            (inside(1), node),
            (between(nodes - 1), (nodes - 1) / world),
            (inside(nodes - 1), 1 - node - (nodes - 1) / world),
        ],
    }
    for parts_name, pairs in groups.items():
        ends[parts_name] = end_s([CommPart(0, s, share) for s, share in pairs], chain_s, free_s, PIECE_S)
    return ends


def algorithm_1_regret(
    rig: tuple[float, float, int, int], *, num_cases: int = CASES, seed: int = 0
) -> tuple[float, float, float]:
    """Share of cases in which Algorithm 1 takes the best option, its mean regret, and that of no partition."""
    random = Random(seed)
    _, inter, nodes, in_node = rig
    world = nodes * in_node
    best_count, regret, whole_regret = 0, 0.0, 0.0
    for _ in range(num_cases):
        size = 10 ** random.uniform(6.5, 9)
        comm_s = (world - 1) / world * size / (in_node * inter) + LATENCY_S
        chain_s = comm_s * 10 ** random.uniform(-1, 1)
        free_s = random.choice((0.0, comm_s * 10 ** random.uniform(-1.5, 0.3)))
        costs = OperationCosts(
            comm_s=comm_s,
            chain_s=chain_s,
            free_s=free_s,
            inter_s=(nodes - 1) * size / world / inter + LATENCY_S,
            num_nodes=nodes,
            in_node=in_node,
        )
        choice = algorithm_1(costs)
        ends = option_ends(size, chain_s, free_s, rig)
        taken = f"even {len(choice.shares)}" if choice.parts in (Parts.EVEN, Parts.WHOLE) else choice.parts
        best = min(ends.values())
        best_count += ends[taken] <= 1.001 * best
        regret += ends[taken] / best - 1
        whole_regret += ends["even 1"] / best - 1
    return best_count / num_cases, regret / num_cases, whole_regret / num_cases


def algorithm1(_: SearchBudget) -> Iterator[str]:
    """How often the closed form of the operation tier is right."""
    yield f"## Centauri: Algorithm 1 against all options, {CASES} random gathers per rig, grouped"
    yield ""
    rows = []
    for name, intra, inter, nodes, in_node, stated_best, stated_regret in RIGS:
        best, regret, whole = algorithm_1_regret((intra, inter, nodes, in_node))
        rows.append(
            [name, f"{stated_best:.0%}", f"{best:.0%}", f"{stated_regret:.1%}", f"{regret:.1%}", f"{whole:.1%}"]
        )
    yield from table(
        (
            "rig",
            "best option (prototype)",
            "best option, here",
            "mean regret (prototype)",
            "mean regret, here",
            "no partition",
        ),
        rows,
    )
