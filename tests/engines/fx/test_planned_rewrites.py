"""Every kind of rewrite on four gloo ranks; inputs are small integers, so that equal means equal."""

import pytest

from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Reorder,
    Slide,
    Split,
    Substitute,
    Substitution,
)

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]  # 4 ranks import

AG, RS, AR, A2A = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"


def same(ranks, case, *rewrites):
    outcomes = ranks.call("compare", case, rewrites)
    assert all(errors == [0.0, 0.0] for errors, _ in outcomes), outcomes
    assert len({tuple(names) for _, names in outcomes}) == 1
    return outcomes[0][1]


def test_an_unplanned_graph_computes_what_it_did(ranks):
    for case in ("gather_products", "product_scatter", "product_reduce", "exchange", "two_gathers"):
        same(ranks, case)


@pytest.mark.parametrize("comm", ["all_reduce", "all_reduce_1"])
def test_an_all_reduce_becomes_scatter_and_gather_even_where_it_does_not_divide(ranks, comm):
    names = same(ranks, "product_reduce", Substitute(comm, Substitution.REDUCE_SCATTER_ALL_GATHER))
    assert f"{comm}.rs" in names
    assert f"{comm}.ag" in names


def test_a_reduce_scatter_becomes_one_reduce_per_rank(ranks):
    names = same(ranks, "product_scatter", Substitute(RS, Substitution.REDUCES))
    assert [name for name in names if name.startswith(RS)] == [f"{RS}.{root}" for root in range(4)]


def test_an_all_gather_becomes_one_broadcast_per_rank(ranks):
    same(ranks, "gather_products", Substitute(AG, Substitution.BROADCASTS))


@pytest.mark.parametrize(
    ("case", "gathered", "scattered"),
    [
        # the next product and the step's end need whole rows, the residual and the norm do not
        ("tensor_parallel_blocks", ["sub_1", "add_1", "sub_2"], 2),
        ("data_parallel_update", ["sub", "add", "sub_1"], 2),
    ],
)
def test_gathers_slide_behind_what_works_on_parts(ranks, case, gathered, scattered):
    outcomes = ranks.call("compare_evolved", case)
    assert all(errors == [0.0, 0.0] for errors, _ in outcomes), outcomes
    names = outcomes[0][1]
    assert sorted(name for name in names if ".ag" in name) == sorted(f"all_reduce.ag.{one}" for one in gathered)
    assert sum(name.endswith(".rs") for name in names) == scattered
    assert not {"all_reduce", "all_reduce_1"} & set(names)


def test_ranks_with_different_values_where_they_must_be_equal_are_named_and_nothing_runs(ranks):
    assert ranks.call("replicated", (3, 3, 3, 3)) == [""] * 4
    said = ranks.call("replicated", (3, 3, 5, 3))
    assert all("input 1" in one and "ranks 0 and 2 hold different ones" in one for one in said), said


def test_all_ranks_refuse_where_only_one_group_holds_different_values(ranks):
    assert ranks.call("slid_in_pairs", "alike") == [""] * 4
    said = ranks.call("slid_in_pairs", "other_values")
    assert all("rank 2 works on parts" in one for one in said[:2]), said
    assert all("input 1" in one and "ranks 2 and 3 hold different ones" in one for one in said[2:]), said


def test_all_ranks_refuse_where_one_would_compare_other_inputs(ranks):
    said = ranks.call("slid_in_pairs", "other_inputs")
    assert all("compare input 1" in one and "none on rank 3" in one for one in said), said


def test_an_operator_that_draws_random_numbers_does_not_slide(ranks):
    step = Slide(("all_reduce",), (ChainLink("bernoulli", 0),))
    said = ranks.call("refusals", "reduced_dropout", [step])
    assert all("bernoulli" in one for one in said), said


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("case", "comm"), [("gather_products", AG), ("product_scatter", RS), ("product_reduce", AR), ("exchange", A2A)]
)
def test_a_collective_runs_over_a_mesh_of_two_by_two(ranks, case, comm, order):
    names = same(ranks, case, PartitionGroups(comm, (2, 2), order))
    assert [name for name in names if name.startswith(f"{comm}/")] == [f"{comm}/g{axis}" for axis in order]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_all_gather_is_cut_without_a_chain(ranks, axis):
    names = same(ranks, "gather_products", Split(AG, axis, 2))
    assert f"{AG}#join" in names


