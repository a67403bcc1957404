"""Every file that a verb is given may be anything: a pipe, a device, a folder, 64 GiB; it answers in a line, code 2."""

import os
from pathlib import Path

import pytest

from lagom_overlap.cli import main

pytestmark = pytest.mark.timeout(60)  # a pipe would be waited for without end
GROUPS = """
[job]
name = "a"
ranks = 2
[[group]]
name = "g"
op = [{ name = "mm", gemm = [8, 8, 8] }]
comm = [{ name = "ag", kind = "all_gather", bytes = 8 }]
[cluster]
preset = "a40_nvlink"
"""
MODEL = """
[job]
name = "a"
[model]
name = "llama-2-7b"
seq_len = 512
[cluster]
preset = "h100_dgx"
[parallel]
fsdp = 8
"""
COMMAND = ["--", "true"]


def placed(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 36)
        case "absent":
            pass
        case "loop":
            path.symlink_to(path.name)


WORDS = [
    ["tune", "FILE.toml"],
    ["tune", "GROUPS", "--from-trace", "FILE.json"],
    ["tune", "GROUPS", "--from-trace", "FILE.json.gz"],
    ["tune", "GROUPS", "--backend", "recorded", "--bundle", "FILE"],
    ["tune", "WARM FILE"],
    ["tune", "WARM measurements.jsonl"],
    ["compare", "FILE.toml"],
    ["compare", "GROUPS", "--bundle", "FILE"],
    ["analyze", "FILE.json"],
    ["analyze", "FILE.bin"],
    ["export", "FILE", "--format", "plugin"],
    ["simulate", "FILE.toml"],
    ["simulate", "MODEL name FILE.toml"],
    ["simulate", "MODEL preset FILE.toml"],
    ["simulate", "CAPTURED FILE"],
    ["plan", "FILE.toml"],
    ["plan", "FILE.json.gz", "--cluster", "h100_dgx"],
    ["plan", "MODEL", "--apply", "FILE.toml"],
    ["plan", "MODEL", "--times", "FILE.json"],
    ["plan", "MODEL", "--cluster", "FILE.toml"],
    ["emulate", "--job", "FILE.toml", *COMMAND],
    ["emulate", "--cluster", "FILE.toml", *COMMAND],
    ["run", "--online", "--config", "FILE", *COMMAND],
    ["run", "--config", "FILE", *COMMAND],
    ["run", "--config", "FILE.json", *COMMAND],
]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "absent", "loop"])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_file_that_is_none_is_told_in_a_line(
    words: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the command was run"))
    given = []
    for word in words:
        what, _, file = word.rpartition(" ")
        if word.startswith(("FILE", "measurements")) or what:
            placed(tmp_path / file, kind)
        match what.split():
            case ["WARM"]:
                text = GROUPS + f'[tune]\nwarm_start = "{file.replace("measurements.jsonl", ".")}"\n'
            case ["MODEL", "name"]:
                text = MODEL.replace("llama-2-7b", file)
            case ["MODEL", "preset"]:
                text = MODEL.replace("h100_dgx", file)
            case ["CAPTURED"]:
                text = f'[job]\nname = "a"\n[model]\ncapture = "{file}"\n[cluster]\npreset = "h100_dgx"\n'
            case _:
                text = {"GROUPS": GROUPS, "MODEL": MODEL}.get(word, "")
        if text:
            (tmp_path / "job.toml").write_text(text)
        given.append("job.toml" if text else word)
    try:
        code = main(given)
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2, error
    assert len(error.splitlines()) == 1, error
    assert "our bug" not in error
    assert not (tmp_path / "lagom-runs").exists()
