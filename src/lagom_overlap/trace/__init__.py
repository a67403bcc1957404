"""Profiler files to and from timelines."""
