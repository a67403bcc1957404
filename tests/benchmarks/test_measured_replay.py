"""Other people's surfaces with rows that cannot be used: these are named, the others are replayed. Figures invented."""

import json
from pathlib import Path

import pytest

import recorded_search
from measured_replay import read_choices, read_noise

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
    ("A100,1,8,all_reduce,4,ring,ll,default,overlap,8.0,a", "no choice: 1 settings without the default"),
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
    lists, bad = read_noise(write(tmp_path, "noise.csv", NOISE))
    assert lists == [pytest.approx([1.1, 1.0, 1.0])]
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
