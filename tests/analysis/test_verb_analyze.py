"""The verb from end to end: verbs/analyze.py, cli/analyze.py and the report's analyze modules."""

import argparse
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chrome_timelines import timelines_from_chrome
from kineto_traces import NCCL, KinetoFile, tar_gz
from rich.console import Console

from lagom_overlap.analysis.findings import Findings
from lagom_overlap.cli import analyze as verb
from lagom_overlap.cli.flags import VERBS
from lagom_overlap.errors import LagomError, OutputError, TraceError
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.report.analyze.charts import waterfall_of
from lagom_overlap.report.analyze.page import render_analysis
from lagom_overlap.report.analyze.terminal import WIDTH, analysis_summary
from lagom_overlap.sim.what_if import AskedChange, Spent, what_if
from lagom_overlap.verbs.analyze import AnalyzeRequest, Compat, run_analyze

PROMISED = {
    "ranks": {
        "file", "rank", "steps", "span_s", "compute_s", "comm_s", "overlap_s", "exposed_comm_s", "idle_s",
        "overlap_pct", "stretched_compute_s",
    },
    "collectives": {
        "kind", "communicator", "bytes", "channels", "count", "total_s", "exposed_s", "stretched_s",
        "busbw_bytes_per_s",
    },
    "groups": {"name", "bound", "per_step", "makespan_s", "collectives"},
    "advice": {"what", "apply", "evidence", "predicted_gain_s"},
}  # fmt: skip
"""The keys of the JSON that are promised to stay, by the list that holds them."""


def job(rank: int = 0, world: int = 2) -> KinetoFile:
    """Three steps: a GEMM alone, a GEMM during an all-gather, an exposed all-reduce, a copy."""
    file = KinetoFile(
        distributedInfo={"rank": rank, "world_size": world, "nccl_version": "2.28.9"},
    )
    for step in range(6):
        at = step * 1000.0
        file.step(step, at, 1000.0)
        file.kernel("gemm<128>", at + 10, 100, grid=[264, 1, 1])
        file.kernel("gemm<128>", at + 200, 150, grid=[264, 1, 1])
        file.nccl("AllGather_RING_LL", at + 190, 180 + rank, op="_allgather_base", nelems=1 << 20)
        file.nccl("AllReduce_Sum_bf16_RING_LL", at + 500, 200, op="allreduce", nelems=1 << 22)
        file.kernel("Memcpy DtoH (Device -> Pageable)", at + 800, 10, cat="gpu_memcpy", bytes=4)
    return file


@pytest.fixture
def trace(tmp_path):
    return job().write(tmp_path / "rank0.json.gz")


def test_every_promised_key_stands_in_what_is_printed(trace, capsys):
    assert verb.run(parse(str(trace), "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= {*PROMISED, "unreachable_comm_s", "warnings"}
    for name, keys in PROMISED.items():
        assert printed[name], f"{name} is empty: its keys are not checked"
        for row in printed[name]:
            assert set(row) >= keys
    assert isinstance(printed["unreachable_comm_s"], float)
    assert all(isinstance(text, str) for text in printed["warnings"])


def test_the_waterfall_adds_up_to_the_step_of_the_average_rank(trace, tmp_path):
    other = job(rank=1).write(tmp_path / "rank1.json.gz")
    findings = run_analyze(AnalyzeRequest(traces=(trace, other))).analysis.findings
    span_ns = sum(rank.measures.span_ns for rank in findings.ranks)
    parts = waterfall_of(findings)
    assert sum(length for _, length, _ in parts) == pytest.approx(span_ns / 12)
    assert {"computation", "copies alone"} <= {name for name, _, _ in parts}


def test_the_waterfall_takes_off_what_two_collectives_expose_at_once(tmp_path):
    file = job()
    file.nccl("Broadcast_RING_LL", 550, 100, op="broadcast", nelems=1 << 10, stream=21)
    findings = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "rank0.json"),))).analysis.findings
    parts = waterfall_of(findings)
    assert sum(length for _, length, _ in parts) == pytest.approx(findings.ranks[0].measures.span_ns / 6)
    twice = [length for name, length, _ in parts if name == "exposed at once, counted twice"]
    assert twice == [pytest.approx(-100_000 / 6)]


