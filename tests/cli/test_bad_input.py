"""Bad input: one line that names the key or path, the value and what is allowed; exit code 2; nothing written."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagom_overlap import registry
from lagom_overlap.cli import main

SIMULATED = """
[job]
name = "toy"
[cluster]
preset = "a40_nvlink"
[[group]]
name = "g"
block = { seq_len = 512, hidden = 512, heads = 8, ffn = 2048 }
[[group.comm]]
name = "ag"
kind = "all_gather"
bytes = "8 MiB"
[tune]
budget = { measurements = 6 }
pairs = 3
"""


def tune(tmp_path: Path, capsys, text: str, *flags: str) -> tuple[int, str, str]:
    job = tmp_path / "job.toml"
    job.write_text(text, encoding="utf-8")
    code = main(["tune", str(job), *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def expect_refusal(tmp_path: Path, capsys, text: str, words: list[str], *flags: str) -> None:
    out = tmp_path / "run"
    (tmp_path / "job.toml").touch()
    before = sorted(tmp_path.iterdir())
    code, stdout, stderr = tune(tmp_path, capsys, text, "--out", str(out), *flags)
    assert code == 2
    assert stdout == ""
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "toy"', 'name = "a\\nb"', ["job.name is 'a\\nb', must be text without control characters"]),
        ("pairs = 3", "pairs = 3\n[plan]\nmemory_limit = '-4 GiB'", ["plan.memory_limit: '-4 GiB' is not a size"]),
        ('name = "toy"', 'name = "toy"\nrank = 2', ["job.rank", "did you mean 'ranks'", "allowed", "ranks"]),
        ("a40_nvlink", "a40_nvlnk", ["'a40_nvlnk'", "did you mean 'a40_nvlink'", "h200"]),
        ('"8 MiB"', '"8 Mib/s"', ["group[0].comm[0].bytes", "MiB"]),
        ("pairs = 3", 'pairs = 3\ntuner = "lagon"', ["'lagon'", "did you mean 'lagom'"]),
        ("pairs = 3", 'pairs = 3\ntuner = "lagom"\noptions = { stop = "x" }', ["tune.options", "'stop'", "step"]),
        ("pairs = 3", 'pairs = 3\ntuner = "lagom"\noptions = { step = 3 }', ["tune.options.step is 3", "str"]),
        ("pairs = 3", 'pairs = 3\ntuner = "lagom"\noptions = { step = "leap" }', ["'leap'", "ladder"]),
        ("pairs = 3", "pairs = 3\nspace = { num_channels = [4, 999] }", ["999"]),
        ("pairs = 3", "pairs = 3\nspace = { num_channels = [] }", ["num_channels is [], must name at least one"]),
        ("pairs = 3", 'pairs = 3\nspace = { slice_bytes = ["4 MiB"] }', ["slice_bytes", "2097152"]),
        ('name = "toy"', 'name = "toy"\nranks = 64', ["64 ranks", "16 GPUs"]),
        ('[cluster]\npreset = "a40_nvlink"', "", ["[cluster]"]),
        ("[tune]", '[cost]\nprofile = "ideal"\n[tune]', ["'ideal'", "plausible"]),
    ],
)
def test_a_mistake_in_the_job_file_is_one_line_and_exit_code_2(tmp_path, capsys, old, new, words):
    assert old in SIMULATED
    expect_refusal(tmp_path, capsys, SIMULATED.replace(old, new), words)


def test_an_unknown_backend_is_refused(tmp_path, capsys):
    expect_refusal(tmp_path, capsys, SIMULATED, ["'nccl4'", "simulated"], "--backend", "nccl4")


def test_an_unknown_tuner_is_refused(tmp_path, capsys):
    expect_refusal(tmp_path, capsys, SIMULATED, ["'magic'", "autoccl"], "--tuner", "magic")


def test_a_recording_is_needed_and_only_for_the_recorded_backend(tmp_path, capsys):
    expect_refusal(tmp_path, capsys, SIMULATED, ["--bundle"], "--backend", "recorded")
    expect_refusal(tmp_path, capsys, SIMULATED, ["--bundle", "recorded"], "--bundle", str(tmp_path))


def test_a_bundle_of_another_job_is_refused(tmp_path, capsys):
    first = tmp_path / "first"
    assert tune(tmp_path, capsys, SIMULATED, "--out", str(first), "--json")[0] == 0
    other = SIMULATED.replace("8 MiB", "16 MiB")
    expect_refusal(tmp_path, capsys, other, ["another job"], "--backend", "recorded", "--bundle", str(first))


def test_an_output_folder_that_exists_is_left_as_it_is(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine.txt").write_text("keep", encoding="utf-8")
    code, _, stderr = tune(tmp_path, capsys, SIMULATED, "--out", str(out))
    assert code == 2
    assert "exists already" in stderr
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_an_output_folder_without_a_parent_is_refused(tmp_path, capsys):
    code, _, stderr = tune(tmp_path, capsys, SIMULATED, "--out", str(tmp_path / "no" / "run"))
    assert code == 2
    assert "does not exist" in stderr


def test_a_missing_job_file_is_refused(tmp_path, capsys):
    assert main(["tune", str(tmp_path / "nothing.toml")]) == 2
    assert "nothing.toml" in capsys.readouterr().err


def test_what_a_file_calls_itself_does_not_command_the_terminal(tmp_path, capsys):
    """An error names an unknown key; the key may hold escape sequences and ends of lines."""
    capture = tmp_path / "step.json"
    capture.write_text('{"format": "lagom-capture", "version": 1, "\\u001b]0;owned\\u0007\\n\\u001b[2J": 1}')
    assert main(["plan", str(capture)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()


LONG = "x" * 300
MODEL = """
[job]
name = "toy"
[model]
name = "phi-2"
seq_len = 512
[cluster]
preset = "a40_nvlink"
[parallel]
fsdp = 8
"""


@pytest.mark.parametrize(
    "flags",
    [
        ["simulate", "JOB", "--out", LONG],
        ["tune", "JOB", "--out", LONG],
        ["tune", "JOB", "--backend", "recorded", "--bundle", LONG],
        ["tune", "--from-trace", LONG],
        ["plan", "JOB", "--times", LONG],
        ["plan", "JOB", "--apply", LONG],
        ["capture", "JOB", "--out", LONG],
        ["analyze", LONG],
        ["export", LONG, "--format", "env"],
        ["run", "--config", LONG, "--", "true"],
        ["run", "--online", "--config", LONG, "--", "true"],
        ["run", "--observe", "--out", LONG, "--", "true"],
        ["emulate", "--job", LONG, "--", "true"],
    ],
)
def test_a_name_that_no_file_can_have_is_the_users_mistake(flags, tmp_path, capsys, monkeypatch):
    """The file system refuses it in calls that only ask whether there is such a file."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(MODEL, encoding="utf-8")
    assert main(["job.toml" if flag == "JOB" else flag for flag in flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert LONG in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml"]


@pytest.mark.parametrize(
    "flags",
    [
        ["simulate", "pipe"],
        ["analyze", "pipe"],
        ["tune", "JOB", "--backend", "recorded", "--bundle", "pipe"],
        ["tune", "--from-trace", "pipe"],
        ["tune", "JOB", "--warm-start", "pipe"],
        ["plan", "JOB", "--apply", "pipe"],
        ["plan", "JOB", "--times", "pipe"],
        ["export", "pipe", "--format", "env"],
        ["run", "--config", "pipe", "--", "true"],
        ["simulate", "model.toml"],
        ["simulate", "cluster.toml"],
    ],
)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_and_not_waited_for(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.toml")
    Path("job.toml").write_text(MODEL, encoding="utf-8")
    Path("model.toml").write_text(MODEL.replace("phi-2", "pipe.toml"), encoding="utf-8")
    Path("cluster.toml").write_text(MODEL.replace("a40_nvlink", "pipe.toml"), encoding="utf-8")
    assert main(["job.toml" if flag == "JOB" else flag for flag in flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err


def test_what_may_not_be_read_is_no_bug_of_ours(tmp_path, capsys, monkeypatch):
    def denied(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "stat", denied)
    assert main(["analyze", str(tmp_path / "trace.json")]) == 2
    assert capsys.readouterr().err == f"lagom analyze: '{tmp_path / 'trace.json'}': Permission denied\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["tune"],
        ["tune", "x.toml", "--sed", "1"],
        ["tune", "x.toml", "--seed", "-1"],
        ["tone"],
        ["tune", "x.toml", "--tuner", ""],
        ["init", "p.pkl", "--cluster", "h100_dgx", "--gpus", "8"],
        ["simulate", "--model", "phi-2", "--cluster", "h100_dgx", "--gpus", "8", "--framework", ","],
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, tmp_path, capsys, monkeypatch):
    """Of a process's own exit code: test_terminals.py."""
    monkeypatch.chdir(tmp_path)
    Path("p.pkl").write_bytes(b"\x80\x04.")
    try:
        code: object = main(flags)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err


def test_torch_missing_gives_the_pip_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torch" else object())
    text = SIMULATED.replace('name = "toy"', 'name = "toy"\nbackend = "gloo"')
    expect_refusal(tmp_path, capsys, text, ["torch", "pip install"])


def test_a_program_without_torch_gives_the_pip_line(tmp_path):
    """In a process of its own: here torch may be loaded already."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[job]\nname = "p"\n[program]\nscript = "step.py"\nfunction = "step"\n[cluster]\npreset = "a40_nvlink"\n',
        encoding="utf-8",
    )
    (tmp_path / "step.py").write_text("def step(): ...\n", encoding="utf-8")
    lines = (
        "import sys",
        "sys.modules['torch'] = None",
        "from lagom_overlap.cli import main",
        "sys.exit(main(sys.argv[1:]))",
    )
    command = [sys.executable, "-c", "; ".join(lines), "plan", "job.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "lagom plan: a [program] needs the package 'torch': pip install torch\n"


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08rest", b'{"format": "lagom-capture"}'])
def test_a_capture_in_place_of_a_job_file_is_told_where_it_goes(tmp_path, capsys, content):
    path = tmp_path / "step.json.gz"
    path.write_bytes(content)
    assert main(["simulate", str(path)]) == 2
    said = capsys.readouterr().err
    assert "is no job file; if it is a capture, a job file names it" in said
    assert said.count("\n") == 1


def test_an_extra_that_is_missing_gives_the_pip_line(monkeypatch):
    class Broken:
        name = "gloo"

        def load(self):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(registry, "registered", lambda group: (Broken(),))
    with pytest.raises(registry.MissingDependencyError, match=r"pip install torch"):
        registry.load("lagom_overlap.backends", "backend", "gloo")


def test_tune_prints_one_json_object_with_the_promised_keys(tmp_path, capsys):
    code, stdout, stderr = tune(tmp_path, capsys, SIMULATED, "--out", str(tmp_path / "run"), "--json", "--seed", "3")
    assert (code, stderr) == (0, "")
    result = json.loads(stdout)
    assert {"tool", "version", "seed", "backend", "tuner", "job", "num_measurements", "default", "best", "configs"} <= (
        result.keys()
    )
    assert result["seed"] == 3
    assert result["default"].keys() == {"makespan_s", "comp_s", "comm_s"}
    config = result["configs"]["g"]["ag"]
    assert list(config) == ["algorithm", "protocol", "transport", "num_channels", "num_threads", "chunk_bytes"]
    verdict = result["verdict"]
    assert verdict["over_default"]["num_pairs"] == 3
    assert verdict["adopted"] == (verdict["judgement"]["decision"] == "faster")
    for path in result["files"]:
        assert Path(path).stat().st_mode & 0o077 == 0
    recorded = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert recorded["result"] == result


def test_the_same_seed_gives_the_same_result_and_a_recording_replays_it(tmp_path, capsys):
    noisy = SIMULATED.replace("[tune]", "[cost]\nnoise = 0.05\n[tune]")
    runs = []
    for name in ("a", "b"):
        code, stdout, _ = tune(tmp_path, capsys, noisy, "--out", str(tmp_path / name), "--json", "--seed", "5")
        assert code == 0
        runs.append(json.loads(stdout))
    replay = ("--backend", "recorded", "--bundle", str(tmp_path / "a"))
    code, stdout, _ = tune(tmp_path, capsys, noisy, "--out", str(tmp_path / "c"), "--json", "--seed", "5", *replay)
    assert code == 0
    runs.append(json.loads(stdout))
    for key in ("default", "best", "configs", "verdict", "num_measurements"):
        assert runs[0][key] == runs[1][key]
    assert runs[0]["configs"] == runs[2]["configs"]


def test_compare_prints_one_row_per_tuner(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(SIMULATED, encoding="utf-8")
    assert main(["compare", str(job), "--tuners", "default,lagom,fixed_max", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["tuner"] for row in result["rows"]] == ["default", "lagom", "fixed_max"]
    assert result["rows"][0]["speedup_over_default"] == 1.0
    assert min(row["regret_over_best"] for row in result["rows"]) == 0.0


def test_doctor_speaks_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"lagom", "autoccl"} <= set(report["tuners"])
    assert all({"name", "ok", "found", "remedy"} == check.keys() for check in report["checks"])
