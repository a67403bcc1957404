// CUPTI's activity interface: what PyTorch's profiler asks for.
//
// Calls of the host are shown when they really happened, as PyTorch shows its own operators. Operations of the GPU are shown on
// virtual time, counted from the first of PyTorch's operators that it records: what was launched while the profiler warmed up lies
// before that. A wait sleeps until the wall clock has come to the virtual time that it returns at, since the profiler drops records
// that end after it has stopped.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cupti_record.h"
#include "device.h"

typedef int CUptiResult;
enum { CUPTI_SUCCESS = 0, CUPTI_ERROR_INVALID_PARAMETER = 1, CUPTI_ERROR_MAX_LIMIT_REACHED = 12 };
#define MAX_EXTERNAL_DEPTH 64

typedef struct {
  activity told;
  operation operation;
  bool has_operation;
  uint32_t thread, external_kind;
  uint64_t external_id;
  uint64_t kinds;  // bits: what was enabled then
} row;

typedef void (*buffer_request)(uint8_t **buffer, size_t *bytes, size_t *max_records);
typedef void (*buffer_complete)(void *context, uint32_t stream, uint8_t *buffer, size_t bytes, size_t valid_bytes);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static row *rows;
static size_t num_rows, cap_rows;
static uint64_t enabled;
static buffer_request request;
static buffer_complete complete;
static uint64_t (*timestamp)(void);
static uint64_t wall_0, stamp_0, host_0;  // one moment on each clock
static bool has_seen_operator;
static _Thread_local struct {
  uint32_t kind;
  uint64_t id;
} external[MAX_EXTERNAL_DEPTH];
static _Thread_local int external_depth;

static uint8_t *buffer;
static size_t buffer_bytes, used_bytes;

static uint64_t wall_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t stamp(void) { return timestamp ? timestamp() : wall_ns(CLOCK_REALTIME); }

static void align_clocks(void) {
  stamp_0 = stamp();
  wall_0 = wall_ns(CLOCK_MONOTONIC);
  host_0 = lagom_emulated_gpu.host_ns();
}

static void sleep_until(uint64_t virtual_ns) {
  if (virtual_ns <= host_0) return;
  uint64_t until = wall_0 + (virtual_ns - host_0);
  struct timespec at = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
  }
}

static bool ask_for_buffer(void) {  // needs the lock
  size_t max_records = 0;
  if (buffer) return true;
  used_bytes = buffer_bytes = 0;
  if (request) request(&buffer, &buffer_bytes, &max_records);
  return buffer;
}

static void observe(const activity *told) {
  row new = {.told = *told, .thread = (uint32_t)syscall(SYS_gettid), .kinds = enabled};
  if (told->operation) new.operation = *told->operation, new.has_operation = true;
  if (external_depth)
    new.external_kind = external[external_depth - 1].kind, new.external_id = external[external_depth - 1].id;
  pthread_mutex_lock(&lock);
  ask_for_buffer();  // with the first operation: PyTorch flushes only if it has given one
  if (num_rows == cap_rows) {
    size_t wider = cap_rows ? 2 * cap_rows : 4096;
    row *more = realloc(rows, wider * sizeof *more);
    if (more) rows = more, cap_rows = wider;
  }
  if (num_rows < cap_rows) rows[num_rows++] = new;
  pthread_mutex_unlock(&lock);
  if (!told->operation) sleep_until(told->host_ns);
}

// For CUDA 12 this is the CUPTI of 12.8, of which most builds are: there records of events come with those of synchronization
// (cupti_activity.h); since 12.9 they are asked for by themselves.
static uint64_t bits_of(uint32_t kind) {
  if (RUNTIME_MAJOR >= 13 || kind != KIND_SYNCHRONIZATION) return 1ull << kind;
  return 1ull << KIND_SYNCHRONIZATION | 1ull << KIND_CUDA_EVENT;
}

