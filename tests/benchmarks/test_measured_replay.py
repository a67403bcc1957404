"""Other people's surfaces with rows that cannot be used: these are named, the others are replayed. Figures invented."""

import json
from pathlib import Path
from random import Random

import pytest

import recorded_search
from lagom_overlap.collective import Algorithm, CommConfig
from measured_choices import Choice, read_choices, read_noise
from measured_replay import Machine, judged

HEADER = "gpu,nodes,gpus,collective,bytes,algorithm,protocol,channels,mode,steady_ms,run"
GOOD = (
    "A100,1,8,all_reduce,1048576,auto,auto,default,overlap,8.0,a",
    "A100,1,8,all_reduce,1048576,ring,ll,default,overlap,8.4,a",
    "A100,1,8,all_reduce,1048576,tree,simple,default,overlap,7.9,a",
)
BAD = (
    ("A100,1", "2 cells, the header has 11"),
    ("A100,0,8,all_reduce,1048576,ring,ll128,default,overlap,8.0,a", "nodes is 0"),
    ("A100,3,8,all_reduce,1048576,ring,ll128,default,overlap,8.0,a", "8 GPUs on 3 nodes"),
    ("A100,1,8,all_reduce,1048576,ring,ll128,default,overlap,x,a", "steady_ms is 'x'"),
    ("A100,1,8,all_reduce,1048576,ring,ll128,default,overlap,0.0,a", "the run failed"),
    ("A100,1,8,all_gather,1048576,auto,auto,default,overlap,8.0,a", "collective is 'all_gather'"),
    ("A100,1,8,all_reduce,1048576,magic,ll,default,overlap,8.0,a", "none of NCCL's"),
    ("A100,1,8,all_reduce,4,ring,ll,default,overlap,8.0,a", "no choice: 1 settings without a default"),
)
NOISE = "run,steady_median_ms,iterations_ms\na,1.0,1.1 1.0 1.0\nb,,1.0\nc,1.0,1.0 zero\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8-sig")
    return path


def test_rows_that_cannot_be_used_are_named_and_the_others_make_a_choice(tmp_path: Path) -> None:
    lines = [HEADER, *GOOD, "", *(line for line, _ in BAD)]
    choices, named = read_choices(write(tmp_path, "surface.csv", "\n".join(lines)))
    (choice,) = choices
    assert sorted(choice.true_s.values()) == pytest.approx([7.9e-3, 8.0e-3, 8.4e-3])
    whys = {one.line: one.why for one in named}
    for line, (_, words) in enumerate(BAD, start=6):  # the empty line counts, and is none
        assert words in whys[line]
    noise, bad = read_noise(write(tmp_path, "noise.csv", NOISE))
    assert noise.of(1) == [pytest.approx([1.1, 1.0, 1.0])]
    assert [one.line for one in bad] == [3, 4]


def test_the_command_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    surface = write(tmp_path, "surface.csv", "\n".join([HEADER, *GOOD, BAD[2][0]]))
    noise = write(tmp_path, "noise.csv", NOISE)
    assert recorded_search.main([str(surface), str(noise), "--searches", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["num_choices"] for row in found["rows"]} == {1}
    assert {
        "file": str(surface),
        "line": 5,
        "why": "8 GPUs on 3 nodes, must be at least 2 and the same number on each",
    } in found["left_out"]


@pytest.mark.parametrize(
    ("surface", "words"),
    [
        (HEADER.replace("bytes", "octets") + "\n" + GOOD[0], "lacks the columns bytes"),
        (HEADER + "\n" + GOOD[0], "no choice"),
    ],
)
def test_a_file_without_a_choice_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], surface: str, words: str
) -> None:
    files = [str(write(tmp_path, "surface.csv", surface)), str(write(tmp_path, "noise.csv", NOISE))]
    assert recorded_search.main(files) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_sweep_begins_with_the_most_channels_and_is_judged_by_one_statistic(tmp_path: Path) -> None:
    """Means hold a ramp that steady parts do not: a choice with both is one between means."""
    header = HEADER.replace("steady_ms", "mean_ms,steady_ms")
    lines = [f"A100,1,8,all_reduce,4,auto,auto,{n},overlap,{mean},{steady},s" for n, mean, steady in SWEPT]
    (choice,), _ = read_choices(write(tmp_path, "surface.csv", "\n".join([header, *lines])))
    assert choice.default.num_channels == 32
    assert sorted(choice.true_s.values()) == pytest.approx([8.0e-3, 8.2e-3, 9.0e-3])


SWEPT = ((8, 8.0, ""), (16, 8.2, 7.0), (32, 9.0, ""))


def test_raw_lists_serve_the_topology_that_they_are_from(tmp_path: Path) -> None:
    text = "run,nodes,steady_median_ms,iterations_ms\na,1,1.0,1.0 1.1\nb,2,2.0,2.0 9.0\nc,two,1.0,1.0\n"
    noise, bad = read_noise(write(tmp_path, "noise.csv", text))
    assert noise.of(2) == [pytest.approx([1.0, 4.5])]
    assert len(noise.of(4)) == 2, "none of four nodes: all of them"
    assert [one.line for one in bad] == [4]


def test_what_is_not_faster_is_not_adopted_and_what_is_clearly_faster_is() -> None:
    """Noise of a thousandth; the verdict is online tuning's."""
    slow, fast = CommConfig(algorithm=Algorithm.RING), CommConfig(algorithm=Algorithm.TREE)
    true_s = {CommConfig(): 8e-3, slow: 8.5e-3, fast: 7e-3}
    choice = Choice(name="c", num_nodes=1, num_ranks=8, num_bytes=4, true_s=true_s, default=CommConfig())
    lists = [[1 + 0.001 * number for number in (0, 3, 1, 2, 5, 4, 7)]]
    ends = {found: judged(choice, found, Machine(lists, Random(1)), 0) for found in true_s}
    assert ends == {CommConfig(): CommConfig(), slow: CommConfig(), fast: fast}
