"""`lagom diff`: what was set otherwise, times with their intervals, and what cannot be compared."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from kineto_traces import KinetoFile

from lagom_overlap.cli import main
from lagom_overlap.collective import CollectiveKind, CommConfig, ConfigTable
from lagom_overlap.collective.sites import CallType, Site, SiteSetting
from lagom_overlap.errors import BundleError
from lagom_overlap.export.saved import SavedSettings, write_saved
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.nccl_plugin.table_writer import encode_table, write_table
from lagom_overlap.results.step_times import RunSteps, write_step_times
from lagom_overlap.verbs.diff import ratio_interval, run_diff
from lagom_overlap.verbs.run import provable


def run_folder(
    path: Path, steps_s=(), *, channels: int | None = None, result=None, kind=RunKind.RUN, **request
) -> Path:
    path.mkdir()
    RunFolder(path).write(RunRecord.now(kind, seed=0, request=request), result)
    if steps_s:
        write_step_times(path, RunSteps(num_steps=len(steps_s), num_settings=0, steps_s=tuple(steps_s)))
    if channels is not None:
        call = CallType(
            description="fsdp", num_ranks=2, creation_order=0, kind=CollectiveKind.ALL_GATHER, num_bytes=1 << 20
        )
        saved = SavedSettings(
            world_size=2,
            route="gloo",
            is_adopted=True,
            settings=(SiteSetting(Site(call, 1), CommConfig(num_channels=channels)),),
            verdict="",
            date="",
        )
        write_saved(path / "settings.json", saved)
    return path


def noisy(median_s: float, seed: int, count: int = 120, resemblance: float = 0.7) -> list[float]:
    """Steps of a job, each of which resembles the one before."""
    random = np.random.default_rng(seed)
    value, steps = 0.0, []
    for _ in range(count):
        value = resemblance * value + random.normal(0.0, 0.03)
        steps.append(median_s * float(np.exp(value)))
    return steps


def test_two_runs_differ_in_their_settings_call_by_call_and_in_their_steps(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", noisy(0.2, 1), mode="online", channels=2)
    two = run_folder(tmp_path / "b", noisy(0.1, 3), mode="online", channels=4)
    found = run_diff(one, two)
    [changed] = found.settings
    assert changed.name == "all_gather 1 MiB, fsdp of 2 ranks, call 2"
    assert (changed.first, changed.second) == ("num_channels 2", "num_channels 4")
    [row] = found.times
    assert row.verdict == "faster"
    assert row.low < 2 < row.high
    assert found.conclusion.found == "the second run is faster"
    assert found.conclusion.next_line.startswith(f"lagom run --prove {two} -- ")


def test_runs_on_emulated_gpus_say_so_and_the_line_to_type_emulates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAGOM_EMULATION_COMMAND", "lagom emulate --cluster a40_nvlink --")
    one, two = (run_folder(tmp_path / name, noisy(0.2, seed), mode="online") for name, seed in (("a", 1), ("b", 3)))
    monkeypatch.delenv("LAGOM_EMULATION_COMMAND")
    ending = run_diff(one, two).conclusion
    assert ending.found.startswith("on emulated GPUs: the ")
    assert ending.next_line.startswith("lagom emulate --cluster a40_nvlink -- lagom run --online -- COMMAND")


def test_nulls_whose_steps_resemble_their_neighbours_are_seldom_called_different() -> None:
    # At 95 % six of 120 are expected; a bootstrap of single steps calls about a third of these different.
    intervals = [ratio_interval(noisy(1.0, 2 * seed), noisy(1.0, 2 * seed + 1)) for seed in range(120)]
    assert sum(not low <= 1 <= high for low, high in intervals) <= 18


def test_too_few_steps_have_no_interval() -> None:
    assert ratio_interval([1.0] * 19, [2.0] * 50) is None
    assert ratio_interval([1.0] * 20, [2.0] * 20) == (0.5, 0.5)


def test_figures_of_any_verb_are_compared_but_not_the_time_that_we_took(tmp_path: Path) -> None:
    before = {
        "iteration_s": {"before": 2.0, "after": 1.5},
        "solve_s": 3.0,
        "groups": [{"makespan_s": 1.0}],
        "mfu": 0.4,
        "tokens_per_s": 9,
    }
    after = before | {"iteration_s": {"before": 2.0, "after": 1.2}}
    one = run_folder(tmp_path / "a", kind=RunKind.PLAN, result=before)
    two = run_folder(tmp_path / "b", kind=RunKind.PLAN, result=after)
    found = run_diff(one, two)
    assert found.conclusion.found == "the step is 20.0 % shorter in the second run"
    assert [(row.name, row.ratio) for row in found.times] == [
        ("the step", pytest.approx(1.25)),
        ("iteration.before_s", 1.0),
        ("iteration.after_s", pytest.approx(1.25)),
    ]
    assert found.settings == ()


def test_what_the_runs_chose_decides_also_of_different_verbs(tmp_path: Path) -> None:
    groups = {"default": {"makespan_s": 3.0}, "best": {"makespan_s": 2.5}, "step_s": 5.0}
    first = run_folder(tmp_path / "a", kind=RunKind.TUNE, result=groups | {"tuned_step_s": 4.0})
    second = run_folder(tmp_path / "b", kind=RunKind.TUNE, result=groups | {"tuned_step_s": 2.0})
    ranked = run_folder(tmp_path / "c", kind=RunKind.LAYOUTS, result={"rows": [{"iteration_s": 1.0}]})
    traced = run_folder(tmp_path / "d", kind=RunKind.ANALYZE, result={"ranks": [{"span_s": 16.0, "steps": 2}]})
    assert [run_diff(first, other).times[0].ratio for other in (second, ranked, traced)] == [2.0, 4.0, 0.5]
    # 4 s to 2 s is twice as fast: the step is half as long.
    assert run_diff(first, second).conclusion.found == "the step is 50.0 % shorter in the second run"


def test_a_run_against_itself_is_one_line_and_figures_that_are_the_same_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"iteration_s": 2.0, "bubble_s": 1.0}
    one = run_folder(tmp_path / "a", kind=RunKind.SIMULATE, result=result)
    two = run_folder(tmp_path / "b", kind=RunKind.SIMULATE, result=result, seed=1)
    assert main(["diff", str(one), str(one)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith("nothing differs: settings, machine and 3 times are the same")
    said = run_diff(one, two).summary().splitlines()
    assert "  3 times the same" in said
    assert not [line for line in said if "1.000x" in line]


def test_two_proofs_have_the_times_of_both_sides(tmp_path: Path) -> None:
    paths = []
    for name, configured_s in (("a", [1.0, 4.0, 2.0]), ("b", [1.0, 1.0, 4.0])):
        paths.append(run_folder(tmp_path / name))
        proof = dict.fromkeys(("subject", "kind", "reason", "next_line", "date"), "x")
        proof |= {"way": "in the job", "decision": "undecided", "judgement": None, "steps_per_block": None}
        proof |= {"default_s": [3.0], "configured_s": configured_s, "command": [], "machine": {}, "versions": {}}
        (paths[-1] / "proof.json").write_text(json.dumps(proof))
    found = run_diff(*paths)
    assert [(row.name, row.ratio) for row in found.times] == [("the step", 2.0), ("the default's step", 1.0)]


def test_a_settings_file_that_is_none_is_not_taken_for_no_settings(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    os.mkfifo(two / "configs.toml")
    with pytest.raises(BundleError, match=r"configs\.toml' is no regular file"):
        run_diff(one, two)


FSDP2_PLAN = """
[plan]
version = 2
planner = "fsdp2"
graph = "0"
num_ranks = 2
carrier = "fsdp2"
[fsdp2]
units = ["0", "1"]
"""


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("try.env", "NCCL_ALGO=Ring\n", "lagom run --prove {} -- COMMAND    # by restarts of the job"),
        ("plan.toml", FSDP2_PLAN, "lagom run --prove {} -- COMMAND    # by restarts of the job"),
        (
            "plan.toml",
            FSDP2_PLAN.partition("carrier")[0],
            "lagom run --online -- COMMAND    # neither run left settings",
        ),
        ("gone.env", "", "lagom run --online -- COMMAND    # neither run left settings"),
    ],
)
def test_the_line_to_type_is_one_that_prove_takes(tmp_path: Path, name: str, content: str, line: str) -> None:
    config = tmp_path / name
    if content:
        config.write_text(content)
    one = run_folder(tmp_path / "a", noisy(0.1, 1), mode="observe")
    two = run_folder(tmp_path / "b", noisy(0.1, 1), mode="fixed", config=config)
    assert run_diff(one, two).conclusion.next_line.startswith(line.format(config))


def test_a_table_that_sets_nothing_is_not_offered_to_a_proof(tmp_path: Path) -> None:
    write_table(tmp_path / "lagom_table.bin", encode_table(ConfigTable({}), generation=1, communicators=[]).data)
    assert provable(tmp_path / "lagom_table.bin") is None


def test_the_command_line_ends_with_three_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = run_folder(tmp_path / "a", noisy(0.1, 1), mode="observe")
    two = run_folder(tmp_path / "b", noisy(0.1, 1), mode="fixed", config="lagom.json")
    (run_folder(tmp_path / "c", channels=4) / "settings.json").rename("lagom.json")
    assert main(["diff", str(one), str(two)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[-3:]] == ["result", "why", "next"]
    assert said[-3] == "result: the runs are not measurably different"
    assert said[-1].endswith("lagom run --prove lagom.json -- COMMAND    # in turns in one job")
    assert main(["diff", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conclusion"]["found"] == "the runs are not measurably different"


def trace(path: Path, length_us: float) -> Path:
    file = KinetoFile(distributedInfo={"rank": 0, "world_size": 2})
    for step in range(3):
        at = 1000.0 * step
        file.step(step, at, 900.0)
        file.kernel("gemm", at + 10, length_us, launch=at + 5)
    path.mkdir()
    file.write(path / "rank0.json")
    return path


def test_two_traces_are_compared_as_analyze_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = trace(tmp_path / "a", 100.0), trace(tmp_path / "b", 200.0)
    assert main(["diff", str(one), str(two), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["against"]
    assert main(["analyze", str(two), "--against", str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] == compared


@pytest.mark.parametrize("other", ["missing", "traces", "damaged"])
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    run_folder(tmp_path / "a")
    trace(tmp_path / "traces", 100.0)
    run_folder(tmp_path / "damaged")
    (tmp_path / "damaged" / "steps.json").write_text('{"format":1,"num_steps":1,"num_settings":0,"steps_s":[-1]}')
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / other)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert {"missing": "does not exist", "traces": "not", "damaged": "damaged"}[other] in error


def test_analyses_without_a_timeline_have_no_step_to_compare(tmp_path: Path) -> None:
    """A flight recorder's dumps have no spans."""
    result = {"ranks": [{"span_s": 0.0, "steps": 0}]}
    paths = [run_folder(tmp_path / name, kind=RunKind.ANALYZE, result=result) for name in "ab"]
    found = run_diff(*paths)
    assert found.times == ()
    assert found.conclusion.found in found.summary()


def test_a_command_is_shown_as_it_is_typed_and_repeated_in_the_line_to_type(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", noisy(0.1, 1), mode="observe", command=["torchrun", "t.py", "--name", "a b"])
    two = run_folder(tmp_path / "b", noisy(0.1, 3), mode="online", command=["torchrun", "t.py"], channels=4)
    found = run_diff(one, two)
    (changed,) = [setting for setting in found.settings if setting.name == "request.command"]
    assert (changed.first, changed.second) == ("torchrun t.py --name 'a b'", "torchrun t.py")
    assert found.conclusion.next_line.startswith(f"lagom run --prove {two} -- torchrun t.py    #")
