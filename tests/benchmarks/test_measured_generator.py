"""The second examination paper knows nothing of tuners, is frozen, and its noise has ramps and tails."""

import ast
import math
from pathlib import Path
from random import Random
from statistics import median

import pytest

import measured_generator
import measured_replay
from lagom_overlap.collective import CommConfig
from measured_choices import read_choices, read_noise
from measured_generator import FROZEN, draw_group
from measured_replay import Machine, replay
from overlap_generator import DEFAULT, SPACE

pytestmark = pytest.mark.long


def test_the_generator_shares_no_formula_with_models_tuners_or_the_other_generator() -> None:
    tree = ast.parse(Path(measured_generator.__file__).read_text(encoding="utf-8"))
    imported = {
        (node.module, name.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    ours = {module for module, _ in imported if str(module).startswith("lagom_overlap")}
    assert ours == {"lagom_overlap.collective", "lagom_overlap.tuners.problem", "lagom_overlap.workload"}
    # Of the other generator settings, random numbers and the search for the best, none of its wires, bodies or times.
    assert {name for module, name in imported if module == "overlap_generator"} == {
        "CHANNELS", "CONFIGS", "DEFAULT", "PLACE", "SPACE", "Draw", "oracle_of",
    }  # fmt: skip


def test_the_draws_and_the_physics_are_frozen() -> None:
    # If this fails on purpose, raise FROZEN and run the benchmark again: old figures are worth nothing then.
    times = []
    for index, num_comms in ((0, 1), (1, 4), (2, 8), (3, 2)):
        group = draw_group(1, index, num_comms)
        for config in (DEFAULT, SPACE.subspaces[0].minimum, SPACE.subspaces[1].maximum):
            measured = group.exact((config,) * num_comms)
            times += [measured.makespan_s, measured.comp_s, *measured.comm_s]
    assert FROZEN == "measured-1"
    assert math.fsum(place * value for place, value in enumerate(times, start=1)) == pytest.approx(
        9.505962075981905, rel=1e-9
    )


def test_kernels_tell_a_tuner_nothing_but_grid_and_time() -> None:
    group = draw_group(1, 0, 4)
    traffic = set()
    for num_sms in (80, 108, 132):
        works = [op.work for op in group.problem.group.computations]
        waves = [math.ceil(work.num_blocks / num_sms) for work in works]  # type: ignore[union-attr]
        rates = {
            round(work.num_blocks * work.block_bytes / (wave * work.wave_s), -6)  # type: ignore[union-attr]
            for work, wave in zip(works, waves, strict=True)
        }
        traffic.add(len(rates))
    assert 1 in traffic  # on the GPU that was drawn every kernel seems to move the same share of the bandwidth


def test_a_search_meets_a_ramp_at_its_start_and_a_tail_now_and_then() -> None:
    ramped = tails = 0
    for index in range(40):
        group, rng = draw_group(1, index, 1), Random(index)
        true_s = group.exact((DEFAULT,)).makespan_s
        ratios = [group.measure((DEFAULT,), rng, 0.001).makespan_s / true_s for _ in range(40)]
        ramped += ratios[0] > 1.2
        tails += sum(ratio > 1.15 for ratio in ratios[4:])
        assert median(ratios) == pytest.approx(1.0, abs=0.02)
    assert 10 <= ramped <= 30
    assert 0.03 <= tails / (40 * 36) <= 0.1


SURFACE = """run,nodes,gpus,collective,bytes,algorithm,protocol,channels,compute_kernel,mode,mean_ms,median_ms,steady_ms
a,1,8,all_reduce,1048576,auto,auto,default,x,overlap,9,8.5,8.0
a,1,8,all_reduce,1048576,ring,ll,default,x,overlap,9,10,
a,1,8,all_reduce,1048576,tree,simple,default,x,overlap,9,6,
a,1,8,all_reduce,1048576,nvls,simple,default,x,overlap,0,0,
a,1,8,all_reduce,2097152,ring,ll,default,x,overlap,9,10,
"""


def test_a_surface_becomes_choices_and_every_arm_ends_with_one_of_its_settings(tmp_path: Path) -> None:
    surface, noise = tmp_path / "surface.csv", tmp_path / "noise.csv"
    surface.write_text(SURFACE, encoding="utf-8")
    noise.write_text("steady_median_ms,iterations_ms\n2.0,2.8 2.6 2.0 2.0 2.1 2.0\n", encoding="utf-8")
    (choice,), left_out = read_choices(surface)
    assert [named.line for named in left_out] == [5, 6]
    assert choice.true_s[CommConfig()] == 8.5e-3, "only one setting has a steady part, all have medians"
    assert len(choice.true_s) == 3
    assert choice.best_s == 6e-3
    raw, left_out = read_noise(noise)
    assert not left_out
    lists = raw.of(1)
    assert lists == [[1.4, 1.3, 1.0, 1.0, 1.05, 1.0]]
    first = Machine(lists, Random(1)).times(1.0, 6)
    assert sorted(first) == sorted(lists[0])
    rows = replay([choice], raw, 2)
    assert {row["tuner"].removesuffix(measured_replay.JUDGED) for row in rows} == {
        *measured_replay.TUNERS,
        *measured_replay.BANDITS,
    }
    by_tuner = {row["tuner"]: row for row in rows}
    assert by_tuner["default"]["mean_regret"] == pytest.approx(8.5 / 6 - 1)
    assert by_tuner["bandit"]["mean_regret"] == 0.0
