"""Who ran when, and what that means: simulated, measured and imported timelines alike."""

from lagom_overlap.timeline.span import Span, SpanKind, Timeline

__all__ = ["Span", "SpanKind", "Timeline"]
