#!/usr/bin/env bash
# Starts or stops CUDA's multi-process service for this user: kernels of several processes then run side by side.
export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps} CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-/tmp/nvidia-mps-log}
control=$(command -v nvidia-cuda-mps-control || find /usr -name nvidia-cuda-mps-control -type f 2>/dev/null | head -n 1)
[[ -n $control ]] || { echo "no nvidia-cuda-mps-control on this machine"; exit 3; }
case ${1:?start or stop} in
  start) mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY" && setsid "$control" -d && sleep 1 && echo started ;;
  stop) echo quit | "$control" ;;
  *) echo "mps.sh: '$1' is neither start nor stop"; exit 2 ;;
esac
