"""Who ran when, and what that means: simulated, measured and imported timelines alike."""

from lagom_overlap.timeline.metrics import OverlapMetrics, overlap_metrics
from lagom_overlap.timeline.span import Span, SpanKind, Timeline

__all__ = ["OverlapMetrics", "Span", "SpanKind", "Timeline", "overlap_metrics"]
