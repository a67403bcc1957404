"""Centauri (ASPLOS 2024) as a planner: primitives, groups, workloads, three tiers; loaded through an entry point."""