def test_the_json_has_the_promised_figures(trace):
    result = run_analyze(AnalyzeRequest(traces=(trace,)))
    (rank,) = result.ranks
    assert rank.steps == len(rank.per_step) == 6
    assert rank.compute_s == pytest.approx(6 * 250e-6)
    assert rank.comm_s == pytest.approx(6 * 380e-6)
    assert rank.exposed_comm_s == pytest.approx(6 * 230e-6)
    assert rank.overlap_pct == pytest.approx(100 * 150 / 380)
    assert rank.stretched_compute_s == pytest.approx(6 * 50e-6)
    gather = next(row for row in result.collectives if row.kind == "all_gather")
    assert (gather.communicator, gather.bytes, gather.channels, gather.count) == ("fsdp", 2 << 20, 16, 6)
    assert gather.stretched_s == pytest.approx(6 * 50e-6)
    assert sum(step.span_s for step in rank.per_step) == pytest.approx(rank.span_s)


def test_two_ranks_tell_waiting_from_moving(tmp_path):
    paths = tuple(job(rank).write(tmp_path / f"rank{rank}.json") for rank in (0, 1))
    result = run_analyze(AnalyzeRequest(traces=paths))
    gather = next(row for row in result.collectives if row.kind == "all_gather")
    assert gather.waiting_s == pytest.approx(6e-6)
    assert [rank.waiting_s for rank in result.ranks] == [0, pytest.approx(6e-6)]


def test_hta_s_conventions_replace_the_figures_of_ranks(trace):
    exact = run_analyze(AnalyzeRequest(traces=(trace,))).ranks[0]
    hta = run_analyze(AnalyzeRequest(traces=(trace,), compat=Compat.HTA))
    assert hta.compat == "hta"
    assert hta.ranks[0].span_s == pytest.approx(4810e-6 - 10e-6)
    assert hta.ranks[0].span_s < exact.span_s
    assert hta.ranks[0].overlap_pct == 39.47


def test_the_run_folder_holds_the_record_the_report_and_the_timeline(trace, tmp_path):
    out = tmp_path / "run"
    result = run_analyze(AnalyzeRequest(traces=(trace,), out=out))
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "run.json", "timeline.json"]
    record = json.loads((out / "run.json").read_bytes())
    assert record["result"]["ranks"][0]["file"] == "rank0.json.gz"
    assert record["request"]["traces"] == ["rank0.json.gz"]
    assert str(tmp_path) not in (out / "report.html").read_text()
    (timeline,) = timelines_from_chrome((out / "timeline.json").read_bytes()).values()
    streams = {span.stream for span in timeline.spans}
    assert {"~ exposed communication", "~ stretched by communication", "~ steps", "stream 7"} <= streams
    exposed = sum(s.duration_s for s in timeline.spans if s.stream == "~ exposed communication")
    assert exposed == pytest.approx(result.ranks[0].exposed_comm_s)
    with pytest.raises(OutputError):
        run_analyze(AnalyzeRequest(traces=(trace,), out=out))


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    VERBS["analyze"](parser.add_subparsers())
    return parser.parse_args(["analyze", *arguments])


