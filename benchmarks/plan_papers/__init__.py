"""The papers' overlap planners on the papers' grids, simulated, next to what the papers state."""
