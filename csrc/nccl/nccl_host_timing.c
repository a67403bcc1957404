// Times single decisions of a tuner, as NCCL's host would make them.
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "nccl_host_state.h"

// -------------------------------------------------------------------------------------------------------------- timing

static double clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

#if defined(__x86_64__)
#include <x86intrin.h>
static uint64_t ticks(void) {
  _mm_lfence();
  uint64_t t = __rdtsc();
  _mm_lfence();
  return t;
}
#else
static uint64_t ticks(void) { return (uint64_t)clock_ns(); }
#endif

static double ns_per_tick(void) {
  static double value;
  if (value == 0) {
    double begin = clock_ns(), now = begin;
    uint64_t first = ticks();
    while (now - begin < 5e7) now = clock_ns();
    value = (now - begin) / (double)(ticks() - first);
  }
  return value;
}

static int by_value(const void* a, const void* b) {
  uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
  return (x > y) - (x < y);
}

API double fake_time(fake_comm* const* comms, const uint32_t* which, const uint64_t* sizes, int num_calls, int timing,
                     float* nanoseconds) {
  enum { FLUSH_BYTES = 16 << 20 };
  static volatile uint8_t flush[FLUSH_BYTES];
  host_be_quiet(true);  // NCCL without NCCL_DEBUG drops a line at once
  uint64_t empty[1001];
  for (int i = 0; i < 1001; i++) {
    uint64_t begin = ticks();
    empty[i] = ticks() - begin;
  }
  qsort(empty, 1001, sizeof(*empty), by_value);
  const double scale = ns_per_tick();
  for (int i = 0; i < num_calls; i++) {
    fake_comm* comm = comms[which[i]];
    for (int k = 0; timing == FAKE_TIME_COLD && k < FLUSH_BYTES; k += 64) flush[k]++;
    float costs[21];
    for (int k = 0; k < 21; k++) costs[k] = k < 6 ? 40.0F + (float)k : -1.0F;
    int channels = 0;
    uint64_t chunk = 2 << 20;
    uint64_t begin = ticks();
    fake_raw_coll_info(comm, NCCL_ALL_REDUCE, sizes[i], 1, costs, 7, 3, 0, &channels);
    uint64_t middle = ticks();
    fake_raw_chunk_size(comm, NCCL_ALL_REDUCE, sizes[i], NCCL_RING, NCCL_SIMPLE, 1, &chunk);
    uint64_t end = ticks();
    uint64_t spent = timing == FAKE_TIME_CHUNK_SIZE ? end - middle : middle - begin;
    nanoseconds[i] = spent > empty[500] ? (float)((double)(spent - empty[500]) * scale) : 0;
  }
  host_be_quiet(false);
  return (double)empty[500] * scale;
}
