"""The training job's front door: tune its collectives while it runs."""
