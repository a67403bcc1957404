"""Profiler files to and from timelines; import its modules: a reader should not have to load a writer."""
