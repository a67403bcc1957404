"""The benchmark of implementations, judged by the frozen generator and by brute force."""

import json
from importlib import import_module
from random import Random

import pytest

from drawn_kinds import ALGORITHMS, KINDS, KindGroup
from kind_searches import hunt, kinds_of, within
from subspaces import main

generator = import_module("overlap_generator")
numpy = import_module("numpy")
GroupSearch = import_module("lagom_overlap.tuners.model_based.search").GroupSearch


@pytest.mark.parametrize("num_comms", [1, 4])
def test_its_first_kind_is_the_generator_s_ring(num_comms: int) -> None:
    for index in range(4):
        group, plain = KindGroup(5, index, 3, num_comms), generator.draw_group(5, index, num_comms)
        rng = Random(index)
        both = [config for config in group.configs if config in generator.PLACE and config.protocol == "simple"]
        for _ in range(10):
            assignment = tuple(rng.choice(both) for _ in range(num_comms))
            true, found = plain.exact(assignment), group.measure(assignment, rng, 0.0)
            # Pressure is relative to the largest rate, which the generator looks for among more channels.
            assert found.comm_s == pytest.approx(true.comm_s, rel=1e-3)
            assert (found.comp_s, found.makespan_s) == pytest.approx((true.comp_s, true.makespan_s), rel=1e-3)


def test_the_best_is_that_of_brute_force() -> None:
    group = KindGroup(5, 1, 6, 1)
    assert group.best[1] == min(group.makespan_s((config,)) for config in group.configs)
    assert group.kinds_cost(group.best[0]) == 0.0
    pair = KindGroup(5, 1, 3, 2)
    places = numpy.array([(a, b) for a in range(0, len(pair.configs), 3) for b in range(0, len(pair.configs), 3)])
    assert pair.best[1] <= pair.makespans(places).min() * (1 + 1e-12)


def test_what_kinds_cost_is_the_best_inside_them() -> None:
    group = KindGroup(5, 2, 6, 1)
    for kind in range(6):
        inside = [config for place, config in enumerate(group.configs) if group.kind_of[place] == kind]
        expected = min(group.makespan_s((config,)) for config in inside) / group.best[1] - 1
        assert group.kinds_cost((inside[0],)) == pytest.approx(expected, abs=1e-12)


def test_kinds_differ_in_what_they_cost_the_computation() -> None:
    drawn = [kind for index in range(12) for kind in KindGroup(5, index, 9, 1).kinds]
    assert {kind.name for kind in drawn} == set(KINDS)
    assert {kind.algorithm for kind in drawn} == set(ALGORITHMS)
    for knob in ("sms", "pressure", "flight"):
        values = [getattr(kind, knob) for kind in drawn]
        assert min(values) < 0.8
        assert max(values) > 1.2
    groups = [KindGroup(5, index, 6, 1) for index in range(12)]
    same = [group.fastest_alone == kinds_of(group.best[0]) for group in groups]
    assert 0 < sum(same) < len(same)


def test_a_search_within_kinds_ends_there_or_with_the_default() -> None:
    group = KindGroup(5, 0, 4, 2)
    problem, rng = group.problem, Random(0)
    chosen = (group.kinds[2].name, group.kinds[1].name)
    found = hunt(
        GroupSearch, within(problem, chosen), lambda assignment: group.measure(assignment, rng, 0.0), seed=0
    ).assignment
    for config, kind, default in zip(found, chosen, problem.default, strict=True):
        assert config == default or kinds_of((config,)) == (kind,)


def test_one_seed_gives_one_table_with_a_row_per_way(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["drawn", "--groups", "1", "--kinds", "3", "--num-comms", "1", "--seed", "3", "--json"]
    tables = []
    for _ in range(2):
        main(argv)
        tables.append(json.loads(capsys.readouterr().out)["rows"])
    assert tables[0] == tables[1]
    assert [row["way"] for row in tables[0]][:4] == ["default", "(fastest alone)", "halving", "scouts"]
    assert all(row["right_kind_share"] == 1 for row in tables[0] if row["way"] == "told the right kinds")


@pytest.mark.parametrize("argv", [["nothing"], ["drawn", "--kinds", "1"], ["drawn", "--groups", "0"]])
def test_a_bad_command_line_ends_with_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
