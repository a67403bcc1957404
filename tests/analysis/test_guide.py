"""The guide's terminal output is what the commands in it print."""

import shutil
import tarfile
from pathlib import Path

import pytest

from lagom_overlap.cli.main import main

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "traces" / "param_dlrm_8xV100" / "dlrm_kineto.tar.gz"


def console_blocks() -> list[str]:
    parts = (ROOT / "docs" / "guides" / "analyze.md").read_text(encoding="utf-8").split("```")
    return [part.removeprefix("console") for part in parts[1::2] if not part.startswith("python")]


@pytest.mark.skipif(not TRACES.exists(), reason="the recorded traces are not here")
def test_every_line_of_output_in_the_guide_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(TRACES, tmp_path)
    with tarfile.open(TRACES) as archive:
        archive.extractall("all")  # our own archive
    for name, ranks in (("0-3", "0123"), ("4-7", "4567")):
        Path(name).mkdir()
        for path in Path("all").rglob("worker*.json"):
            if path.name[len("worker")] in ranks:
                shutil.copy(path, name)
    blocks = console_blocks()
    lines = [line.rstrip() for block in blocks for line in block.splitlines() if line.strip()]
    printed: set[str] = set()
    for line in lines:
        if line.startswith("$ lagom "):
            assert main(line.removeprefix("$ lagom ").split()) == 0
            printed |= {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    shown = [line for line in lines if not line.startswith("$ ")]
    assert len(shown) > 25
    assert [line for line in shown if line not in printed] == []