def test_json_is_one_object_and_nothing_else(trace, capsys):
    assert verb.run(parse(str(trace), "--json")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tool"] == "lagom analyze"
    assert printed.out.count("\n") == 1


def test_the_summary_fits_a_terminal_of_80_columns_and_one_screen(trace, tmp_path, capsys):
    assert verb.run(parse(str(trace), "--out", str(tmp_path / "o"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("Report:", "Timeline", "Next:"))) <= WIDTH
    assert len(lines) < 52
    text = "\n".join(lines)
    assert "exposed communication" in text
    assert "stretched" in text


def test_at_most_twelve_flags():
    parser = argparse.ArgumentParser()
    VERBS["analyze"](parser.add_subparsers())
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    flags = [a for a in subparsers.choices["analyze"]._actions if a.option_strings and a.dest != "help"]
    assert len(flags) <= 12


def test_names_from_the_trace_are_text_on_the_page_and_in_the_terminal(tmp_path):
    file = job()
    evil = "</script><script>alert(1)</script>\x1b[31m[bold]&lt;"
    for n in range(12):
        file.kernel(evil, 7000 + n * 100, 20)
    file.nccl("AllGather", 8300, 20, op="_allgather_base", nelems=8, **{"Process Group Description": evil})
    report = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),)))
    page = render_analysis(report)
    assert "alert(1)</script>" not in page.replace("&lt;/script&gt;", "")
    console = Console(width=WIDTH, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(analysis_summary(report))
    assert "\x1b[31m" not in console.export_text()
    console.file.close()


class _Balance(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "input", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(trace):
    report = run_analyze(AnalyzeRequest(traces=(trace,)))
    page = render_analysis(report)
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page)
    for figure in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        assert json.loads(figure)["data"]
    assert render_analysis(report) == page


def test_the_page_answers_what_changes_would_gain_before_it_advises(trace):
    report = run_analyze(AnalyzeRequest(traces=(trace,)))
    assert 'id="what-ifs"' not in render_analysis(replace(report, measured=report.analysis, what_ifs=()))
    spent = Spent(step_s=1e-3, overlapped_s=1e-5, exposed_s=1e-5)
    answer = what_if(AskedChange.channels(8), spent, Spent(step_s=9e-4, overlapped_s=1e-5, exposed_s=1e-5))
    page = render_analysis(replace(report, measured=report.analysis, what_ifs=(answer,)))
    assert page.index('id="what-ifs"') < page.index('id="advice"')
    assert "Worth trying: at most 8 channels, +10.0 % of the step (+9.9 % to +10.1 %)." in page
    assert "NCCL_MAX_CTAS=8, or max_ctas = 8 in the options of one process group" in page
    assert "lagom plan JOB.toml" not in page  # a trace has no job file
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []


def test_a_log_without_a_timeline_still_gives_collectives(tmp_path):
    path = tmp_path / "inspector.log"
    row = {
        "header": {"id": "a", "rank": 0, "n_ranks": 4},
        "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 10**6, "coll_exec_time_us": 100},
    }
    path.write_text(json.dumps(row) + "\n")
    result = run_analyze(AnalyzeRequest(traces=(path,), out=tmp_path / "o"))
    (collective,) = result.collectives
    assert collective.busbw_bytes_per_s == pytest.approx(1.5 * 10**6 / 100e-6)
    assert "hold no timeline" in Console(width=80).render_str("").plain + str(analysis_text(result))
    with pytest.raises(TraceError, match="compat"):
        run_analyze(AnalyzeRequest(traces=(path,), compat=Compat.HTA))


def analysis_text(report) -> str:
    from lagom_overlap.report.analyze.words import headline

    return headline(report)


@pytest.mark.parametrize(
    ("ranks_of", "took", "mean"),
    [
        ([1], "800 us", "1 step"),
        ([3], "933 us", "3 steps"),
        ([1, 1], "800 us", "1 step on each of 2 ranks"),
        ([3, 3, 3], "933 us", "3 steps on each of 3 ranks"),
        ([2, 3], "920 us", "5 steps on 2 ranks"),
    ],
)
def test_a_step_takes_the_mean_of_all_steps_of_all_ranks(tmp_path, ranks_of, took, mean):
    """Steps of 1 ms, the last of a rank of 0.8 ms, as its last kernel ends: (1 + 0.8 + 1 + 1 + 0.8) / 5 = 0.92 ms.

    0.2 ms of each are an all-reduce alone, 0.3 ms a product.
    """
    paths = []
    for rank, num_steps in enumerate(ranks_of):
        file = KinetoFile(distributedInfo={"rank": rank, "world_size": len(ranks_of), "nccl_version": "2.28.9"})
        for step in range(num_steps):
            at = step * 1000.0
            file.step(step, at, 1000.0)
            file.kernel("gemm<128>", at + 100, 300, grid=[264, 1, 1])
            file.nccl("AllReduce_Sum_bf16_RING_LL", at + 700, 200, op="allreduce", nelems=1 << 22)
        paths.append(file.write(tmp_path / f"rank{rank}.json"))
    words = analysis_text(run_analyze(AnalyzeRequest(traces=tuple(paths))))
    assert words.startswith(f"A step takes {took} (mean of {mean}): exposed communication 200 us ("), words
    idle_us = int(took.split()[0]) - 200 - 300
    assert f"idle {idle_us} us (" in words


def terminal_text(report) -> str:
    console = Console(width=WIDTH)
    with console.capture() as capture:
        console.print(analysis_summary(report))
    return capture.get()


@pytest.mark.parametrize("data", [b"", b"{}", b"nonsense", b'{"traceEvents": []}', b"\x80\x04pickle"])
def test_bad_input_is_a_lagom_error_before_a_folder_is_made(tmp_path, data):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(LagomError):
        verb.run(parse(str(path), "--out", str(tmp_path / "o")))
    assert not (tmp_path / "o").exists()


def test_ranks_in_a_tar_come_back_in_order(tmp_path):
    path = tmp_path / "job.tar.gz"
    path.write_bytes(tar_gz({f"worker{rank}.json": job(rank).to_json() for rank in (1, 0)}))
    result = run_analyze(AnalyzeRequest(traces=(path,)))
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert not any("ranks given" in text for text in result.warnings)


def test_communication_beyond_every_knob_is_named(tmp_path):
    file = job()
    file.kernel("void deep_ep::intranode::dispatch<8>(int*)", 7000, 50)
    file.kernel(NCCL.format("SendRecv"), 7100, 50)
    result = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),)))
    assert result.unreachable_comm_s == pytest.approx(50e-6)
    shown = terminal_text(run_analyze(AnalyzeRequest(traces=(tmp_path / "t.json",))))
    assert "8.33 us of communication per step (0.7 %) is beyond every knob of NCCL: all_to_all" in " ".join(
        shown.split()
    )