def test_an_all_gather_is_cut_along_rows_with_the_products_that_follow(ranks):
    chain = (ChainLink("mm", 0), ChainLink("relu", 0), ChainLink("mm_1", 0))
    names = same(ranks, "gather_products", Split(AG, 0, 4, after=chain))
    assert {f"{AG}#3", "mm#3", "mm#join", "relu#3", "mm_1#join"} <= set(names)
    assert "relu#join" not in names  # nothing else needs the whole of it


def test_an_all_gather_is_cut_along_what_a_product_sums_over(ranks):
    names = same(ranks, "gather_products", Split(AG, 1, 3, after=(ChainLink("mm", 1),)))
    assert "mm#2" in names
    assert "mm#join" in names  # which adds the pieces


@pytest.mark.parametrize(("axis", "op_axis"), [(0, 0), (1, 2)])
def test_a_reduce_scatter_is_cut_with_the_product_that_feeds_it(ranks, axis, op_axis):
    same(ranks, "product_scatter", Split(RS, axis, 2, before=(ChainLink("mm", op_axis),)))


def test_a_chain_before_a_reduce_scatter_reaches_back_over_two_operators(ranks):
    chain = (ChainLink("relu", 0), ChainLink("mm", 0))
    names = same(ranks, "product_scatter", Split(RS, 0, 2, before=chain))
    assert [name for name in names if "#" in name and "relu" in name] == ["relu#0", "relu#1"]


def test_an_all_reduce_is_cut_between_a_product_before_and_one_after(ranks):
    split = Split(AR, 0, 2, before=(ChainLink("mm", 0),), after=(ChainLink("mm_1", 0),))
    same(ranks, "product_reduce", split)


def test_an_all_to_all_is_cut_along_rows_of_every_rank(ranks):
    split = Split(A2A, 1, 2, after=(ChainLink("mm", 0),))
    same(ranks, "exchange", split)


@pytest.mark.parametrize(("op", "axis"), [("mm", 0), ("mm", 1), ("mm", 2), ("relu", 0), ("relu", 1)])
def test_a_computation_is_cut_alone(ranks, op, axis):
    names = same(ranks, "gather_products", Split(op, axis, 2))
    assert {f"{op}#0", f"{op}#1"} <= set(names)
    assert op not in names


def test_an_all_to_all_of_unequal_parts_is_cut_along_columns(ranks):
    names = same(ranks, "unequal_exchange", Split(A2A, 0, 3), Split(f"{A2A}_1", 0, 2, before=(ChainLink("relu", 1),)))
    assert {f"{A2A}#2", f"{A2A}_1#1", "relu#1"} <= set(names)


@pytest.mark.parametrize("case", ["exchange_equal_on_rank_0", "exchange_of_one_row"])
def test_columns_have_one_number_on_ranks_with_equal_parts_and_on_the_others(ranks, case):
    names = same(ranks, case, Split(A2A, 0, 2), Split(f"{A2A}_1", 0, 3))
    assert {f"{A2A}#1", f"{A2A}_1#2"} <= set(names)


@pytest.mark.parametrize("chain", [(), (ChainLink("mm", 0),)])
def test_rows_that_are_equal_on_rank_0_alone_are_cut_on_no_rank(ranks, chain):
    said = ranks.call("refusals", "exchange_equal_on_rank_0", (Split(A2A, 1, 2, after=chain),))
    assert len(said) == 4
    assert all("parts are unequal on this rank" in text for text in said)
    assert said[0].startswith("rank 1: ")


