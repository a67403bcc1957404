"""One TOML file per cluster: its nodes and wires, and which GPU it has; `hardware.load_preset` reads it."""