def test_a_trace_without_steps_is_not_called_a_step(tmp_path):
    file = KinetoFile()
    file.kernel("gemm", 0, 100)
    report = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),)))
    assert analysis_text(report).startswith("The whole trace takes 100 us (no steps marked): ")


@pytest.mark.parametrize("is_anonymous", [False, True])
def test_a_trace_of_emulated_gpus_says_so_and_blames_no_cpu(tmp_path, is_anonymous):
    """Its launches are on the machine's own clock, here far behind the kernels that they launch."""
    files = []
    for gpu in ("NVIDIA H100-SXM5-80GB", "NVIDIA H100-SXM5-80GB (emulated)"):
        file = KinetoFile(deviceProperties=[{"id": 0, "name": gpu, "numSms": 132}])
        for number in range(3):
            file.kernel("gemm", 200 * number, 100, launch=200 * number + 150)
        files.append(file.write(tmp_path / f"{len(files)}.json"))
    real, emulated = (run_analyze(AnalyzeRequest(traces=(path,), is_anonymous=is_anonymous)) for path in files)
    assert any("clocks of CPU and GPU disagree" in line for line in real.warnings)
    assert not any("clocks of CPU and GPU disagree" in line for line in emulated.warnings)
    assert [line for line in emulated.warnings if line.startswith("emulated GPUs, nothing was measured")]
    assert [result.ranks[0].host_bound_s for result in (real, emulated)] == [pytest.approx(200e-6), 0]


def test_the_same_traces_give_the_same_json(trace):
    assert run_analyze(AnalyzeRequest(traces=(trace,))) == run_analyze(AnalyzeRequest(traces=(trace,)))


def test_every_real_trace_is_analysed_and_adds_up(shared_traces):
    paths = (
        *sorted(shared_traces.glob("*/*.json.gz")),
        shared_traces / "param_dlrm_8xV100" / "dlrm_kineto.tar.gz",
    )
    for path in paths:
        found = run_analyze(AnalyzeRequest(traces=(path,))).analysis.findings
        for rank in found.ranks:
            of_rank = rank.measures
            assert of_rank.comm_ns == of_rank.overlap_ns + of_rank.exposed_comm_ns
            assert 0 <= of_rank.host_bound_ns <= of_rank.idle_ns <= of_rank.span_ns
        contention = found.contention
        assert sum(contention.of_rank) == pytest.approx(sum(contention.blame.values()))
        assert sum(contention.of_rank) == pytest.approx(contention.total.stretched_ns)


def test_the_headline_says_of_how_much_the_stretch_is_known(tmp_path):
    # Beside collectives runs a GEMM of 150 us with twins and another of 450 us without: 25 % is known.
    file = KinetoFile()
    for step in range(6):
        at = step * 2000.0
        file.kernel("gemm<128>", at, 100)
        file.kernel("gemm<128>", at + 200, 150)
        file.kernel("gemm<256>", at + 400, 450)
        file.nccl("AllGather_RING_LL", at + 190, 700, op="_allgather_base", nelems=1 << 20)
    report = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),)))
    assert "stretched by it 300 us (2.8 %, measured for 25 % of the overlapped computation)" in analysis_text(report)


def test_the_headline_tells_copies_that_nothing_hides_where_they_weigh(tmp_path):
    file = KinetoFile()
    file.kernel("gemm", 0, 90)
    file.kernel("Memcpy HtoD (Pinned -> Device)", 80, 20, cat="gpu_memcpy", bytes=4)
    report = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "t.json"),)))
    assert analysis_text(report).endswith(", copies alone 10.0 us (10.0 %).")


