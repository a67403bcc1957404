"""Training steps that others published (torchtitan, Megatron-Bridge, NeMo, Megatron-LM CI), read and predicted."""
