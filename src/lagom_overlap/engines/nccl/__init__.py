"""NCCL in one process, through ctypes: every GPU of a box driven at once, to learn what the box can do."""
