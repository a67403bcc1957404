"""Rows of plain types for data frames: the result's tables and to_dict."""

import json

import pytest
from test_verb_analyze import job

from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze

TABLES = ("ranks", "steps", "parts", "collectives", "calls", "contention", "kernels", "groups", "advice", "what_ifs")


@pytest.fixture
def found(tmp_path):
    paths = tuple(job(rank).write(tmp_path / f"rank{rank}.json") for rank in (0, 1))
    return run_analyze(AnalyzeRequest(traces=paths))


def test_every_table_has_rows_of_equal_keys_and_plain_values(found):
    tables = found.tables()
    assert tuple(tables) == TABLES
    for name, rows in tables.items():
        assert rows or name in ("advice", "groups", "what_ifs"), name
        for row in rows:
            assert row.keys() == rows[0].keys()
            assert all(type(value) in (str, int, float, bool, type(None)) for value in row.values())


def test_the_calls_add_up_to_the_collectives(found):
    tables = found.tables()
    assert len(tables["calls"]) == sum(row["count"] for row in tables["collectives"]) == 24
    for name in ("total_s", "exposed_s"):
        mine = sum(row["duration_s" if name == "total_s" else name] for row in tables["calls"])
        assert mine == pytest.approx(sum(row[name] for row in tables["collectives"]))
    assert [row["start_s"] for row in tables["calls"][:2]] == [pytest.approx(180e-6), pytest.approx(490e-6)]
    assert {(row["rank"], row["step"]) for row in tables["steps"]} == {(r, s) for r in (0, 1) for s in range(6)}


def test_the_dictionary_is_what_json_prints(found):
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found.to_dict()["ranks"][1]["rank"] == 1


def test_pandas_takes_the_tables_as_they_are(found):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for name, rows in found.tables().items():
        assert len(pandas.DataFrame(rows)) == len(rows), name


def test_polars_takes_the_tables_as_they_are(found):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    for name, rows in found.tables().items():
        assert len(polars.DataFrame(rows, infer_schema_length=None)) == len(rows), name
