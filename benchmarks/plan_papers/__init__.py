"""The papers' overlap planners on the papers' grids, simulated, beside what the papers state."""
