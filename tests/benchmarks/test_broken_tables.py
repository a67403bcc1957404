"""Broken copies of measured tables: no traceback, one line and exit code 2 where nothing is left, else sane figures.

`LAGOM_BROKEN_TABLES` is how many copies of each table are drawn (default 2).
"""

import csv
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import collective_time
import contention_points
import iteration_time
import operator_time
import recorded_search
from measured_rows import BadFileError

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("LAGOM_SHARED_DATA", ROOT.parent / "shared" / "data"))
NUM_DRAWS = int(os.environ.get("LAGOM_BROKEN_TABLES", "2"))
NUM_ROWS = 6
MOST_ERROR_PCT = 1e5
"""No cell, whatever it says, may make one row's error larger than a wrong model could."""

Table = list[list[str]]

CELLS = (
    "", " ", "\t", "-1", "0", "nan", "inf", "-inf", "1e18", "1e-18", "1e308", "1e999", "1_000", "1,000", "1.5", "١٢",
    "１２", "\xa012", "0x10", "1e", "--", "TPUv9", "A100", "H100", "all_to_none", "all_gather", "overlap", "auto",
    "tree", "1\n2", '"', "x" * 5000, "\0", "😀", "99999999999999999999", "1048577", "7", "3", "512", "16777216",
)  # fmt: skip


def parsed(text: str) -> Table:
    return list(csv.reader(text.splitlines()))


def written(table: Table, rng: random.Random) -> bytes:
    end = rng.choice(("\n", "\n", "\r\n", "\r"))
    quotes = rng.random() < 0.8
    lines = []
    for cells in table:
        lines.append(",".join('"' + cell.replace('"', '""') + '"' if quotes else cell for cell in cells))
    content = (rng.choice(("", "", "\ufeff")) + end.join(lines) + rng.choice(("", end))).encode("utf-8", "replace")
    if rng.random() < 0.15:
        place = rng.randrange(len(content) + 1)
        content = content[:place] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40))) + content[place:]
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content) + 1)]
    return content


def _cell(table: Table, rng: random.Random) -> None:
    row = rng.randrange(len(table)) if rng.random() < 0.1 else rng.randrange(1, len(table))
    table[row][rng.randrange(len(table[row]))] = rng.choice(CELLS)


def _column_of_cells(table: Table, rng: random.Random) -> None:
    place, cell = rng.randrange(len(table[0])), rng.choice(CELLS)
    for cells in table[1:]:
        cells[min(place, len(cells) - 1)] = cell


def _drop_column(table: Table, rng: random.Random) -> None:
    place = rng.randrange(len(table[0]))
    for cells in table:
        if len(cells) > 1:
            del cells[min(place, len(cells) - 1)]


def _double_column(table: Table, rng: random.Random) -> None:
    place = rng.randrange(len(table[0]))
    for cells in table:
        cells.append(cells[min(place, len(cells) - 1)])


def _swap_columns(table: Table, rng: random.Random) -> None:
    first, second = rng.randrange(len(table[0])), rng.randrange(len(table[0]))
    for cells in table[1:]:
        if max(first, second) < len(cells):
            cells[first], cells[second] = cells[second], cells[first]


def _short_row(table: Table, rng: random.Random) -> None:
    cells = rng.choice(table)
    del cells[rng.randrange(1, len(cells) + 1) :]


def _shuffle(table: Table, rng: random.Random) -> None:
    rows = table[1:]
    rng.shuffle(rows)
    table[1:] = rows


def _double_row(table: Table, rng: random.Random) -> None:
    table.insert(rng.randrange(1, len(table) + 1), list(rng.choice(table)))


BREAKS: tuple[Callable[[Table, random.Random], None], ...] = (
    _cell, _cell, _cell, _cell, _column_of_cells, _drop_column, _double_column, _swap_columns, _short_row, _shuffle,
    _double_row,
)  # fmt: skip


def broken(path: Path, seed: int) -> bytes:
    rng = random.Random(f"{path.name}/{seed}")
    table = parsed(path.read_text(encoding="utf-8"))
    table = [table[0], *(list(cells) for cells in rng.sample(table[1:], min(NUM_ROWS, len(table) - 1)))]
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(BREAKS)(table, rng)
        if len(table) < 2:
            break
    return written(table, rng)


def existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} is absent; put it into {path.parent}, or name the folder in LAGOM_SHARED_DATA")
    return path


