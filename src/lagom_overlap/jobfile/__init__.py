"""A job file becomes objects; the only place where names become objects."""
