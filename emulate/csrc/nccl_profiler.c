// A profiler plug-in, looked for and called as NCCL 2.27 to 2.32 do: calls and collectives by the thread that issues them,
// channels by a thread of the communicator's own, from their times on the emulated device.
//
// Departures: every channel starts and ends with the whole collective; collectives that a CUDA graph replays are not
// reported; of a plug-in's event mask only collectives, their calls and their channels are served.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nccl/nccl_profiler_abi.h"
#include "device.h"
#include "driver.h"
#include "nccl_comm.h"
#include "nccl/nccl_host_state.h"

#define GLOBALTIMER_0 1000000000000000000u  // what the GPU's clock shows at virtual time 0

static const char* const NAMES[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
static const char* const ALGORITHMS[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char* const PROTOCOLS[] = {"LL", "LL128", "SIMPLE"};
static const char* const TYPES[] = {"ncclInt8",    "ncclUint8",   "ncclInt32",    "ncclUint32",     "ncclInt64",     "ncclUint64",
                                    "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};

typedef struct report {
  void* handle;
  uint64_t op_id;
  int first_channel, num_channels;
  struct report* next;
} report;

// Outlives the communicator if that is aborted while the thread waits for the device.
struct profiled {
  void* context;
  uint64_t num_calls[5];  // by kind
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t proxy;
  bool has_proxy, is_ending, is_left;
  report *first, **last;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const nccl_profiler_v5* plugin;  // v4's functions have the same places
static int version;
static int mask;

static void find_plugin(void) {
  const int release = model_release();
  const int newest = release >= 23100 ? 7 : release >= 22900 ? 6 : release >= 22800 ? 5 : release >= 22700 ? 4 : 0;
  const char* name = getenv("NCCL_PROFILER_PLUGIN");
  if (!newest || (name && !strcasecmp(name, "none"))) return;
  void* library = host_open_library(name, "libnccl-profiler");
  if (!library) library = host_open_library(getenv("NCCL_NET_PLUGIN"), "libnccl-net");
  for (version = newest; library && version >= 4; version--) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
    plugin = dlsym(library, symbol);
    if (plugin) break;
  }
}

__attribute__((format(printf, 5, 6))) static void log_plugin(int level, unsigned long subsystems, const char* file, int line,
                                                             const char* format, ...) {
  (void)file, (void)line;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  log_tuner_line(level, subsystems, text);
}

void profiler_begin(ncclComm_t comm) {
  pthread_once(&once, find_plugin);
  if (!plugin) return;
  struct profiled* p = calloc(1, sizeof(*p));
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->changed, NULL);
  p->last = &p->first;
  if (version == 4) {
    ((const nccl_profiler_v4*)(const void*)plugin)
        ->init(&p->context, &mask, comm->name, comm->hash, comm->num_nodes, comm->num_ranks, comm->rank, log_plugin);
  } else {
    plugin->init(&p->context, comm->hash, &mask, comm->name, comm->num_nodes, comm->num_ranks, comm->rank, log_plugin);
  }
  comm->profiled = p;
}

static int wanted(void) { return __atomic_load_n(&mask, __ATOMIC_RELAXED); }

static void* start(const struct profiled* p, uint64_t type, void* parent, nccl_event event) {
  void* handle = NULL;
  event.parent = parent;
  if (version == 4) event.type_v4 = (uint8_t)type;
  else event.type = type;
  plugin->start_event(p->context, &handle, &event);
  return handle;
}

static void stop(void* handle) {
  if (handle) plugin->stop_event(handle);
}

void* profiler_call(const task* t) {
  const struct profiled* p = t->comm->profiled;
  if (!p || t->kind > TASK_ALL_REDUCE || version < 5 || !(wanted() & NCCL_EVENT_COLLECTIVE_CALL)) return NULL;
  int is_captured = 0;
  cuStreamIsCapturing(t->stream, &is_captured);
  void* handle = start(p, NCCL_EVENT_COLLECTIVE_CALL, NULL,
                       (nccl_event){.call = {.kind = NAMES[t->kind], .count = t->count, .type = TYPES[t->type], .root = t->root,
                                             .stream = t->stream, .is_captured = is_captured}});
  stop(handle);
  return handle;
}

static void report_channels(const struct profiled* p, const report* r, uint64_t start_ns, uint64_t end_ns) {
  void* handles[NCCL_MAX_CHANNELS] = {NULL};
  const int num = r->num_channels < NCCL_MAX_CHANNELS ? r->num_channels : NCCL_MAX_CHANNELS;
  for (int c = 0; c < num; c++) {
    handles[c] = start(p, NCCL_EVENT_CHANNEL, r->handle,
                       (nccl_event){.channel = {.channel = (uint8_t)(r->first_channel + c), .timer_ns = GLOBALTIMER_0 + start_ns}});
  }
  for (int c = 0; c < num; c++) {
    nccl_event_state_arguments arguments = {.timer_ns = GLOBALTIMER_0 + end_ns};
    if (handles[c]) plugin->record_event_state(handles[c], NCCL_STATE_CHANNEL_STOP, &arguments);
    stop(handles[c]);
  }
}

static void* progress(void* argument) {
  struct profiled* p = argument;
  pthread_mutex_lock(&p->lock);
  while (p->first || !p->is_ending) {
    report* r = p->first;
    if (!r) {
      pthread_cond_wait(&p->changed, &p->lock);
      continue;
    }
    uint64_t start_ns, end_ns;
    pthread_mutex_unlock(&p->lock);
    const bool has_ended = lagom_emulated_gpu.wait_in_background(r->op_id) == CLIENT_DONE;
    pthread_mutex_lock(&p->lock);
    if (has_ended && !p->is_left && lagom_emulated_gpu.times(r->op_id, &start_ns, &end_ns)) report_channels(p, r, start_ns, end_ns);
    p->first = r->next;
    if (!p->first) p->last = &p->first;
    free(r);
  }
  const bool is_left = p->is_left;
  pthread_mutex_unlock(&p->lock);
  if (is_left) free(p);
  return NULL;
}

void profiler_launched(const task* t, uint64_t op_id) {
  struct profiled* p = t->comm->profiled;
  const fake_result* r = &t->decided;
  if (!p || t->kind > TASK_ALL_REDUCE || !op_id || !(wanted() & (NCCL_EVENT_COLLECTIVE | NCCL_EVENT_CHANNEL))) return;
  const bool is_bytes = t->kind == TASK_ALL_GATHER || t->kind == TASK_BROADCAST;
  const uint64_t number = p->num_calls[t->kind]++;
  void* group = start(p, NCCL_EVENT_GROUP, NULL, (nccl_event){.rank = t->comm->rank});
  void* handle = NULL;
  if (version >= 5 || group) {  // 2.27 reports the collectives only of a group that has a handle
    handle = start(p, NCCL_EVENT_COLLECTIVE, version == 4 ? group : t->call_handle,
                   (nccl_event){.rank = t->comm->rank,
                                .collective = {.sequence = number,
                                               .kind = NAMES[t->kind],
                                               .sent = t->send,
                                               .received = t->receive,
                                               .count = is_bytes ? t->count * type_bytes(t->type) : t->count,
                                               .root = t->root,
                                               .type = is_bytes ? TYPES[ncclInt8] : TYPES[t->type],
                                               .num_channels = (uint8_t)r->num_channels,
                                               .num_warps = (uint8_t)(r->num_threads / 32),
                                               .algorithm = ALGORITHMS[r->algorithm],
                                               .protocol = PROTOCOLS[r->protocol],
                                               .group = group}});
  }
  if (handle && wanted() & NCCL_EVENT_CHANNEL) {
    report* made = calloc(1, sizeof(*made));
    *made = (report){.handle = handle, .op_id = op_id, .first_channel = r->channel, .num_channels = r->num_channels};
    pthread_mutex_lock(&p->lock);
    *p->last = made, p->last = &made->next;
    if (!p->has_proxy) p->has_proxy = !pthread_create(&p->proxy, NULL, progress, p);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
  }
  stop(handle);
  stop(group);
}

// Waits for what is under way, unless the communicator was aborted: that may never end.
void profiler_end(ncclComm_t comm) {
  struct profiled* p = comm->profiled;
  if (!p) return;
  comm->profiled = NULL;
  pthread_mutex_lock(&p->lock);
  p->is_ending = true;
  const bool has_proxy = p->has_proxy, is_left = has_proxy && comm->is_aborted;
  p->is_left = is_left;
  void* context = p->context;
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
  if (is_left) pthread_detach(p->proxy);
  else if (has_proxy) pthread_join(p->proxy, NULL);
  if (context) plugin->finalize(context);
  if (!is_left) free(p);
}
