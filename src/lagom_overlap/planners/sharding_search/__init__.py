"""A sharding found by search: Alpa's intra-operator parallelism on our captured programs and cost model."""