def ended(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON object; None for exit code 2, which says one line."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    if code == 2:
        assert out == ""
        assert err.count("\n") == 1, err
        return None
    assert code == 0
    return json.loads(out)


TABLES = (
    (iteration_time, SHARED / "validation" / "vtrain_single_node_a100.csv"),
    (iteration_time, SHARED / "validation" / "megatron_sc21_table2_a100.csv"),
    (iteration_time, SHARED / "validation" / "mtnlg_530b_2201.11990_a100.csv"),
    (iteration_time, SHARED / "validation" / "seqpar_2205.05198_table5_a100.csv"),
    (iteration_time, SHARED / "measured" / "training_steps_shown.csv"),
    (contention_points, SHARED / "measured" / "overlap_points_amd_shown.csv"),
    (contention_points, SHARED / "measured" / "amd_gemm_vs_cus_shown.csv"),
    (contention_points, SHARED / "measured" / "overlap_surface_nvidia_shown.csv"),
    (contention_points, ROOT / "benchmarks" / "results" / "h100_2026-11-22" / "surface.csv"),
)


@pytest.mark.parametrize(("script", "path"), TABLES, ids=[path.stem for _, path in TABLES])
def test_a_row_that_breaks_off_is_named_and_the_others_keep_their_figures(
    script: object, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, copy = script.main, tmp_path / "copy.csv"  # type: ignore[attr-defined]
    header, *rows = parsed(existing(path).read_text(encoding="utf-8"))
    more = ["--rows"] if script is contention_points else []
    rows = rows[: NUM_ROWS if script is iteration_time else 48]  # of a kernel, those on all of its GPU's units as well
    found = []
    for table in ([header, *rows], [header, *rows[:-1], rows[-1][:1]], [header, *rows[:-1]]):
        copy.write_text("\n".join(",".join(f'"{cell}"' for cell in cells) for cells in table), encoding="utf-8")
        found.append(ended(main, [str(copy), "--json", *more], capsys))
    assert found[0]["rows"]
    assert not found[0]["bad_rows"]
    assert len(found[1]["bad_rows"]) == 1
    assert found[1]["rows"] == found[2]["rows"]  # to the digit as if it had never been there


@pytest.mark.parametrize(("script", "path"), TABLES, ids=[path.stem for _, path in TABLES])
def test_broken_copies_end_with_figures_or_with_one_line(
    script: object, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, copy = script.main, tmp_path / "copy.csv"  # type: ignore[attr-defined]  # two scripts, the same function
    existing(path)
    for seed in range(NUM_DRAWS):
        copy.write_bytes(broken(path, seed))
        rows = ["--rows"] if script is contention_points else []
        found = ended(main, [str(copy), "--json", *rows], capsys)
        if not isinstance(found, dict):
            continue
        worst = [row.get("error_pct", 0.0) for row in found["rows"]]
        worst += [100 * (row["predicted"] / row["measured"] - 1) for row in found["rows"] if "measured" in row]
        assert found["rows"], seed
        assert all(math.isfinite(error) and abs(error) < MOST_ERROR_PCT for error in worst), (seed, max(worst))
        for bad in found["bad_rows"]:
            assert bad["why"]
            assert "\n" not in bad["why"]


def test_broken_profiles_of_operators_and_collectives_end_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operators = existing(SHARED / "vidur" / "a100_phi2_mlp.csv")
    collectives = existing(SHARED / "vidur" / "a40_allreduce.csv")
    copies = tmp_path / "operators.csv", tmp_path / "a40_allreduce.csv"
    copies[0].write_text(
        "\n".join(operators.read_text(encoding="utf-8").splitlines()[: 1 + NUM_ROWS]), encoding="utf-8"
    )
    whole = ended(operator_time.main, [str(copies[0]), "--gpu", "A100", "--json"], capsys)
    assert whole["by_operator"]  # else all of what follows could be refused
    assert all(system.seconds for system in collective_time.read_vidur(collectives))
    assert collective_time.read_vidur(collectives)
    for seed in range(NUM_DRAWS):
        copies[0].write_bytes(broken(operators, seed))
        found = ended(operator_time.main, [str(copies[0]), "--gpu", "A100", "--json"], capsys)
        assert found is None or all(
            abs(row["mean_error_pct"]) < MOST_ERROR_PCT for row in found["by_operator"].values()
        )
        copies[1].write_bytes(broken(collectives, seed))
        for system in collective_time.read_vidur(copies[1]) if readable(copies[1]) else ():
            assert all(0 < seconds < 1000 for seconds in system.seconds.values())


def readable(path: Path) -> bool:
    try:
        collective_time.read_vidur(path)
    except BadFileError:
        return False
    return True


def test_broken_surfaces_are_replayed_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    surface = existing(SHARED / "measured" / "overlap_surface_nvidia_shown.csv")
    noise = existing(SHARED / "measured" / "noise_iterations_shown.csv")
    header, *rows = surface.read_text(encoding="utf-8").splitlines()
    few = tmp_path / "few.csv"  # the settings of one choice, so that what is left is one
    few.write_text("\n".join((header, *rows[:14])), encoding="utf-8")
    copies = tmp_path / "surface.csv", tmp_path / "noise.csv"
    whole = ended(recorded_search.main, [str(few), str(noise), "--searches", "1", "--json"], capsys)
    assert whole["rows"]
    for seed in range(NUM_DRAWS):
        copies[0].write_bytes(broken(few, seed) if seed % 2 else few.read_bytes())
        copies[1].write_bytes(noise.read_bytes() if seed % 2 else broken(noise, seed))
        found = ended(recorded_search.main, [*map(str, copies), "--searches", "1", "--json"], capsys)
        if isinstance(found, dict):
            assert all(0 <= row["mean_regret"] < 100 for row in found["rows"])


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\xef\xbb\xbf", bytes(range(256)) * 20, b"a,b\n", b"\x89PNG\r\n\x1a\n\0"]
)
def test_what_is_no_table_ends_with_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.csv"
    path.write_bytes(content)
    for script in (iteration_time, contention_points):
        assert ended(script.main, [str(path)], capsys) is None
    assert ended(recorded_search.main, [str(path), str(path)], capsys) is None
