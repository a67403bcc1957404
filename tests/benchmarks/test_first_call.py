"""The first call on a GPU, dry: its stages, and that everything it names is there and reads its flags."""

import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
FIRST = ("probe", "doctor", "selftest")
"""What must be known of a machine before anything else is worth its time."""
WITH_FLAGS = tuple(sorted(path.name for path in FOLDER.glob("*.py") if "ArgumentParser" in path.read_text()))
LIBRARY = "/absolute/libnccl.so.2"


@cache
def commands() -> dict[str, tuple[int, str]]:
    """Each stage's limit in seconds and its command."""
    environment = os.environ | {"LAGOM_DRY": "1", "NCCL_LIBRARY": LIBRARY, "PYTHON": sys.executable}
    environment |= {"LAGOM_WORK": "/nowhere"}
    out = subprocess.run(
        ["bash", str(FOLDER / "first_call.sh"), "/tmp"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [re.fullmatch(r"(\w+) \((\d+) s\): (.*)", line) for line in out.splitlines()]
    assert all(found), out
    return {each[1]: (int(each[2]), each[3]) for each in found if each}


def test_the_stages_begin_with_what_the_others_rest_on_and_each_has_its_limit() -> None:
    names = list(commands())
    assert tuple(names[:3]) == FIRST
    assert {"reduce", "stock", "observe", "online", "surface", "traces"} <= set(names)
    assert names.index("mps") < names.index("reduce") < names.index("mps_stop") < names.index("surface")
    assert all(0 < limit_s <= 600 for limit_s, _ in commands().values())


def test_every_script_that_a_stage_names_is_there() -> None:
    named = {word for _, command in commands().values() for word in command.split() if word.startswith(str(ROOT))}
    assert {Path(word).name for word in named} >= {"probe.sh", "train.py", "contention_surface.py", "nccl_fsdp.toml"}
    assert [word for word in named if not Path(word).is_file()] == []


def in_readme() -> list[str]:
    """The commands of the harness's README, a line each."""
    blocks = re.findall(r"^```\n(.*?)^```", (FOLDER / "README.md").read_text(), re.M | re.S)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_readme_names_a_script_stages_and_nothing_that_is_not_there() -> None:
    told = in_readme()
    assert len(told) >= 10
    for line in told:
        script = next(word for word in line.split() if word.endswith((".py", ".sh")))
        assert (FOLDER / Path(script).name).is_file(), line
        if script.endswith("first_call.sh"):
            stages = line.split(" OUT")[1].split()
            assert set(stages) <= set(commands()), line


def flags_told(name: str) -> set[str]:
    """The flags of a script that its README and the first call's stages use."""
    told = [*in_readme(), *(command for _, command in commands().values())]
    after = [line.split(name, 1)[1] for line in told if re.search(rf"(^|[ /]){re.escape(name)}( |$)", line)]
    return {flag for words in after for flag in re.findall(r"(?<=\s)--[a-z-]+", words)}


def test_the_flags_that_are_told_are_found() -> None:
    """By reading, as the test below compares them with what each script takes."""
    assert flags_told("contention_surface.py") >= {"--dry-run", "--out", "--stages", "--budget-s", "--nccl-library"}
    assert flags_told("train.py") >= {"--steps", "--record", "--deterministic"}


def test_the_self_test_takes_the_library_by_its_absolute_path_and_ends_before_its_limit() -> None:
    limit_s, command = commands()["selftest"]
    assert f"--library {LIBRARY} --ranks-per-gpu 2" in command
    (minutes,) = re.findall(r"--minutes ([\d.]+)", command)
    assert 60 * float(minutes) < limit_s


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_every_shell_script_parses(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WITH_FLAGS)
def test_every_script_reads_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as they all import PyTorch."""
    pytest.importorskip("torch")
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert told.startswith("usage")
    assert [flag for flag in flags_told(name) if flag not in told] == []