static CUptiResult set_enabled(uint32_t kind, bool is_on) {
  if (kind >= NUM_KINDS) return CUPTI_SUCCESS;  // kinds that we never record
  pthread_mutex_lock(&lock);
  uint64_t bit = bits_of(kind), before = enabled;
  enabled = is_on ? enabled | bit : enabled & ~bit;
  if (!before && enabled) {
    has_seen_operator = false;
    align_clocks();
  }
  lagom_emulated_gpu.observe(enabled ? observe : NULL);
  pthread_mutex_unlock(&lock);
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityEnable(uint32_t kind) { return set_enabled(kind, true); }

EXPORT CUptiResult cuptiActivityDisable(uint32_t kind) { return set_enabled(kind, false); }

EXPORT CUptiResult cuptiActivityEnableDriverApi(uint32_t callback, uint8_t is_on) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiActivityEnableRuntimeApi(uint32_t callback, uint8_t is_on) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t is_on) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
  *count = 0;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) {
  if (external_depth == MAX_EXTERNAL_DEPTH) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  pthread_mutex_lock(&lock);
  if (enabled && !has_seen_operator) align_clocks();
  has_seen_operator = true;
  pthread_mutex_unlock(&lock);
  external[external_depth].kind = kind, external[external_depth++].id = id;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t *last) {
  if (!external_depth) return CUPTI_ERROR_INVALID_PARAMETER;
  external_depth--;
  if (last) *last = external[external_depth].id;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityRegisterCallbacks(buffer_request asks, buffer_complete gives) {
  request = asks, complete = gives;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityRegisterTimestampCallback(uint64_t (*callback)(void)) {
  timestamp = callback;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivitySetAttribute(uint32_t attribute, size_t *bytes, void *value) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiSubscribe(void **subscriber, void *callback, void *user_data) {
  static char only;
  *subscriber = &only;  // callbacks are never called: no call is intercepted
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiUnsubscribe(void *subscriber) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiEnableCallback(uint32_t is_on, void *subscriber, uint32_t domain, uint32_t callback) {
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiEnableDomain(uint32_t is_on, void *subscriber, uint32_t domain) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiFinalize(void) { return CUPTI_SUCCESS; }

EXPORT CUptiResult cuptiGetResultString(CUptiResult result, const char **text) {
  *text = result ? "an error of the emulated CUPTI" : "CUPTI_SUCCESS";
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetVersion(uint32_t *version) {
  *version = RUNTIME_MAJOR >= 13 ? 130202 : 26;
  return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t *from, size_t valid_bytes, uint32_t **record) {
  uint8_t *next = *record ? (uint8_t *)*record + record_bytes(**record) : from;
  if (next >= from + valid_bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (uint32_t *)next;
  return CUPTI_SUCCESS;
}

// ---- from rows to records

static const struct {
  const char *api, *name;
  uint32_t kind, callback, sync_type;
} apis[] = {
    {"cudaLaunchKernel", "cudaLaunchKernel_v7000", KIND_RUNTIME, 211, 0},
    {"cudaLaunchKernelExC", "cudaLaunchKernelExC_v11060", KIND_RUNTIME, 430, 0},
    {"cudaLaunchCooperativeKernel", "cudaLaunchCooperativeKernel_v9000", KIND_RUNTIME, 269, 0},
    {"cuLaunchKernel", "cuLaunchKernel", KIND_DRIVER, 307, 0},
    {"cuLaunchKernelEx", "cuLaunchKernelEx", KIND_DRIVER, 652, 0},
    {"cudaMemcpy", "cudaMemcpy_v3020", KIND_RUNTIME, 31, 0},
    {"cudaMemcpyAsync", "cudaMemcpyAsync_v3020", KIND_RUNTIME, 41, 0},
    {"cudaMemcpy2DAsync", "cudaMemcpy2DAsync_v3020", KIND_RUNTIME, 44, 0},
    {"cudaMemsetAsync", "cudaMemsetAsync_v3020", KIND_RUNTIME, 51, 0},
    {"cudaEventRecord", "cudaEventRecord_v3020", KIND_RUNTIME, 135, 0},
    {"cudaStreamWaitEvent", "cudaStreamWaitEvent_v3020", KIND_RUNTIME, 147, 2},
    {"cudaLaunchHostFunc", "cudaLaunchHostFunc_v10000", KIND_RUNTIME, 284, 0},
    {"cudaGraphLaunch", "cudaGraphLaunch_v10000", KIND_RUNTIME, 311, 0},
    {"cudaEventSynchronize", "cudaEventSynchronize_v3020", KIND_RUNTIME, 137, 1},
    {"cudaStreamSynchronize", "cudaStreamSynchronize_v3020", KIND_RUNTIME, 131, 3},
    {"cudaDeviceSynchronize", "cudaDeviceSynchronize_v3020", KIND_RUNTIME, 165, 4},
};
#define NUM_APIS (sizeof apis / sizeof *apis)

EXPORT CUptiResult cuptiGetCallbackName(uint32_t domain, uint32_t callback, const char **name) {
  *name = "unknown";
  for (size_t i = 0; i < NUM_APIS; i++)  // domain 1 is the driver's, 2 the runtime's
    if (apis[i].callback == callback && (apis[i].kind == KIND_DRIVER) == (domain == 1)) *name = apis[i].name;
  return CUPTI_SUCCESS;
}

static double ticks_per_ns;

static uint64_t at_wall(uint64_t ns) { return stamp_0 + (uint64_t)(int64_t)((double)(int64_t)(ns - wall_0) * ticks_per_ns); }

static uint64_t at_virtual(uint64_t ns) {
  return stamp_0 + (uint64_t)(int64_t)((double)(int64_t)(ns - host_0) * ticks_per_ns);
}

static void *put(const row *from, uint32_t kind) {
  size_t bytes = record_bytes(kind);
  if (!(from->kinds >> kind & 1)) return NULL;
  if (buffer && used_bytes + bytes > buffer_bytes) {
    complete(NULL, 0, buffer, buffer_bytes, used_bytes);
    buffer = NULL;
  }
  if (!ask_for_buffer() || buffer_bytes < bytes) return NULL;
  uint8_t *at = buffer + used_bytes;
  memset(at, 0, bytes);
  memcpy(at, &kind, sizeof kind);
  used_bytes += bytes;
  return at;
}

static void put_call(const row *from) {
  size_t i = 0;
  while (i < NUM_APIS && strcmp(apis[i].api, from->told.api)) i++;
  if (i == NUM_APIS) return;
  const activity *told = &from->told;
  external_record *outer = from->external_id ? put(from, KIND_EXTERNAL) : NULL;
  if (outer) {
    outer->external_kind = from->external_kind, outer->external_id = from->external_id;
    outer->correlation = told->correlation;
  }
  api_record *call = put(from, apis[i].kind);
  if (call) {
    call->callback = apis[i].callback;
    call->start = at_wall(told->wall_start_ns), call->end = at_wall(told->wall_end_ns);
    call->process = (uint32_t)getpid(), call->thread = from->thread, call->correlation = told->correlation;
  }
  sync_record *sync = apis[i].sync_type ? put(from, KIND_SYNCHRONIZATION) : NULL;
  if (sync) {
    sync->type = apis[i].sync_type;
    sync->start = at_wall(told->wall_start_ns), sync->end = at_wall(told->wall_end_ns);
    sync->correlation = told->correlation, sync->context = told->device + 1, sync->stream = told->stream;
    sync->event = told->event_id;
  }
}

#define PLACE(record)                                                                              \
  (record)->start = at_virtual(start_ns), (record)->end = at_virtual(end_ns),                      \
  (record)->device = told->device, (record)->context = told->device + 1, (record)->stream = told->stream, \
  (record)->correlation = told->correlation, (record)->graph = told->graph_id, (record)->graph_node = told->graph_node

static void put_kernel(const row *from, uint64_t start_ns, uint64_t end_ns) {
  const activity *told = &from->told;
  kernel_record *kernel = put(from, KIND_KERNEL);
  if (!kernel) return;
  PLACE(kernel);
  for (int i = 0; i < 3; i++)
    kernel->grid[i] = (int32_t)from->operation.grid[i], kernel->block[i] = (int32_t)from->operation.block[i];
  kernel->dynamic_shared = (int32_t)from->operation.shared_bytes;
  kernel->registers = 64;
  kernel->name = from->operation.name;
  kernel->grid_id = (int64_t)told->op_id;
}

static void put_copy(const row *from, uint64_t start_ns, uint64_t end_ns) {
  enum { PEER = 10, HOST = 2, DEVICE = 3, FROM_HOST = 1, TO_HOST = 2 };
  const activity *told = &from->told;
  int kind = from->operation.copy_kind;
  peer_record *peer = kind == PEER ? put(from, KIND_MEMCPY_PEER) : NULL;
  memcpy_record *copy = kind == PEER ? NULL : put(from, KIND_MEMCPY);
  if (peer) {
    PLACE(peer);
    peer->copy_kind = (uint8_t)kind, peer->bytes = from->operation.bytes, peer->from_kind = peer->to_kind = DEVICE;
    peer->from_device = peer->to_device = told->device;
  }
  if (copy) {
    PLACE(copy);
    copy->copy_kind = (uint8_t)kind, copy->bytes = from->operation.bytes, copy->num_copies = 1;
    copy->from_kind = kind == FROM_HOST ? HOST : DEVICE, copy->to_kind = kind == TO_HOST ? HOST : DEVICE;
  }
}

static void put_operation(const row *from) {
  const activity *told = &from->told;
  uint64_t start_ns, end_ns;
  if (lagom_emulated_gpu.wait(told->op_id) || !lagom_emulated_gpu.times(told->op_id, &start_ns, &end_ns)) return;
  if (from->operation.kind == OPERATION_KERNEL) put_kernel(from, start_ns, end_ns);
  if (from->operation.kind == OPERATION_COPY) put_copy(from, start_ns, end_ns);
  if (from->operation.kind == OPERATION_FILL) {
    memset_record *fill = put(from, KIND_MEMSET);
    if (!fill) return;
    PLACE(fill);
    fill->bytes = from->operation.bytes, fill->memory_kind = 3;
    fill->value = from->operation.effect.value[0];
  }
  if (from->operation.kind == OPERATION_RECORD) {
    cuda_event_record *event = put(from, KIND_CUDA_EVENT);
    if (!event) return;
    event->correlation = told->correlation, event->context = told->device + 1, event->stream = told->stream;
    event->event = told->event_id, event->device = told->device, event->at = at_virtual(end_ns);
    event->event_sync = told->op_id;
  }
}

EXPORT CUptiResult cuptiActivityFlushAll(uint32_t flags) {
  if (!request || !complete) return CUPTI_SUCCESS;
  pthread_mutex_lock(&lock);
  row *flushed = rows;
  size_t count = num_rows;
  rows = NULL, num_rows = cap_rows = 0;
  uint64_t now = wall_ns(CLOCK_MONOTONIC);
  ticks_per_ns = timestamp && now > wall_0 ? (double)(int64_t)(stamp() - stamp_0) / (double)(now - wall_0) : 1.0;
  for (size_t i = 0; i < count; i++) {
    if (flushed[i].told.api) put_call(&flushed[i]);
    if (flushed[i].told.op_id) put_operation(&flushed[i]);
  }
  if (buffer) complete(NULL, 0, buffer, buffer_bytes, used_bytes);
  buffer = NULL;
  pthread_mutex_unlock(&lock);
  free(flushed);
  return CUPTI_SUCCESS;
}
