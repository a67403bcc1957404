"""What reaches stdout and stderr, whatever they are: wide, narrow, without a size, not UTF-8, full, closed."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from kineto_traces import KinetoFile
from rich.cells import cell_len
from rich.panel import Panel
from rich.text import Text

from lagom_overlap.cli import main, output, stdout

LAGOM = (sys.executable, "-m", "lagom_overlap")
SENTENCE = "Tuned is 1.18× faster (quartiles 1.15–1.21): channels 8 → 2, −3.3 %"


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *renderables: object) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    output.show(*renderables)  # type: ignore[arg-type]
    return raw.getvalue().decode(encoding)


def test_a_terminal_that_says_no_size_is_taken_for_one_of_80_columns():
    leader, follower = pty.openpty()  # a new pseudo-terminal has 0 columns, as under `docker exec -t`
    assert os.get_terminal_size(follower).columns == 0
    with subprocess.Popen((*LAGOM, "doctor"), stdin=subprocess.DEVNULL, stdout=follower) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    os.close(leader)
    assert process.returncode == 0
    assert b"tuner plug-in" in seen
    assert b"ours" in seen


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_is_not_utf_8_gets_the_same_words_in_its_own_characters(monkeypatch, encoding):
    text = printed(monkeypatch, encoding, Panel(Text(SENTENCE), width=80))
    assert "Tuned is 1.18x faster (quartiles 1.15-1.21): channels 8 > 2, -3.3 %" in text
    assert {len(line) for line in text.rstrip("\n").splitlines()} == {80}


@pytest.mark.parametrize("width", range(24, 60))
def test_no_line_break_parts_a_number_from_its_unit(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = "It takes 12.3 ms, 4.5 % of the step of 270 ms, moves 1.25 GiB at 31.4 GB/s; 8 GPUs hold 42.9 GB each."
    lines = printed(monkeypatch, "utf-8", Text(text)).splitlines()
    assert " ".join(" ".join(lines).split()) == text
    assert not [line for line in lines if re.search(r"\d\s*$", line)]


@pytest.mark.parametrize("width", range(24, 60))
def test_no_line_break_parts_a_verb_or_a_page_from_what_is_typed_before_it(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = (
        "How far off the model is: lagom docs accuracy. Predicted by lagom simulate, not measured; a lagom is enough."
    )
    lines = printed(monkeypatch, "utf-8", Text(text)).splitlines()
    assert " ".join(" ".join(lines).split()) == text
    assert [line for line in lines if "lagom docs accuracy." in line]
    assert [line for line in lines if "lagom simulate," in line]


JOB = """
[job]
name = "a job with quite a long name for a terminal of sixty columns"
ranks = 8
[cluster]
preset = "a40_nvlink"
[[group]]
name = "transformer.layers.0.forward"
op = [{ name = "mm", gemm = [8192, 8192, 8192] }]
comm = [
    { name = "all_gather.of.the.next.layer", kind = "all_gather", bytes = "64 MiB", communicator = "dp" },
    { name = "rs", kind = "reduce_scatter", bytes = "64 MiB", communicator = "dp" },
]
[tune]
pairs = 3
budget = { measurements = 4 }
"""
MODEL = """
[job]
name = "phi2"
[model]
name = "phi-2"
seq_len = 2048
[cluster]
preset = "a40_nvlink"
[parallel]
fsdp = 8
micro_batch = 2
"""
MEGATRON = MODEL.replace("fsdp = 8", "tensor = 2\ndata = 4\nsequence_parallel = true")
VERBS = {
    "tune": ("tune", "job.toml", "--seed", "1"),
    "compare": ("compare", "job.toml", "--tuners", "default,fixed_min"),
    "simulate": ("simulate", "model.toml"),
    "plan": ("plan", "model.toml", "--planner", "program_order"),
    "planners": ("compare", "model.toml", "--planners", "program_order,ddp"),
    "megatron": ("plan", "megatron.toml", "--planner", "megatron"),
    "analyze": ("analyze", "trace.json"),
    "doctor": ("doctor",),
}
VALUE = re.compile(r"[+−-]?\d+(?:\.\d+)?(?: ?(?:us|ms|s|[KMG]i?B|GB/s|%|×))(?![\w.])")


def shown_by(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a verb hands to `output.show`."""
    held: list[object] = []
    modules = [import_module(f"lagom_overlap.cli.{name}") for name in (verb[0], "output")]  # before any is replaced
    for module in modules:
        if hasattr(module, "show"):
            monkeypatch.setattr(module, "show", lambda *renderables: held.extend(renderables))
    assert main(list(verb)) == 0
    monkeypatch.undo()
    return held


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", VERBS)
def test_every_value_of_a_wide_terminal_is_whole_on_a_narrow_one(verb, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        Path("job.toml").write_text(JOB)
        Path("model.toml").write_text(MODEL)
        Path("megatron.toml").write_text(MEGATRON)
        two_overlaps().write(Path("trace.json"))
        renderables = shown_by(VERBS[verb], patch)
    capsys.readouterr()
    seen = {}
    for columns in (200, 80, 60, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        output.show(*renderables)
        # A line to type is whole, so that it can be copied.
        lines = [
            line
            for line in capsys.readouterr().out.splitlines()
            if not line.startswith(("Next: lagom ", "Or:   lagom "))
        ]
        assert max(map(cell_len, lines)) <= columns
        seen[columns] = Counter(VALUE.findall(" ".join(" ".join(lines).replace("│", " ").split())))
    assert seen[200]
    for columns in (80, 60, 40):  # a stacked table repeats its headers, which may hold a number
        assert seen[200] - seen[columns] == Counter()


def two_overlaps() -> KinetoFile:
    """Kernels alone and slowed down by collectives."""
    file = KinetoFile()
    for step in range(3):
        file.step(step, 1000.0 * step, 900)
        file.kernel("a_matrix_product_with_quite_a_long_name", 1000.0 * step + 10, 79.0)
        file.kernel("a_matrix_product_with_quite_a_long_name", 1000.0 * step + 100, 98.4)
        file.nccl("AllGather_RING_LL", 1000.0 * step + 100, 120.5, op="_allgather_base", nelems=400)
        file.nccl(
            "ReduceScatter_Sum_bf16_RING_LL", 1000.0 * step + 400, 81.3, op="_reduce_scatter_base", nelems=1 << 20
        )
    return file


@pytest.mark.parametrize("columns", ["60", "0", "", "-3", "wide", "9" * 400])
def test_in_a_pipe_the_output_is_as_wide_as_columns_says_or_80(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    output.show(Text("word " * 100))
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert 40 < widest <= (60 if columns == "60" else 80)
    assert widest > 60 or columns == "60"


def test_utf_8_keeps_its_characters(monkeypatch):
    assert SENTENCE in printed(monkeypatch, "utf-8", Text(SENTENCE))


def test_json_on_a_terminal_that_is_not_utf_8_is_escaped_and_still_json(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    stdout.say(json.dumps({"name": "größer → 🚄"}, ensure_ascii=False))
    assert json.loads(raw.getvalue())["name"] == "größer → 🚄"


def test_a_full_disk_behind_help_is_no_bug_of_ours():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run((*LAGOM, "--help"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


def test_a_mistake_is_exit_code_2_also_where_stderr_is_full():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        assert subprocess.run((*LAGOM, "nonsense"), stderr=full, check=False).returncode == 2


def test_an_unknown_flag_points_to_the_help_of_its_verb(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--gpu"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "lagom doctor: unrecognized arguments: --gpu; see 'lagom doctor --help'\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["simulat", "job.toml"], "lagom: unknown verb 'simulat' (did you mean 'simulate'?); allowed: analyze, "),
        (["simulate", "job.toml", "--jsn"], "lagom simulate: unrecognized arguments: --jsn (did you mean '--json'?); "),
        (["tune", "--ot=x"], "lagom tune: unrecognized arguments: --ot=x (did you mean '--out'?); "),
    ],
)
def test_a_slip_of_the_keyboard_gets_the_word_that_was_meant(capsys, given, words):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(words)
    assert said.count("\n") == 1


def test_a_file_in_a_folder_whose_name_holds_a_newline_is_named_on_one_line() -> None:
    assert stdout.named(Path("a\nb\x1b[31m") / "report.html", "Report") == "Report: a\ufffdb\ufffd[31m/report.html"
