"""The shell's front door: one module per verb."""
