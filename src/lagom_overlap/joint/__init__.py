"""Plan and parameters as one problem."""
