"""A job file becomes objects, and one command runs end to end."""