def test_the_compiler_pass_shows_the_planner_no_rows_that_are_unequal_on_another_rank(ranks):
    for equal, axes, names in ranks.call("exchange_in_the_compiler_pass"):
        assert equal
        assert axes in (None, [[1], [1]])  # rank 0 alone is asked
        assert {f"{A2A}#0", f"{A2A}#1"} <= set(names)


def test_a_plan_file_is_for_all_ranks_of_an_exchange_whatever_rows_they_have(ranks, tmp_path):
    assert ranks.call("exchange_under_a_plan_file", str(tmp_path), (Split(A2A, 0, 3),)) == [True] * 4
    said = ranks.call("exchange_under_a_plan_file", str(tmp_path), (Split(A2A, 1, 2),))
    assert all("rank 1: " in text or text.startswith("plan ") for text in said)
    assert all("shard axis is 1, must be 0 to 0" in text for text in said)


def test_the_ranks_are_told_why_rank_0_has_no_plan(ranks):
    said = ranks.call("planner_that_refuses")
    assert said == ["JobError: nothing fits", *["JobError: rank 0: nothing fits"] * 3]


@pytest.mark.parametrize("step", [PartitionGroups(A2A, (2, 2), (0, 1)), Fuse((A2A, f"{A2A}_1"))])
def test_what_needs_equal_parts_refuses_an_all_to_all_of_unequal_ones(ranks, step):
    with pytest.raises(Exception, match="unequal parts"):
        ranks.call("compare", "unequal_exchange", (step,))


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (PartitionGroups(AG, (2, 2), (1, 0)), Substitute(AR, Substitution.REDUCE_SCATTER_ALL_GATHER)),
        (Split(RS, 0, 2), PartitionGroups(AR, (2, 2), (0, 1))),
    ],
)
def test_collectives_of_several_tensors_are_rewritten_as_one(ranks, steps):
    names = same(ranks, "several_at_once", *steps)
    assert steps or {AG, RS, AR} <= set(names)


def test_gathers_of_different_sizes_are_fused(ranks):
    names = same(ranks, "two_gathers", Fuse((AG, f"{AG}_1")))
    assert f"{AG}+1" in names


def test_reduce_scatters_of_different_sizes_are_fused(ranks):
    same(ranks, "two_gathers", Fuse((RS, f"{RS}_1")))


def test_collectives_that_depend_on_each_other_are_not_fused(ranks):
    with pytest.raises(Exception, match=r"depends on"):
        ranks.call("compare", "exchange", (Fuse((A2A, f"{A2A}_1")),))


def test_a_rewrite_of_what_a_rewrite_made_is_possible(ranks):
    names = same(
        ranks,
        "product_reduce",
        Substitute(AR, Substitution.REDUCE_SCATTER_ALL_GATHER),
        PartitionGroups(f"{AR}.ag", (2, 2), (1, 0)),
        PartitionGroups(f"{AR}.rs", (2, 2), (0, 1)),
    )
    assert f"{AR}.ag/g1" in names


def test_an_order_is_followed_and_waits_come_late(ranks):
    order = [AG, f"{AG}_1", "mm_1", "sum_1", "mm", RS, "cat", f"{RS}_1"]
    names = same(ranks, "two_gathers", Reorder(tuple(order)))
    assert names == order


def test_an_order_against_the_data_flow_is_refused(ranks):
    with pytest.raises(Exception, match="before"):
        ranks.call("compare", "gather_products", (Reorder(("mm", AG)),))


def test_a_second_stream_gets_process_groups_of_its_own(ranks):
    names = ranks.call("names_of", "two_gathers")[0]
    same(ranks, "two_gathers", Reorder(tuple(names), ((f"{AG}_1", "inter"), (f"{RS}_1", "inter"))))


def test_an_all_gather_in_three_steps_gathers_what_one_does(ranks):
    names = same(ranks, "gather_products", PartitionGroups(AG, (2, 2), (1, 0, 1)))
    assert {f"{AG}/g1", f"{AG}/g0", f"{AG}/g1r"} <= set(names)
