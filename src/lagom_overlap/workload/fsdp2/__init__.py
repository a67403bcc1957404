"""FSDP2 on the operators of a step: its hooks, and the step that it would issue with other settings."""
