#!/usr/bin/env bash
# What machine this is: card, driver, versions, tools. Changes nothing.
nvidia-smi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,compute_mode --format=csv
nvcc --version | tail -n 2
uname -srm
ldd --version | head -n 1
nproc
df -h /dev/shm /tmp | cat
ip -brief address 2>/dev/null
"${PYTHON:-python3}" - <<'PY'
import torch, triton
print("torch", torch.__version__, "cuda", torch.version.cuda, "nccl", torch.cuda.nccl.version(), "triton", triton.__version__)
print(torch.cuda.get_device_properties(0))
PY
for name in nvidia-cuda-mps-control nvidia-cuda-mps-server nsys ncu; do
  command -v "$name" || find /usr /opt -name "$name" -type f 2>/dev/null | head -n 2
done
