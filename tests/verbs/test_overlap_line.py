import json
from pathlib import Path

import torch

import lagom_overlap


class Recorded:
    """A profiler: it exports once, as Kineto does."""

    def __init__(self) -> None:
        self.is_saved = False

    def export_chrome_trace(self, path: str) -> None:
        if self.is_saved:
            raise RuntimeError("Trace is already saved.")
        self.is_saved = True
        events = [
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1000, "pid": 1, "tid": 1},
            kernel("gemm", 0, 600, 7),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 300, 500, 20),
            kernel("gemm", 900, 100, 7),
        ]
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)


def kernel(name: str, start: int, length: int, stream: int) -> dict[str, object]:
    args = {"device": 0, "stream": stream, "correlation": start + 1}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "pid": 0, "tid": 7, "args": args}


LINE = (
    "overlap: step 1.00 ms, compute 700 us (70.0 %), exposed communication 200 us (20.0 %), idle 100 us (10.0 %), "
    "overlap 60.0 %"
)


def test_a_profiler_becomes_one_line_and_keeps_its_trace_where_asked(tmp_path):
    assert lagom_overlap.overlap_line(Recorded()) == LINE
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "trace.json"
    assert lagom_overlap.overlap_line(Recorded(), kept) == LINE
    assert lagom_overlap.overlap_line(kept) == LINE


def test_what_cannot_be_read_ends_no_job(tmp_path):
    spent = Recorded()
    spent.is_saved = True
    assert lagom_overlap.overlap_line(spent) == (
        "overlap: not known (Trace is already saved: give overlap_line the file that it was saved to)"
    )
    idle = torch.profiler.profile()
    assert lagom_overlap.overlap_line(idle).startswith("overlap: not known (AssertionError")
    assert lagom_overlap.overlap_line(tmp_path / "none.json").startswith("overlap: not known (cannot read")


def test_ranks_that_name_one_file_read_their_own_and_a_folder_keeps_the_last_of_each(tmp_path):
    class Shared(Recorded):
        """Another rank writes to the path that both name, before this one reads."""

        def export_chrome_trace(self, path: str) -> None:
            super().export_chrome_trace(path)
            (tmp_path / "trace.json").write_text("{ another rank writes")

    assert lagom_overlap.overlap_line(Shared(), tmp_path / "trace.json") == LINE
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    for _ in range(2):
        assert lagom_overlap.overlap_line(Recorded(), tmp_path / "new" / "traces") == LINE
    assert [path.name for path in (tmp_path / "new" / "traces").iterdir()] == ["rank0.json.gz"]
    assert lagom_overlap.analyze(tmp_path / "new" / "traces").ranks[0].steps == 1
