"""Rewrites of an iteration: what a plan is made of. Each is data; applied, it keeps what the step computes."""
