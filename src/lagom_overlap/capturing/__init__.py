"""Model code becomes an iteration: a training step captured without a GPU and without weights."""
