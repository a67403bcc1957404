"""How a decision reaches the collectives of a job."""
