"""Prices of random collectives on random clusters move as their inputs do, but where NCCL itself changes its mind."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost.model import ContentionModel
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.hardware import Cluster, load_preset, preset_names

KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
NUM_GROUPS = 250
SLACK = 1e-4


def drawn(seed: int) -> tuple[Cluster, Collective, float]:
    """A cluster with wires of 0.3 to 1.5 times a preset's, a collective on it, and by how much something is faster."""
    rng = random.Random(seed)
    cluster = load_preset(rng.choice(preset_names()))
    cluster = replace(cluster, num_nodes=max(4, cluster.num_nodes))
    num_ranks = rng.choice([2, 4, 8, *(nodes * cluster.gpus_per_node for nodes in (1, 2, 4))])
    num_ranks = min(max(2, num_ranks), cluster.num_gpus)
    part = 512 * num_ranks
    num_bytes = max(1, int(2 ** rng.uniform(12, 31)) // part) * part
    wires = {
        end: replace(link, bytes_per_s=link.bytes_per_s * rng.uniform(0.3, 1.5))
        for end, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    return replace(cluster, **wires), Collective(rng.choice(KINDS), num_bytes, num_ranks), rng.uniform(1.001, 3.0)


@cache
def seen(cluster: Cluster, collective: Collective) -> tuple[CommConfig, object, float]:
    """What NCCL would run, on which graphs, and how long it takes."""
    model = ContentionModel(cluster, load_profile("plausible"))
    config, topology = model.default_config(collective), topology_of(cluster, collective.num_ranks)
    graphs = [each and (each.num_channels, each.intra_type) for each in (topology.ring, topology.tree, topology.nvls)]
    return config, graphs, model.collective(collective, config).seconds()


def faster(cluster: Cluster, what: str, by: float) -> Cluster:
    if what == "memory":
        return replace(cluster, gpu=replace(cluster.gpu, hbm_bytes_per_s=by * cluster.gpu.hbm_bytes_per_s))
    link = getattr(cluster, what)
    return replace(cluster, **{what: replace(link, bytes_per_s=by * link.bytes_per_s)})


@pytest.mark.parametrize("what", ["intra", "inter", "memory"])
def test_more_bandwidth_is_never_slower_unless_nccl_runs_something_else(what: str) -> None:
    slower, num_others = [], 0
    for seed in range(NUM_GROUPS):
        cluster, collective, by = drawn(seed)
        *way, before_s = seen(cluster, collective)
        *other_way, after_s = seen(faster(cluster, what, by), collective)
        num_others += way != other_way
        if way == other_way and after_s > before_s * (1 + SLACK):
            slower.append((seed, after_s / before_s))
    assert slower == []
    assert num_others < NUM_GROUPS // 3  # or nothing is compared


def test_more_bytes_are_never_faster_unless_nccl_runs_something_else() -> None:
    faster_ones, num_others = [], 0
    for seed in range(NUM_GROUPS):
        cluster, collective, by = drawn(seed)
        part = 512 * collective.num_ranks
        more = replace(collective, num_bytes=int(collective.num_bytes * by) // part * part)
        *way, before_s = seen(cluster, collective)
        *other_way, after_s = seen(cluster, more)
        num_others += way != other_way
        if way == other_way and after_s < before_s * (1 - SLACK):
            faster_ones.append((seed, after_s / before_s))
    assert faster_ones == []
    assert num_others < NUM_GROUPS // 2


@pytest.mark.parametrize("preset", ["h100_dgx", "a100_dgx", "a40_bridged"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_price_jumps_with_the_stated_bandwidth_of_a_node(preset: str, kind: CollectiveKind) -> None:
    """Links of 0.1 to 3 times the preset's in steps of 2 %: no step moves a price by more than 7 %."""
    cluster = load_preset(preset)
    for size in (256 * 1024, 64 * 1024 * 1024):
        scales = [0.1 * 1.02**step for step in range(172)]
        times = [seen(faster(cluster, "intra", by), Collective(kind, size, 8))[-1] for by in scales]
        assert max(before / after for before, after in pairwise(times)) < 1.07
        assert min(before / after for before, after in pairwise(times)) > 1 - SLACK


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_collective_is_no_faster_than_the_memory_that_feeds_it(num_nodes: int) -> None:
    """Each byte that a rank gets is written into its memory once at least."""
    cluster = load_preset("h100_dgx", num_nodes)
    slow = replace(cluster, gpu=replace(cluster.gpu, hbm_bytes_per_s=1e9))
    collective = Collective(CollectiveKind.ALL_GATHER, 32 << 20, 8 * num_nodes)
    least_s = collective.num_bytes * (1 - 1 / collective.num_ranks) / 1e9
    assert seen(slow, collective)[-1] >= least_s
