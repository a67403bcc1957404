"""Models that papers capture and that are no decoders: a vision transformer, a residual network, the Evoformer."""
