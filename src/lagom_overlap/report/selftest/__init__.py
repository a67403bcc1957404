"""The self-test of NCCL for a terminal."""