@pytest.mark.parametrize(
    ("gpu", "sms"),
    [
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H100 PCIe MIG 1g.10gb", 16),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42),
        ("AMD Instinct MI300X", 38),
        ("AMD Instinct MI355X", 32),
        ("AMD Instinct MI300X", 37),
        ("NVIDIA H100 80GB HBM3", 1),
        ("NVIDIA H100 80GB HBM3", 100_000),
    ],
)
def test_no_number_of_sms_takes_the_figures_away(tmp_path, gpu, sms):
    file = job()
    file.top["deviceProperties"] = [{"id": 0, "name": gpu, "numSms": sms}]
    path, whole = file.write(tmp_path / "rank0.json"), job().write(tmp_path / "rank1.json")
    ours, theirs = (run_analyze(AnalyzeRequest(traces=(held,))).ranks[0] for held in (path, whole))
    assert (ours.span_s, ours.compute_s, ours.exposed_comm_s) == (
        theirs.span_s,
        theirs.compute_s,
        theirs.exposed_comm_s,
    )


def test_the_next_line_runs_from_here_and_the_page_does_not_name_the_folder(tmp_path):
    trace = steps_of(500, (530, 450)).write(tmp_path / "rank0.json.gz")
    result = run_analyze(AnalyzeRequest(traces=(trace,), out=tmp_path / "o"))
    assert result.next_line.startswith(f"lagom tune --from-trace {trace}  #")
    assert "lagom tune --from-trace rank0.json.gz" in (tmp_path / "o" / "report.html").read_text()


def steps_of(busy_us: float, *comms: tuple[float, float]) -> KinetoFile:
    """Three steps of 1 ms that begin with a GEMM of `busy_us`, and have all-reduces at these starts and lengths."""
    file = KinetoFile()
    for at in (0.0, 1000.0, 2000.0):
        file.step(int(at) // 1000, at, 1000.0)
        file.kernel("gemm<128>", at + 20, busy_us, launch=at + 5)
        for start, length in comms:
            file.nccl("AllReduce_Sum_bf16_RING_LL", at + start, length, op="allreduce", nelems=1 << 22, launch=at + 6)
    return file


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (steps_of(960), "lagom run --observe -- COMMAND"),  # nothing communicates
        (steps_of(960, (100, 400)), "lagom docs howto/no_gain"),  # all of it is hidden
        (steps_of(500, (530, 450)), "lagom tune --from-trace"),  # all of it is exposed
    ],
)
def test_the_next_line_fits_what_was_found(file, line, tmp_path):
    result = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "rank0.json"),)))
    assert result.next_line.startswith(line), result.summary()


def test_on_gloo_the_next_line_asks_for_the_jobs_own_calls_where_no_framework_makes_them(monkeypatch):
    trace = Path(__file__).parents[1] / "data" / "zero_step_gloo_trace.json.gz"
    gloo = AnalyzeRequest(traces=(trace,))
    assert run_analyze(gloo).next_line.startswith("lagom run --online --adapters calls -- COMMAND")
    monkeypatch.setattr(Findings, "frameworks", frozenset({"FSDP"}))
    assert run_analyze(gloo).next_line.startswith("lagom run --online -- COMMAND")


def test_where_the_cpu_is_late_the_next_line_searches_no_setting(tmp_path):
    file = KinetoFile()
    for number in range(60):
        file.kernel("gemm<128>", 100.0 * number, 10, launch=100.0 * number - 4)
        file.nccl("AllReduce_Sum", 100.0 * number + 3, 20, op="allreduce", nelems=1 << 20, launch=100.0 * number - 3)
    result = run_analyze(AnalyzeRequest(traces=(file.write(tmp_path / "rank0.json"),)))
    assert result.next_line.startswith("lagom docs howto/launches")


def test_the_next_line_names_the_command_of_the_run_that_left_the_trace(tmp_path):
    (tmp_path / "traces").mkdir()
    request = {"command": ["torchrun", "train.py", "--name", "a b"], "mode": "observe"}
    RunFolder(tmp_path).write(RunRecord.now(RunKind.RUN, seed=None, request=request))
    traces = steps_of(960).write(tmp_path / "traces" / "rank0.json")
    for given in (tmp_path, tmp_path / "traces", traces):
        line = run_analyze(AnalyzeRequest(traces=(given,))).next_line
        assert line.startswith("lagom run --observe -- torchrun train.py --name 'a b'  #")
    assert "COMMAND" in run_analyze(AnalyzeRequest(traces=(traces,), is_anonymous=True)).next_line
