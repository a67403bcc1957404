import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from statistics import median

import pytest
from toy_tuning import changed

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.report.tune.page import render_tuning
from lagom_overlap.report.tune.rounds import FAR_ABOVE
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.problem import Failure, GroupProblem
from lagom_overlap.tuners.verdict import judge
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

VOID = {"meta", "br", "link", "img", "hr", "input"}
HOSTILE = (
    '</script><script>alert(1)</script><img src="http://evil.example/x" onerror=alert(2)>&amp;"\'{{7*7}}\u2028%{x}'
)


class Page(HTMLParser):
    """What a browser would make of the page: elements, visible text, scripts, figures."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.figures: dict[str, dict] = {}
        self._figure: str | None = None
        self.feed(source)
        self.close()
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(tag)
        if tag == "script":
            self._figure = dict(attrs).get("id")
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened = self.open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"
        if tag == "script" and self._figure is not None:
            self.figures[self._figure] = json.loads(self.scripts[-1])

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def traces(self, figure: str) -> list[dict]:
        return self.figures[figure]["data"]


@pytest.fixture(scope="module")
def source(report) -> str:
    return render_tuning(report)


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


def assert_loads_nothing(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        for name in ("src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"):
            assert not (attributes.get(name) or "").strip(), f"<{tag} {name}={attributes.get(name)!r}>"
        assert not [name for name in attributes if name.startswith("on")]


def test_the_page_loads_nothing_and_forbids_itself_to(page, source):
    assert_loads_nothing(page)
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    styles = re.search(r"<style>(.*?)</style>", source, re.DOTALL)[1]
    assert "url(" not in styles
    assert "@import" not in styles


def test_a_page_is_at_most_half_a_megabyte(make_report, make_group):
    """However many groups: figures of those that take most time come first, and what is left out is said."""
    many = render_tuning(make_report(tuple(make_group(f"g/{i}") for i in range(40))))
    assert len(many.encode()) < 500_000
    page = Page(many)
    assert any(name.startswith("figure-plane-") for name in page.figures)
    assert "left out to keep this page small" in page.text


def test_the_first_screen_is_the_answer_what_to_type_and_what_changes(page):
    start = page.text[: page.text.index("Collective by collective")]
    assert "lagom run --" in start
    assert "channels" in start
    assert "figure-ratios" in page.figures


def test_equal_reports_give_equal_pages(make_report, source):
    assert render_tuning(make_report()) == source


def test_the_verdict_comes_first_and_its_numbers_are_the_verdicts(page, report):
    ratio = report.verdict.over_default
    sentence = (
        f"Tuned is {ratio.median_ratio:.2f}× faster than the native PyTorch call (median of {ratio.num_pairs} shuffled "
        f"pairs, quartiles {ratio.q25:.2f}–{ratio.q75:.2f}, {ratio.num_wins}/{ratio.num_pairs} wins): adopted."
    )
    assert sentence in page.text
    assert page.text.index(sentence) < page.text.index("What changes")
    for part in (report.engine_share.engine, report.engine_share.tuning):
        assert f"{part.median_ratio:.2f}×" in page.text
        assert f"quartiles {part.q25:.2f}–{part.q75:.2f}" in page.text
    assert report.verdict.best_fixed == "fixed_max"
    assert f"{report.verdict.over_baselines['fixed_max'].median_ratio:.2f}×" in page.text


def test_headings_never_skip_a_level(page, make_report, make_group):
    many = Page(render_tuning(make_report((make_group("a"), make_group("b")))))
    for headings in (page.headings, many.headings):
        levels = [int(tag[1]) for tag in headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in pairwise(levels))


def test_the_plane_shows_every_probe_at_its_communication_and_computation_time(page, report):
    outcomes = [e.outcomes["block/0"] for e in report.search.entries if e.step.kind is StepKind.SEARCH]
    points = next(t for t in page.traces("figure-plane-1") if t.get("name") == "probe")
    assert points["x"] == pytest.approx([m.total_comm_s * 1e3 for m in outcomes])
    assert points["y"] == pytest.approx([m.comp_s * 1e3 for m in outcomes])
    assert points["marker"]["color"] == pytest.approx([m.makespan_s * 1e3 for m in outcomes])
    names = {trace.get("name") for trace in page.traces("figure-plane-1")}
    assert {"all_gather.0", "reduce_scatter.1", "tuned", "fastest probe", "the native PyTorch call"} <= names


def test_arrows_of_the_plane_have_the_colour_of_the_collective_that_changed(page, report):
    steps = [e for e in report.search.entries if e.step.kind is StepKind.SEARCH]
    one, other = steps[1], steps[2]
    changed = [a != b for a, b in zip(one.step.assignments["block/0"], other.step.assignments["block/0"], strict=True)]
    assert changed == [True, False]
    arrows = {t["name"]: t for t in page.traces("figure-plane-1") if t.get("marker", {}).get("symbol") == "arrow"}
    expected = [e.outcomes["block/0"].total_comm_s * 1e3 for e in (one, other)]
    assert arrows["all_gather.0"]["x"][:2] == pytest.approx(expected)
    assert arrows["all_gather.0"]["line"]["color"] != arrows["reduce_scatter.1"]["line"]["color"]


def test_the_best_so_far_never_rises_and_ends_at_the_least(page, report):
    line = next(t for t in page.traces("figure-trajectory-1") if t.get("name") == "best so far")["y"]
    assert line == sorted(line, reverse=True)
    times = [e.outcomes["block/0"].makespan_s for e in report.search.entries if e.step.kind is StepKind.SEARCH]
    assert line[-1] == pytest.approx(min(times) * 1e3)


def axis_titles(page: Page, figure: str) -> list[str]:
    layout = page.figures[figure]["layout"]
    return [layout[k]["title"]["text"] for k in sorted(layout) if k.startswith("yaxis") and "title" in layout[k]]


def test_h_has_a_panel_only_where_the_tuner_has_one(page, report):
    assert axis_titles(page, "figure-trajectory-1") == ["makespan (ms)", "channels", "chunk", "H"]
    bare = tuple(replace(entry, step=replace(entry.step, priorities={})) for entry in report.search.entries)
    without = Page(render_tuning(changed(report, entries=bare)))
    assert axis_titles(without, "figure-trajectory-1") == ["makespan (ms)", "channels", "chunk"]
    assert "and H, the computation lost" not in without.text


def test_an_infinite_h_is_left_out_of_the_figure(report):
    steps = [replace(e.step, priorities={"block/0": {"all_gather.0": float("-inf")}}) for e in report.search.entries]
    entries = tuple(replace(e, step=s) for e, s in zip(report.search.entries, steps, strict=True))
    page = Page(render_tuning(changed(report, entries=entries)))
    assert "H" not in axis_titles(page, "figure-trajectory-1")


def test_every_rounds_makespan_is_in_the_figure_of_rounds(page, report):
    """Of a contender far behind only the median, as a number at the edge: it would make one point of the others."""
    shown = sorted(x for trace in page.traces("figure-rounds") for x in trace["x"] if len(trace["x"]) > 1)
    rounds = report.verdict.makespans_s
    near = [times for times in rounds.values() if median(times) <= FAR_ABOVE * min(map(median, rounds.values()))]
    assert 1 < len(near) < len(rounds)
    assert shown == pytest.approx(sorted(t * 1e3 for times in near for t in times))
    [note] = page.figures["figure-rounds"]["layout"]["annotations"]
    assert note["text"].endswith("▸")


def test_the_timelines_before_and_after_share_one_axis(page, report):
    bars = [trace for trace in page.traces("figure-gantt-1") if trace["type"] == "bar"]
    before = report.search.timelines_under("default")["block/0"]
    assert len(bars) == 2
    assert bars[0]["x"] == pytest.approx([span.duration_s * 1e3 for span in before.spans])
    assert bars[0]["base"] == pytest.approx([span.start_s * 1e3 for span in before.spans])
    layout = page.figures["figure-gantt-1"]["layout"]
    assert layout["xaxis"]["range"] == layout["xaxis2"]["range"]


def test_names_are_data_wherever_they_stand(make_report):
    group = OverlapGroup(
        name=f"group{HOSTILE}",
        computations=(CompOp(name=f"comp{HOSTILE}", work=Gemm(4096, 4096, 1024)),),
        comms=(CommOp(name=HOSTILE, collective=Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)),),
    )
    report = make_report((group,))
    entry = report.search.entries[1]
    failed = replace(entry, outcomes={group.name: Failure(f"reason{HOSTILE}")})
    report = changed(
        report,
        job=f"job{HOSTILE}",
        backend_description=f"backend{HOSTILE}",
        tuner=f"tuner{HOSTILE}",
        machine={f"machine{HOSTILE}": f"value{HOSTILE}"},
        notes=(f"note{HOSTILE}",),
        arm_words={"default": f"words{HOSTILE}"},
        entries=(report.search.entries[0], failed, *report.search.entries[2:]),
    )
    page = Page(render_tuning(report))
    assert_loads_nothing(page)
    assert [tag for tag, _ in page.elements].count("script") == 1 + len(page.figures)
    for word in ("job", "backend", "tuner", "machine", "value", "note", "reason", "group"):
        assert f"{word}{HOSTILE[:40]}" in page.text
    for name, figure in page.figures.items():
        raw = json.dumps(figure)
        assert "<script" not in raw, name
        assert "<img" not in raw, name


def test_the_json_of_a_figure_cannot_end_its_script(make_report, make_group):
    source = render_tuning(make_report((make_group("</script><!--<script>"),)))
    for body in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', source, re.DOTALL):
        assert not set("<>&") & set(body)
        json.loads(body)


def test_names_that_look_like_dates_or_numbers_stay_names(make_report, make_group):
    group = make_group()
    renamed = replace(
        group, computations=tuple(replace(c, name=f"2024-01-0{i + 1}") for i, c in enumerate(group.computations))
    )
    report = make_report((renamed,))
    line = Timeline((Span(name="x", kind=SpanKind.COMP, stream="2024-01-01", start_s=0, end_s=1),))
    entries = tuple(
        replace(entry, outcomes={name: replace(ran, timeline=line) for name, ran in entry.outcomes.items()})
        if entry.step.arm == "default"
        else entry
        for entry in report.search.entries
    )
    page = Page(render_tuning(changed(report, entries=entries)))
    assert page.figures["figure-gantt-1"]["layout"]["yaxis"]["type"] == "category"


@pytest.mark.slow
def test_ten_groups_of_up_to_eight_collectives(make_report, make_group):
    groups = tuple(make_group(f"g/{i}", num_comms=1 + i % 8, num_comps=2) for i in range(10))
    report = make_report(groups)
    source = render_tuning(report)
    page = Page(source)
    assert any(name.startswith("figure-plane") for name in page.figures)
    assert len(source) < 500_000
    opened = [a for t, a in page.elements if t == "details" and "open" in a]
    assert len(opened) == 1
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(set(ids)) == len(ids)


def test_twelve_collectives_still_have_a_style_each(make_report, make_group):
    page = Page(render_tuning(make_report((make_group(num_comms=12),))))
    lines = [t["line"] for t in page.traces("figure-trajectory-1") if t.get("x") == [None]]
    assert len({(line["color"], line["dash"]) for line in lines}) == 12


def test_a_run_without_a_verdict_shows_no_ab_and_proves_nothing(make_report):
    page = Page(render_tuning(make_report(with_verdict=False)))
    assert "No verdict: interrupted after" in page.text
    assert "The paired A/B" not in page.text
    assert "prove nothing" in page.text
    assert "figure-plane-1" in page.figures


def test_a_run_that_broke_off_in_the_ab_says_so(report):
    page = Page(render_tuning(changed(report, verdict=None, interrupted=True)))
    assert "The A/B was not finished" in page.text


def test_a_failure_of_the_search_is_shown_with_its_reason(report, add_failure):
    page = Page(render_tuning(add_failure(report)))
    assert "could not run: too many channels for this message" in page.text
    failed = next(t for t in page.traces("figure-trajectory-1") if t.get("name") == "could not run")
    assert failed["x"] == [2]


def test_a_tuned_assignment_that_failed_in_the_ab_has_no_tiles(report):
    times = {arm: held for arm, held in report.verdict.makespans_s.items() if arm != "tuned"} | {"tuned": ()}
    verdict = judge(times, tuned_differs=True, failures={"tuned": "no memory"})
    page = Page(render_tuning(changed(report, verdict=verdict)))
    assert "tuned failed in the A/B (no memory)" in page.text
    assert "The whole gain" not in page.text
    assert "figure-ratios" not in page.figures


def test_a_baseline_that_failed_in_the_ab_is_named(report):
    times = {arm: held for arm, held in report.verdict.makespans_s.items() if arm != "fixed_max"} | {
        "fixed_max": (1.0,)
    }
    verdict = judge(times, tuned_differs=True, failures={"fixed_max": "no memory"})
    page = Page(render_tuning(changed(report, verdict=verdict)))
    assert "All knobs maximal failed in the A/B (no memory)." in page.text


def test_one_probe_alone_makes_a_page(make_report):
    report = make_report(with_verdict=False)
    defaults = {p.group.name: p.default for p in report.search.problems}
    page = Page(render_tuning(changed(report, entries=report.search.entries[:1], recommended=defaults)))
    assert "No verdict: interrupted after 1 measurement of" in page.text
    assert axis_titles(page, "figure-trajectory-1") == ["makespan (ms)"]
    assert "figure-plane-1" in page.figures


def test_nothing_measured_makes_a_page_without_figures(make_report):
    report = changed(make_report(with_verdict=False), entries=())
    page = Page(render_tuning(report))
    assert page.figures == {}
    assert "not measured" in page.text


def test_every_probe_failed_makes_a_page(make_report):
    report = make_report(with_verdict=False)
    failed = tuple(replace(e, outcomes=dict.fromkeys(e.outcomes, Failure("no"))) for e in report.search.entries)
    page = Page(render_tuning(changed(report, entries=failed)))
    assert "figure-plane-1" not in page.figures
    assert "figure-trajectory-1" in page.figures


def test_an_untouched_default_is_auto(make_report):
    report = make_report()
    old = report.search.problems[0]
    problem = GroupProblem(group=old.group, spaces=old.spaces, default=(CommConfig(),) * 2, baselines=old.baselines)
    page = Page(render_tuning(changed(report, problems=(problem,))))
    assert "auto →" in page.text


def test_how_it_was_measured_is_there(page, report):
    for value in (*report.machine.values(), *report.versions.values(), *report.notes, report.date, "94.0 s"):
        assert value in page.text
    num = sum(e.step.kind is StepKind.SEARCH for e in report.search.entries)
    assert f"measurements of the search {num}" in page.text
    assert "median of 5 runs" in page.text


def test_the_group_that_takes_most_of_the_iteration_is_open(make_report, make_group):
    groups = (make_group("once", count=1), make_group("often", count=30), make_group("twice", count=2))
    source = render_tuning(make_report(groups))
    opened = re.search(r"<details id=\"group-(\d)\" open><summary><h3>(\w+)</h3>(.*?)</summary>", source, re.DOTALL)
    assert opened[1] == "2"
    assert opened[2] == "often"
    assert "91 % of the groups&#39; time" in opened[3] or "91 % of the groups' time" in opened[3]


def test_a_prediction_is_never_called_adopted_and_draws_no_rounds(report, page):
    text = Page(render_tuning(changed(report, backend="predicted_from_trace")))
    assert "A prediction, not an A/B" in text.text
    assert "Nothing was run" in text.text
    assert "Adopted" not in text.text
    assert not {"figure-ratios", "figure-rounds"} & set(text.figures)
    assert {"figure-ratios", "figure-rounds"} & set(page.figures)


def test_the_share_of_the_step_is_a_column_only_where_the_step_has_a_price(make_report, make_group):
    report = make_report((make_group("g/0", num_comms=1, count=3),))
    head = '<th scope="col" class="num">of the step</th>'
    priced = changed(report, step_s=2.0, tuned_step_s=1.96, group_steps_s={"g/0": 1.98})
    assert head in render_tuning(priced)
    assert head not in render_tuning(report)
