#!/bin/sh
# Sanitizer runs: address + undefined on the fuzzer and on the stress drivers (plug-ins, workers, search, emulated device),
# thread on the plug-ins, the workers and the device.
#   csrc/sanitize.sh [build folder] [decisions] [executions]
# Needs gcc or clang (CC). TSan knows no fences; every word that two threads share is atomic, so it needs to know none.
set -eu
source=$(cd "$(dirname "$0")" && pwd)
build=${1:-build/sanitize}
decisions=${2:-1000000}
executions=${3:-1000000}
cc=${CC:-cc}
mkdir -p "$build"
flags="-std=c11 -g -O1 -fno-omit-frame-pointer -Wall -Wextra"

echo "== address, undefined: fuzzer, $executions executions"
$cc $flags -fsanitize=address,undefined -fno-sanitize-recover=all -o "$build/fuzz_asan" "$source/fuzz_table.c" -ldl -lpthread
"$build/fuzz_asan" "$executions" 7

echo "== address, undefined: fuzzer guided by coverage, a minute"
case $($cc --version) in
*clang*) $cc $flags -fsanitize=fuzzer,address,undefined -DLAGOM_LIBFUZZER -o "$build/fuzz_guided" "$source/fuzz_table.c" -ldl -lpthread
  "$build/fuzz_guided" -max_total_time=60 ;;
*) $cc $flags -fsanitize=address,undefined -fno-sanitize-recover=all -fsanitize-coverage=trace-pc,trace-cmp -DLAGOM_LIBFUZZER \
    -c -o "$build/fuzz_table.o" "$source/fuzz_table.c"
  $cc $flags -fsanitize=address,undefined -o "$build/fuzz_guided" "$source/cover.c" "$build/fuzz_table.o" -ldl -lpthread
  "$build/fuzz_guided" 60 ;;
esac

echo "== address, undefined: stress, $decisions decisions"
$cc $flags -fsanitize=address,undefined -fno-sanitize-recover=all -fPIC -shared -fvisibility=hidden \
  -o "$build/liblagom_tuner_asan.so" "$source"/lagom_tuner*.c "$source"/lagom_profiler*.c -ldl -lpthread
$cc $flags -fsanitize=address,undefined -fno-sanitize-recover=all -o "$build/stress_asan" \
  "$source/stress.c" "$source"/nccl/nccl_host*.c -ldl -lm -lpthread
LAGOM_RECORD="$build/record.asan" LAGOM_RECORD_ENTRIES=4096 \
  "$build/stress_asan" "$build/liblagom_tuner_asan.so" "$decisions" 4

echo "== thread: stress, $decisions decisions"
tsan_flags="$flags -fsanitize=thread"
case $($cc --version) in *clang*) ;; *) tsan_flags="$tsan_flags -Wno-tsan" ;; esac
$cc $tsan_flags -fPIC -shared -fvisibility=hidden -o "$build/liblagom_tuner_tsan.so" \
  "$source"/lagom_tuner*.c "$source"/lagom_profiler*.c -ldl -lpthread
$cc $tsan_flags -o "$build/stress_tsan" "$source/stress.c" "$source"/nccl/nccl_host*.c -ldl -lm -lpthread
LAGOM_RECORD="$build/record.tsan" LAGOM_RECORD_ENTRIES=4096 TSAN_OPTIONS=halt_on_error=1:exitcode=66 \
  "$build/stress_tsan" "$build/liblagom_tuner_tsan.so" "$decisions" 4

for sanitizer in address,undefined thread; do
  echo "== $sanitizer: profiler, $decisions collectives on three communicators"
  case $sanitizer in thread) kind=tsan kind_flags=$tsan_flags ;; *) kind=asan kind_flags="$flags -fsanitize=$sanitizer" ;; esac
  $cc $kind_flags -fno-sanitize-recover=all -o "$build/stress_profiler" "$source/stress_profiler.c" -ldl -lpthread
  TSAN_OPTIONS=halt_on_error=1:exitcode=66 \
    "$build/stress_profiler" "$build/liblagom_tuner_$kind.so" "$build/profile.$kind" "$decisions" 3
done
for sanitizer in address,undefined thread; do
  echo "== $sanitizer: workers, 3000, 1000 and 200 collectives on 2, 3 and 4 ranks"
  $cc $flags -fsanitize=$sanitizer -fno-sanitize-recover=all -o "$build/stress_workers" "$source/stress_workers.c" -lpthread
  "$build/stress_workers" 3000 2 1
  "$build/stress_workers" 1000 3 2
  "$build/stress_workers" 200 4 3
done
echo "== address, undefined: search, 3000 searches"
$cc $flags -fsanitize=address,undefined -fno-sanitize-recover=all -o "$build/stress_search" "$source/stress_search.c" "$source"/lagom_search_*.c -lm
"$build/stress_search" 3000 1
for sanitizer in address,undefined thread; do
  echo "== $sanitizer: schedules of 300 random graphs on two threads"
  $cc $flags -fsanitize=$sanitizer -fno-sanitize-recover=all -o "$build/stress_list_schedule" "$source/stress_list_schedule.c" -lpthread
  "$build/stress_list_schedule" 300 1
done
device="client code context device driver_code driver_device driver_memory driver_share driver_stream effect framework graph"
device="$device host_function memory preset stream torch_kernel transfer stress_device"
device_sources=$(for name in $device; do echo "$source/../emulate/csrc/$name.c"; done)
for sanitizer in address,undefined thread; do
  echo "== $sanitizer: the emulated device, 300 rounds on four threads"
  # shellcheck disable=SC2086  # a list of files
  $cc $flags -Wno-unused-parameter -fsanitize=$sanitizer -fno-sanitize-recover=all -o "$build/stress_device" $device_sources \
    -ldl -lpthread
  TSAN_OPTIONS=halt_on_error=1:exitcode=66 "$build/stress_device" 300 4
done
echo "all clean"
