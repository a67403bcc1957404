"""CONTRIBUTING names the files to touch; what it says of them is held here, so that it stays so."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.hardware.gpu_file import READ_ELSEWHERE, gpu_names, names_with
from lagom_overlap.workload.step.framework_file import FrameworkFile

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lagom_overlap"
EMULATOR = ROOT / "emulate" / "src" / "lagom_emulate"
MODULES = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")} | {
    str(path.relative_to(EMULATOR.parent)): path for path in EMULATOR.rglob("*.py")
}
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|toml|md))`")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def keys(title: str) -> set[str]:
    """The first column of a section's table, without brackets."""
    return {cell.strip("[]") for cell in re.findall(r"^\| `([^`]+)` \|", section(title), re.MULTILINE)}


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT))))
def test_files_that_are_named_exist(name: str) -> None:
    assert name in MODULES or (PACKAGE / name).is_file() or (ROOT / name).is_file()


def test_the_tables_of_a_gpu_and_of_a_framework_are_all_there() -> None:
    assert keys("A GPU") == {"names", "gpu", *READ_ELSEWHERE}
    assert keys("A framework") == {field.name for field in fields(FrameworkFile)}


def test_each_table_of_a_gpu_has_one_reader() -> None:
    for table in READ_ELSEWHERE:
        (row,) = (line for line in section("A GPU").splitlines() if line.startswith(f"| `[{table}]`"))
        reader = FILE.findall(row)[-1]
        asked = {name for name, path in MODULES.items() if _asks_for(path, table)}
        assert asked == {reader}, table
        assert names_with(table), table
    assert set(gpu_names()) <= set(names_with("gpu"))


def _asks_for(path: Path, table: str) -> bool:
    return re.search(rf'table_of\([a-z.]+, "{table}"\)', path.read_text(encoding="utf-8")) is not None


def test_a_kind_of_layer_touches_the_files_that_tell_kinds_apart_and_no_other() -> None:
    told = {
        name for name, path in MODULES.items() if re.search(r"\b(Mixer|Mlp)\.[A-Z]", path.read_text(encoding="utf-8"))
    }
    assert told == set(FILE.findall(section("A kind of layer")))


def test_a_collective_s_facts_stand_in_one_row() -> None:
    text = (PACKAGE / "collective" / "call.py").read_text(encoding="utf-8")
    for kind in CollectiveKind:
        assert text.count(f"CollectiveKind.{kind.name}:") == 1
    for name in FILE.findall(section("A collective")):
        path = PACKAGE / name if (PACKAGE / name).is_file() else ROOT / name
        assert "CollectiveKind" in path.read_text(encoding="utf-8")
