"""Write what a job reads: the next run's configuration in the forms that jobs, NCCL and frameworks take."""
