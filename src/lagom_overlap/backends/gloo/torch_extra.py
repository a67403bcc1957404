"""The optional dependency of this backend."""

import importlib.util

from lagom_overlap.errors import MissingDependencyError


def require_torch() -> None:
    """Refuses to go on without torch, without the second that importing it would cost the controller.

    Raises:
        MissingDependencyError: with the pip line.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError('the gloo backend needs torch: pip install "lagom-overlap[torch]"')
