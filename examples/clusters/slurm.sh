#!/bin/bash
# Tune a job online under Slurm: one task per node, whose torchrun starts a rank for each of its GPUs.
#
#   sbatch examples/clusters/slurm.sh train.py          # the settings found are in lagom-JOBID/settings.json
#   LAGOM_DISABLE=1 sbatch examples/clusters/slurm.sh train.py      # the same job, as if lagom were not there
#SBATCH --job-name=lagom
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# All tasks share the folder: file names carry the rank. It must lie where other users cannot replace files.
srun --kill-on-bad-exit=1 lagom run --online --out "${SCRATCH:-$PWD}/lagom-$SLURM_JOB_ID" -- \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" "$@"
