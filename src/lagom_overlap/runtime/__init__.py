"""The training job's front door: tuning inside a running job."""
