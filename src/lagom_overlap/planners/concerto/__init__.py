"""Concerto (ASPLOS 2025) as a planner: decomposition, scheduling by blocks, fusion; loaded through an entry point."""
