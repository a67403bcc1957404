"""Run an overlap group on a model, a recording or an engine, and report times.

Concrete backends are not imported here: `jobfile.job` resolves their names, so that torch is loaded only when needed.
"""

from lagom_overlap.backends.base import Backend, BackendRequest

__all__ = ["Backend", "BackendRequest"]
