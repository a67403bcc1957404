"""The timeline of a simulated training iteration: one rank per pipeline stage, its slots and what follows them."""

from lagom_overlap.sim.training import TrainingTimes
from lagom_overlap.timeline import Span, SpanKind, Timeline


def training_timeline(times: TrainingTimes) -> Timeline:
    """Forwards `F3` and backwards `B3` by micro-batch (`F3.1`: of chunk 1), then gradients and the optimizer."""
    spans = []
    for stage, runs in zip(times.stages, times.runs, strict=True):
        for run in runs:
            chunk = f".{run.slot.chunk}" if run.slot.chunk else ""
            name = f"{'F' if run.slot.forward else 'B'}{run.slot.micro_batch}{chunk}"
            spans.append(_compute(name, stage.rank, run.start_s, run.end_s))
        reduced_s = stage.end_s + stage.gradients_s
        if stage.gradients_s > 0:
            spans.append(
                Span(
                    name="gradients",
                    kind=SpanKind.COMM,
                    stream="dp",
                    start_s=stage.end_s,
                    end_s=reduced_s,
                    rank=stage.rank,
                )
            )
        spans.append(_compute("optimizer", stage.rank, reduced_s, reduced_s + stage.optimizer_s))
    return Timeline(tuple(spans))


def _compute(name: str, rank: int, start_s: float, end_s: float) -> Span:
    return Span(name=name, kind=SpanKind.COMP, stream="compute", start_s=start_s, end_s=end_s, rank=rank)
