import ast
import math
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlap_generator
from lagom_overlap.collective import CommConfig
from overlap_generator import CONFIGS, DEFAULT, FROZEN, SPACE, SimulatedGroup, draw_group

pytestmark = pytest.mark.long


def places(draw: st.DataObject, group: SimulatedGroup) -> tuple[int, ...]:
    return tuple(draw.draw(st.integers(0, len(CONFIGS) - 1)) for _ in range(group.num_comms))


def test_the_generator_knows_nothing_of_tuners_costs_and_simulation() -> None:
    tree = ast.parse(Path(overlap_generator.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {str(module) for module in imported if str(module).startswith("lagom_overlap")}
    assert ours == {"lagom_overlap.collective", "lagom_overlap.tuners.problem", "lagom_overlap.workload"}


def test_the_draws_and_the_physics_are_frozen() -> None:
    # If this fails on purpose, raise FROZEN and run the benchmark again: old figures are worth nothing then.
    corner, peak = SPACE.subspaces[0].minimum, SPACE.subspaces[1].maximum
    times = []
    for index, num_comms in product(range(4), (1, 2, 4, 8)):
        group = draw_group(1, index, num_comms)
        mixed = (peak, DEFAULT, corner, peak) * 2
        for assignment in (group.problem.default, (corner,) * num_comms, mixed[:num_comms]):
            measured = group.exact(assignment)
            times += [measured.makespan_s, measured.comp_s, *measured.comm_s]
    checksum = math.fsum(place * value for place, value in enumerate(times, start=1))
    assert FROZEN == "1"
    assert checksum == pytest.approx(306.3607964129439, rel=1e-10)


@pytest.mark.parametrize(
    "num_comms", [1, pytest.param(2, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)]
)
def test_the_default_is_bad_enough_to_examine_anybody(num_comms: int) -> None:
    regrets = []
    for index in range(100 if num_comms < 4 else 30):
        group = draw_group(1, index, num_comms)
        # Fewer starts find a worse best, so the regret here is a lower bound.
        regrets.append(group.exact(group.problem.default).makespan_s / group.oracle(num_starts=2)[1] - 1)
    assert fmean(regrets) >= 0.08


def test_half_of_the_groups_have_a_curve_of_another_form() -> None:
    forms = [draw_group(3, index, 1).form for index in range(20)]
    assert forms.count("foreign") == forms.count("saturating") == 10


def test_the_same_draw_gives_the_same_group_and_another_gives_another() -> None:
    first, again = draw_group(5, 2, 2), draw_group(5, 2, 2)
    assert first.problem == again.problem
    assert first.exact(first.problem.default) == again.exact(first.problem.default)
    others = [draw_group(5, 3, 2), draw_group(6, 2, 2)]
    assert all(other.exact(other.problem.default) != first.exact(first.problem.default) for other in others)


def test_the_oracle_finds_what_brute_force_finds_for_two_collectives() -> None:
    everything = np.array(list(product(range(len(CONFIGS)), repeat=2)))
    for index in range(4):
        group = draw_group(11, index, 2)
        best_s = float(group.makespans(everything).min())
        assignment, found_s = group.oracle()
        assert best_s <= found_s * (1 + 1e-12)
        assert found_s == pytest.approx(best_s, rel=2e-3)
        assert group.exact(assignment).makespan_s == pytest.approx(found_s, rel=1e-12)


def test_the_oracle_is_exact_for_one_collective() -> None:
    group = draw_group(11, 0, 1)
    assert group.oracle()[1] == pytest.approx(min(group.exact((config,)).makespan_s for config in CONFIGS), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 200), st.integers(1, 5))
def test_the_batch_and_the_single_simulation_agree(data: st.DataObject, index: int, num_comms: int) -> None:
    group = draw_group(2, index, num_comms)
    chosen = places(data, group)
    single = group.exact(tuple(CONFIGS[place] for place in chosen))
    assert group.makespans(np.array([chosen]))[0] == pytest.approx(single.makespan_s, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 200), st.integers(1, 4))
def test_neither_stream_is_faster_than_alone(data: st.DataObject, index: int, num_comms: int) -> None:
    group = draw_group(2, index, num_comms)
    chosen = places(data, group)
    times = group.exact(tuple(CONFIGS[place] for place in chosen))
    kernels_s, comm_s = group._kernel_s[:-1, -1], group._comm_s
    assert times.comp_s >= kernels_s.sum() * (1 - 1e-9)
    for j, place in enumerate(chosen):
        assert times.comm_s[j] >= comm_s[j, place] * (1 - 1e-9)
    assert times.makespan_s == max(times.comp_s, times.total_comm_s)


def test_a_kernel_that_is_covered_takes_its_contended_time_and_the_rest_its_own() -> None:
    # By hand from the tables: walk the kernels, each under the collective until its 1 / (x slow) share is used up.
    group = draw_group(4, 1, 1)
    place = CONFIGS.index(DEFAULT)
    left, now = 1.0, 0.0
    for i in range(len(group._kernel_s) - 1):
        under_s, own_s = group._kernel_s[i, place], group._kernel_s[i, -1]
        comm_s = left * group._comm_s[0, place] * group._slow[i]
        covered_s = min(under_s, comm_s)
        left -= covered_s / (group._comm_s[0, place] * group._slow[i])
        now += covered_s + (1 - covered_s / under_s) * own_s
    assert group.exact((DEFAULT,)).comp_s == pytest.approx(now, rel=1e-9)


def test_noise_is_log_normal_around_the_true_times() -> None:
    group = draw_group(1, 0, 2)
    true = group.exact(group.problem.default)
    rng = Random(7)
    logs = [math.log(group.measure(group.problem.default, rng, 0.05).comp_s / true.comp_s) for _ in range(4000)]
    assert fmean(logs) == pytest.approx(0.0, abs=4 * 0.05 / 4000**0.5)
    assert math.sqrt(fmean(value**2 for value in logs)) == pytest.approx(0.05, rel=0.05)
    assert group.measure(group.problem.default, rng, 0.0) == true


def test_a_configuration_outside_the_space_is_our_bug() -> None:
    with pytest.raises(KeyError):
        draw_group(1, 0, 1).exact((CommConfig(num_channels=8),))
    with pytest.raises(ValueError, match="num_comms is 0"):
        draw_group(1, 0, 0)
