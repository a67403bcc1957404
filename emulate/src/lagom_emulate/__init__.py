"""Real jobs on emulated GPUs: one simulated clock for the operations that all their processes submit."""
