"""The optional dependency of the backends on CPU ranks."""

import importlib.util

from lagom_overlap.errors import MissingDependencyError


def require_torch(backend: str = "gloo") -> None:
    """Refuses to go on without torch, without the second that importing it would cost the controller.

    Raises:
        MissingDependencyError: with the pip line.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(f"the {backend} backend needs torch: pip install torch")
