"""The NCCL tuner and profiler plug-in: table, record, profile, its functions here, and the fake NCCL that drives it."""
