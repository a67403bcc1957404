"""The notebooks run from first to last cell: their cells in one namespace, without Jupyter."""

import ast
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    shutil.copy(ROOT / "examples" / "phi2_fsdp_a40.toml", tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    names: dict[str, object] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"] == [], "outputs are not stored: they would go stale"
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), names)
        if isinstance(last, ast.Expr):  # what Jupyter shows below the cell
            shown = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
            assert shown is not None or capsys.readouterr().out.strip()
        else:
            exec(compile(ast.Module(body=[last], type_ignores=[]), str(path), "exec"), names)


def test_there_are_notebooks_for_a_trace_a_search_and_a_plan():
    assert [path.stem for path in NOTEBOOKS] == ["plan", "search", "trace"]
