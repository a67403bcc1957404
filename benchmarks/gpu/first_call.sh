#!/usr/bin/env bash
# The first ten minutes on a machine with one NVIDIA GPU: every stage under its own time limit, and after each of them one
# archive of all results, so that whatever ends the call leaves what came before.
#
#   benchmarks/gpu/first_call.sh OUT [STAGE ...]          # all stages, results and logs in OUT/first_call.tgz
#
# NCCL_LIBRARY: libnccl.so.2, 2.30.3 or later (two ranks on one GPU). PYTHON: a Python with torch and lagom-overlap.
# LAGOM_DRY=1: prints every stage's command and its limit, and runs none; needs no GPU.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?usage: first_call.sh OUT [STAGE ...]}
shift
mkdir -p "$out" && out=$(cd "$out" && pwd)
work=${LAGOM_WORK:-$(mktemp -d)}
python=${PYTHON:-python3}
library=${NCCL_LIBRARY:-}
dry=${LAGOM_DRY:-}
export PYTHONUNBUFFERED=1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=4
shared=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NET_GDR_LEVEL=LOC NCCL_NVLS_ENABLE=0 "LD_PRELOAD=$library")
pair=("$python" -m torch.distributed.run --standalone --nproc-per-node 2)
train=("$here/train.py")
# SHARE=50: half of the SMs for each rank, so that a rank's collectives compete with its own computation, as on a GPU of
# its own. NCCL takes 64 channels for two ranks of one GPU: more than are resident beside anything else, and a job in bf16
# stood still. 16 of 66 SMs are the share that NCCL takes of an H100 in a node.
half=("${shared[@]}" "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=${SHARE:-50}" "NCCL_MAX_CTAS=${MAX_CTAS:-16}")

stage() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 began=$SECONDS rc
  shift 2
  [[ ${#wanted[@]} -eq 0 || " ${wanted[*]} " == *" $name "* ]] || return 0
  if [[ -n $dry ]]; then
    echo "$name ($limit s): $*"
    return 0
  fi
  (cd "$work" && timeout -k 5 "$limit" "$@") >"$work/$name.log" 2>&1 </dev/null
  rc=$?
  echo "== $name: exit code $rc after $((SECONDS - began)) s"
  tail -n "${LAGOM_TAIL:-6}" "$work/$name.log" | cut -c 1-400
  tar -C "$work" --exclude='*.so' -czf "$out/.first_call.tgz" . && mv "$out/.first_call.tgz" "$out/first_call.tgz"
}
wanted=("$@")

stage probe 40 bash "$here/probe.sh"
stage doctor 60 env "LD_PRELOAD=$library" "$python" -m lagom_overlap doctor
stage selftest 180 "$python" -m lagom_overlap selftest --nccl --library "$library" --ranks-per-gpu 2 \
  --minutes "${SELFTEST_MINUTES:-1.5}" --out "$work/selftest"
stage profiler 90 "$python" "$here/profiler_check.py" --nccl-library "$library" --out "$work/profiler_check"
# Without the multi-process service two processes take turns on the GPU, and a collective waits a turn for every answer.
stage mps 20 bash "$here/mps.sh" start
stage reduce 60 env "${shared[@]}" "${pair[@]}" "$here/reduce.py"
stage stock "${STOCK_LIMIT_S:-90}" env "${half[@]}" "${pair[@]}" "${train[@]}" --steps 200 --record "$work/stock.json"
stage job_traces 60 env "${half[@]}" "${pair[@]}" "${train[@]}" --steps 20 --trace "$work/job_traces"
stage observe 60 env "${half[@]}" "$python" -m lagom_overlap run --observe --out "$work/observed" -- \
  "${pair[@]}" "${train[@]}" --steps 60
stage online 150 env "${half[@]}" "$python" -m lagom_overlap run --online --out "$work/online" -- \
  "${pair[@]}" "${train[@]}" --steps "${ONLINE_STEPS:-900}" --record "$work/online.json"
stage saved 90 env "${half[@]}" "$python" -m lagom_overlap run --online --config "$work/online/settings.json" \
  --out "$work/saved" -- "${pair[@]}" "${train[@]}" --steps 300 --record "$work/saved.json"
bits=("${half[@]}" CUBLAS_WORKSPACE_CONFIG=:4096:8)
stage stock_bits 60 env "${bits[@]}" "${pair[@]}" "${train[@]}" --deterministic --steps 130 --record "$work/stock_bits.json"
stage online_bits 90 env "${bits[@]}" "$python" -m lagom_overlap run --online --out "$work/online_bits" -- \
  "${pair[@]}" "${train[@]}" --deterministic --steps 130 --record "$work/online_bits.json"
stage profiler_cost 60 "$python" "$here/profiler_cost.py"
stage tune 120 env "${half[@]}" "${pair[@]}" -m lagom_overlap tune "$root/examples/overlaps/nccl_fsdp.toml" --out "$work/tuned"
stage mps_stop 20 bash "$here/mps.sh" stop
stage surface 240 "$python" "$here/contention_surface.py" --nccl-library "$library" --budget-s 200 --out "$work/surface"
stage carve_out 120 "$python" "$here/carve_out.py" --out "$work/carve_out"
stage launch_order 90 "$python" "$here/launch_order.py" --out "$work/launch_order"
stage traces 90 "$python" "$here/record_traces.py" --nccl-library "$library" --out "$work/traces"
