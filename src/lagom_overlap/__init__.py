"""lagom-overlap: give each collective just enough of the machine. What type checkers see is in `__init__.pyi`."""

from importlib import import_module

__all__ = ["OnlineOptions", "OnlineTuner", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`OnlineTuner` and `OnlineOptions` on first use: importing the package imports neither torch nor a layer of it."""
    if name in {"OnlineTuner", "OnlineOptions"}:
        return getattr(import_module("lagom_overlap.runtime.online"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
