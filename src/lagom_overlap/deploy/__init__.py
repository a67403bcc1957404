"""Write what a job reads."""
