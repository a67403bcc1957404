"""Megatron-LM's overlap strategies as plans, and the usual baselines; loaded through entry points."""
