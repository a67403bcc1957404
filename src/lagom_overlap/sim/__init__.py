"""Event simulation: a workload and a cost model become a timeline."""
