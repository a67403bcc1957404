"""The shell's front door: one module per verb."""

from lagom_overlap.cli.main import main

__all__ = ["main"]
