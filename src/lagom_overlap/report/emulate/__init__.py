"""The report of an emulated job."""
