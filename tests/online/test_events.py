"""Events and metrics as other programs read them."""

import json
import os
import re

import pytest

from lagom_overlap.online.events import HELP, JsonLines, PrometheusFile, rank_of

LINE = re.compile(r'^([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} ([-+0-9.e]+)$')
"""A sample in Prometheus' text exposition format, version 0.0.4."""


def test_each_event_is_a_line_with_time_rank_and_its_own_fields(tmp_path):
    events = JsonLines(tmp_path / "e.jsonl", rank=3)
    events.write("begin", mode="observe", steps=2)
    events.write("end", note='quotes " and\nlines')
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [(line["rank"], line["event"]) for line in lines] == [(3, "begin"), (3, "end")]
    assert lines[0]["steps"] == 2
    assert lines[1]["note"] == 'quotes " and\nlines'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", lines[0]["time"])


def test_both_files_are_for_their_owner_alone(tmp_path):
    usual = os.umask(0o022)
    try:
        JsonLines(tmp_path / "e.jsonl", rank=0).write("begin")
        PrometheusFile(tmp_path / "m.prom", rank=0).flush()
    finally:
        os.umask(usual)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("e.jsonl", "m.prom")] == [0o600, 0o600]


def test_the_metrics_are_prometheus_text(tmp_path):
    metrics = PrometheusFile(tmp_path / "m.prom", rank=1)
    metrics.set("lagom_steps", 7)
    metrics.set("lagom_reachable_ratio", 0.25, knob='a "b"\\c\n')
    metrics.set("lagom_reachable_ratio", 1e-9, knob="channels")
    metrics.set("lagom_steps", 8)
    metrics.flush()
    lines = (tmp_path / "m.prom").read_text().splitlines()
    samples = [LINE.match(line) for line in lines if not line.startswith("#")]
    assert all(samples)
    assert [(match[1], float(match[3])) for match in samples] == [
        ("lagom_steps", 8.0),
        ("lagom_reachable_ratio", 0.25),
        ("lagom_reachable_ratio", 1e-9),
    ]
    assert all(match[2].startswith('rank="1"') for match in samples)
    for name in ("lagom_steps", "lagom_reachable_ratio"):
        assert lines.count(f"# TYPE {name} gauge") == 1
        assert lines.count(f"# HELP {name} {HELP[name]}") == 1
    metrics.forget("lagom_steps")
    assert "lagom_steps" not in metrics.text()


def test_a_metric_that_is_not_described_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metric 'x'"):
        PrometheusFile(tmp_path / "m", rank=0).set("x", 1)


def test_files_that_cannot_be_written_are_said_once_and_end_nothing(tmp_path, caplog):
    events, metrics = JsonLines(tmp_path / "no" / "e", rank=0), PrometheusFile(tmp_path / "no" / "m", rank=0)
    metrics.set("lagom_steps", 1)
    for _ in range(3):
        events.write("begin")
        metrics.flush()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "events are no longer written",
        "metrics are no longer written",
    ]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 0), ({"RANK": "3", "SLURM_PROCID": "1"}, 3), ({"SLURM_PROCID": "2"}, 2), ({"RANK": "x", "PMI_RANK": "4"}, 4)],
)
def test_the_rank_is_told_as_the_plug_in_tells_it(environment, rank):
    assert rank_of(environment) == rank
