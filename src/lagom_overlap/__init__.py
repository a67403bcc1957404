"""lagom-overlap: give each collective just enough of the machine."""

__version__ = "0.1.0"
