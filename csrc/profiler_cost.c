// What the profiler plug-in's callbacks cost the thread that makes them, in CPU time.
//
//   lagom_profiler_cost PLUGIN.so RING CHANNELS TRANSFERS [collectives = 20000]
//
// One thread tells of collectives of CHANNELS channels, each with one operation that sends and one that receives TRANSFERS times
// (0: no network), as NCCL 2.30 does. Prints nanoseconds of CPU: of a call and its collective (the launching thread), of
// the channels of one (the proxy thread), and of a transfer of either direction.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "nccl/nccl_profiler_abi.h"

enum { MOST_CHANNELS = 64 };

static uint64_t cpu_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static const nccl_profiler_v5* plugin;
static void* context;

static void* start(nccl_event event) {
  void* handle = NULL;
  plugin->start_event(context, &handle, &event);
  return handle;
}

static void stop(void* handle) {
  if (handle) plugin->stop_event(handle);
}

static void tell(void* handle, int state, size_t num_bytes) {
  nccl_event_state_arguments arguments = {.num_bytes = num_bytes};
  if (handle) plugin->record_event_state(handle, state, &arguments);
}

static void* launch(uint64_t number, int channels) {
  void* call = start((nccl_event){.type = NCCL_EVENT_COLLECTIVE_CALL});
  stop(call);
  void* group = start((nccl_event){.type = NCCL_EVENT_GROUP});
  void* handle = start((nccl_event){.type = NCCL_EVENT_COLLECTIVE, .parent = call,
                                    .collective = {.sequence = number, .kind = "AllReduce", .count = 1 << 20,
                                                   .type = "ncclBfloat16", .num_channels = (uint8_t)channels,
                                                   .algorithm = "RING", .protocol = "SIMPLE", .group = group}});
  stop(handle);
  stop(group);
  return handle;
}

static void move(void* op, int transfers, bool is_send) {
  tell(op, NCCL_STATE_PROXY_OPERATION_IN_PROGRESS, 0);
  for (int i = 0; i < transfers; i++) {
    void* step = start((nccl_event){.type = NCCL_EVENT_PROXY_STEP, .parent = op, .proxy_step = {.step = i}});
    tell(step, is_send ? NCCL_STATE_SEND_GPU_WAIT : NCCL_STATE_RECEIVE_WAIT, 0);
    tell(step, is_send ? NCCL_STATE_SEND_PEER_WAIT : NCCL_STATE_RECEIVE_FLUSH_WAIT, 1 << 19);
    tell(step, is_send ? NCCL_STATE_SEND_WAIT : NCCL_STATE_RECEIVE_GPU_WAIT, 1 << 19);
    stop(step);
  }
  stop(op);
}

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const int channels = atoi(argv[3]), transfers = atoi(argv[4]), num = argc > 5 ? atoi(argv[5]) : 20000;
  setenv("LAGOM_PROFILE", argv[2], 1);
  setenv("LAGOM_PROFILE_NETWORK", "1", 1);
  void* library = dlopen(argv[1], RTLD_NOW);
  plugin = library ? dlsym(library, "ncclProfiler_v6") : NULL;
  int mask = 0;
  if (!plugin || channels < 1 || channels > MOST_CHANNELS || transfers < 0 || num < 1) return 2;
  plugin->init(&context, 1, &mask, NULL, 1, 2, 0, NULL);
  void** handles = calloc((size_t)num, sizeof(*handles));
  uint64_t launched = 0, moved = 0, timed = 0;
  enum { BATCH = 256 };  // under way at once, as where the host runs ahead
  for (int first = 0; first < num; first += BATCH) {
    const int end = first + BATCH < num ? first + BATCH : num;
    uint64_t before = cpu_ns();
    for (int i = first; i < end; i++) handles[i] = launch((uint64_t)i, channels);
    launched += cpu_ns() - before;
    before = cpu_ns();
    for (int i = first; transfers && i < end; i++) {
      for (int c = 0; c < channels * 2; c++) {
        void* op = start((nccl_event){.type = NCCL_EVENT_PROXY_OPERATION, .parent = handles[i],
                                      .proxy_operation = {.pid = (int)getpid(), .channel = (uint8_t)(c / 2)}});
        move(op, transfers, c % 2);
      }
    }
    moved += cpu_ns() - before;
    before = cpu_ns();
    for (int i = first; i < end; i++) {
      void* started[MOST_CHANNELS];
      for (int c = 0; c < channels; c++) {
        started[c] = start((nccl_event){.type = NCCL_EVENT_CHANNEL, .parent = handles[i],
                                        .channel = {.channel = (uint8_t)c, .timer_ns = 1}});
      }
      for (int c = 0; c < channels; c++) {
        tell(started[c], NCCL_STATE_CHANNEL_STOP, 2);
        stop(started[c]);
      }
    }
    timed += cpu_ns() - before;
  }
  const double per_transfer = transfers ? (double)moved / num / channels / 2 / transfers : 0;
  printf("launch %.1f channels %.1f transfer %.1f\n", (double)launched / num, (double)timed / num, per_transfer);
  return 0;
}
