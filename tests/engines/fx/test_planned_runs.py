"""Running a planned graph on four gloo ranks: across steps, micro-batches together, one order on all ranks."""

import pytest

pytest.importorskip("torch")

from torch.distributed.fsdp import FSDPModule

from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

UNITS = ("0", "1", "2", "3", "4")

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]  # 4 ranks import


def test_a_parameter_gather_runs_into_the_next_step_and_changes_nothing(ranks):
    outcomes = ranks.call("steps_across", 4)
    assert all(equal for equal, _ in outcomes)
    assert any(was_open for _, was_open in outcomes)  # else the gather was always over before the step ended


def test_micro_batches_are_launched_together_and_change_nothing(ranks):
    for equal, issued, _ in ranks.call("micro_batches_together"):
        assert equal
        assert issued == ["all_gather_into_tensor", "all_gather_into_tensor_1"]


def test_ranks_with_one_order_agree(ranks):
    digests = ranks.call("orders", -1)
    assert len(set(digests)) == 1


def test_a_rank_with_another_order_is_named_and_nothing_runs(ranks):
    with pytest.raises(Exception, match=r"ranks 0 and 2 .* collective 0 is '.*all_gather_into_tensor .*all_gather.*_1"):
        ranks.call("orders", 2)


def test_dropout_draws_the_same_numbers_under_a_plan(ranks):
    assert all(ranks.call("dropout_under_a_plan"))


def test_a_collective_that_fails_is_an_error_where_its_result_is_used(ranks):
    """What fails on a stream fails all that follows there: no rank goes on alone."""
    for own, following in ranks.call("failing_collective"):
        assert own.startswith(
            "RuntimeError: _c10d_functional::all_gather_into_tensor() Expected a value of type 'Tensor'"
        )
        assert following == own


@pytest.mark.parametrize(
    "settings",
    [
        Fsdp2Settings(units=UNITS, forward_prefetch=2, backward_prefetch=2),
        Fsdp2Settings(units=UNITS, kept=UNITS),
        pytest.param(
            Fsdp2Settings(
                units=UNITS, forward_prefetch=1, kept=("2", "4"), reduce_buffers=3, separate_reduce_group=True
            ),
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="needs PyTorch 2.13"
            ),
        ),
    ],
)
def test_settings_for_fsdp2_leave_losses_and_gradients_as_they_are(ranks, settings):
    for plain, told in ranks.call("fsdp2_losses", settings):
        assert plain == told


def test_fsdp2_and_its_settings_train_alike_in_turns_and_are_timed_by_the_slowest_rank(ranks):
    kept = Fsdp2Settings(units=("0", "1", "2"), forward_prefetch=1, kept=("1", "2"))
    runs = ranks.call("fsdp2_side_by_side", kept)
    assert {(error, num) for error, num, _ in runs} == {(0.0, 3)}
    assert len({times for *_, times in runs}) == 1
    said = ranks.call("fsdp2_side_by_side", Fsdp2Settings(units=("0", "other")))
    assert all("the plan's unit 'other' is none of the other's" in one for one in said)


def test_a_rank_with_other_settings_for_fsdp2_is_named_and_nothing_is_set(ranks):
    settings = Fsdp2Settings(units=("0", "1"), forward_prefetch=1)
    said = ranks.call("fsdp2_settings_that_differ", settings, Fsdp2Settings(units=("0", "1"), backward_prefetch=1))
    assert all("ranks" in one and "have different settings for FSDP2; nothing was set" in one for one in said)


def test_the_compiler_pass_plans_on_rank_0_and_all_ranks_run_its_order(ranks):
    outcomes = ranks.call("as_compiler_pass")
    assert all(equal for equal, _, _ in outcomes)
    assert len({digest for _, _, digest in outcomes}) == 1


def test_one_line_lets_inductor_run_our_plan(ranks):
    outcomes = ranks.call("planned_by_inductor")
    assert all(equal for equal, *_ in outcomes)
    assert len({digest for *_, digest in outcomes}) == 1
    for _, calls, planned, _ in outcomes:
        assert calls == planned
        assert (calls.count("gather"), calls.count("scatter"), calls.count("mm")) == (4, 4, 8)
