#define _GNU_SOURCE
#include "stream.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "context.h"
#include "graph.h"
#include "host_function.h"
#include "preset.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define DEFAULT_STREAM(i) {.device = i}
static struct CUstream_st default_streams[PRESET_MAX_DEVICES] = {
    DEFAULT_STREAM(0),  DEFAULT_STREAM(1),  DEFAULT_STREAM(2),  DEFAULT_STREAM(3), DEFAULT_STREAM(4),  DEFAULT_STREAM(5),
    DEFAULT_STREAM(6),  DEFAULT_STREAM(7),  DEFAULT_STREAM(8),  DEFAULT_STREAM(9), DEFAULT_STREAM(10), DEFAULT_STREAM(11),
    DEFAULT_STREAM(12), DEFAULT_STREAM(13), DEFAULT_STREAM(14), DEFAULT_STREAM(15),
};
static CUstream streams[PRESET_MAX_DEVICES];
static uint32_t last_number[PRESET_MAX_DEVICES];
static _Atomic uint32_t last_correlation, last_event_id;
static void (*_Atomic observe)(const activity *);

CUresult result_of(enum client_result result) {
  if (result == CLIENT_PENDING) return CUDA_ERROR_NOT_READY;
  if (result == CLIENT_DONE) return CUDA_SUCCESS;
  return client_is_forked() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

uint32_t stream_next_correlation(void) { return ++last_correlation; }

void stream_observe(void (*observer)(const activity *)) { observe = observer; }

uint64_t stream_wall_ns(void) {
  struct timespec now;
  if (!observe) return 0;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void stream_tell(activity *what) {
  void (*observer)(const activity *) = observe;
  if (!observer) return;
  what->wall_end_ns = stream_wall_ns();
  if (!what->wall_start_ns) what->wall_start_ns = what->wall_end_ns;  // observed since the call began
  what->host_ns = client_host_ns();
  observer(what);
}

CUstream stream_create(unsigned flags, int priority) {
  CUstream stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  uint32_t device = context_device();
  pthread_mutex_lock(&lock);
  *stream = (struct CUstream_st){.device = device, .number = ++last_number[device], .priority = priority, .flags = flags};
  stream->next = streams[device];
  streams[device] = stream;
  pthread_mutex_unlock(&lock);
  return stream;
}

void stream_destroy(CUstream stream) {
  // Its work goes on; the record leaves once that is known to have ended, with a later call.
  uint32_t device = stream->device;
  pthread_mutex_lock(&lock);
  for (CUstream *at = &streams[device]; *at; at = &(*at)->next)
    if (*at == stream) {
      if (stream->last_op > default_streams[device].followed_by_default)
        default_streams[device].followed_by_default = stream->last_op;
      *at = stream->next;
      break;
    }
  pthread_mutex_unlock(&lock);
  free(stream);
}

CUstream stream_of(CUstream handle) {
  return (uintptr_t)handle > 2 ? handle : &default_streams[context_device()];  // 0, 1 and 2 are the default streams
}

static uint64_t cost_of(const operation *op) {
  switch (op->kind) {
    case OPERATION_RECORD:
    case OPERATION_WAIT_EVENT:
    case OPERATION_HOST_FUNCTION:
      return CLIENT_QUERY_COST_NS;
    case OPERATION_WAIT_OP:
      return 0;
    default:
      return client_launch_ns();
  }
}

static uint64_t send(CUstream stream, const operation *op, uint64_t cost_ns) {
  client_op record = {
      .device = preset_physical(stream->device),
      .stream = stream->number,
      .desc_id = op->desc_id,
      .priority = stream->priority,
      .after_op = op->after_op,
      .instance = op->sequence ? __atomic_add_fetch(op->sequence, 1, __ATOMIC_RELAXED) : 0,
  };
  uint64_t op_id = client_submit(&record, cost_ns);
  if (op_id) stream->last_op = op_id;
  return op_id;
}

static void wait_for_op(CUstream stream, uint64_t op_id) {
  operation wait = {.kind = OPERATION_WAIT_OP, .after_op = op_id};
  send(stream, &wait, 0);
}

// The default stream and every stream that was made without "non blocking" follow each other.
static void order_with_default(CUstream stream) {
  CUstream base = &default_streams[stream->device];
  if (stream == base) {
    for (CUstream other = streams[stream->device]; other; other = other->next)
      if (!(other->flags & CU_STREAM_NON_BLOCKING) && other->last_op > other->followed_by_default) {
        wait_for_op(stream, other->last_op);
        other->followed_by_default = other->last_op;
      }
  } else if (!(stream->flags & CU_STREAM_NON_BLOCKING) && base->last_op > stream->follows_default) {
    stream->follows_default = base->last_op;
    wait_for_op(stream, base->last_op);
  }
}

static void note_event(const operation *op, CUstream stream, uint64_t op_id) {
  if (op->kind != OPERATION_RECORD) return;
  op->event->op_id = op_id, op->event->device = stream->device, op->event->stream = stream->number;
  op->event->capture = NULL;
}

static CUresult issue(CUstream stream, const operation *op, activity *told, uint64_t cost_ns, uint64_t *out) {
  operation sent = *op;
  if (op->kind == OPERATION_WAIT_EVENT) sent.after_op = op->event->op_id;
  order_with_default(stream);
  uint64_t op_id = send(stream, &sent, cost_ns);
  if (!op_id) return result_of(CLIENT_FAILED);
  note_event(op, stream, op_id);
  effect_run(&op->effect);
  if (op->kind == OPERATION_HOST_FUNCTION)
    host_function_add(op_id, stream->device, stream->number, op->function, op->argument);
  told->operation = op, told->op_id = op_id, told->after_op = sent.after_op;
  told->device = stream->device, told->stream = stream->number, told->event_id = op->event ? op->event->id : 0;
  if (out) *out = op_id;
  return CUDA_SUCCESS;
}

static CUresult record(CUstream stream, const operation *op) {
  uint32_t index;
  CUgraph graph = stream->capture;
  if (graph->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (op->kind == OPERATION_RECORD) {
    // An event recorded by a capturing stream marks a place in the graph; it is no node of it.
    op->event->capture = graph, op->event->node = graph->last_of_branch[stream->branch];
    return CUDA_SUCCESS;
  }
  return graph_append(graph, stream->branch, op, GRAPH_NO_NODE, &index);
}

CUresult stream_submit(CUstream handle, const operation *op, const char *api, uint64_t *op_id) {
  activity told = {.api = api, .wall_start_ns = stream_wall_ns(), .correlation = stream_next_correlation()};
  CUstream stream = stream_of(handle);
  if (!stream->capture) effect_settle(&op->effect);  // without the lock: it may call us
  pthread_mutex_lock(&lock);
  CUresult result = stream->capture ? record(stream, op) : issue(stream, op, &told, cost_of(op), op_id);
  pthread_mutex_unlock(&lock);
  if (!result && told.op_id) stream_tell(&told);
  return result;
}

CUresult stream_submit_node(CUstream stream, const operation *op, uint64_t cost_ns, uint32_t correlation, uint32_t graph_id,
                            uint32_t graph_node, uint64_t *op_id) {
  activity told = {.correlation = correlation, .graph_id = graph_id, .graph_node = graph_node};
  effect_settle(&op->effect);
  pthread_mutex_lock(&lock);
  CUresult result = issue(stream, op, &told, cost_ns, op_id);
  pthread_mutex_unlock(&lock);
  if (!result) stream_tell(&told);
  return result;
}

static CUresult wait_for(uint64_t op_id, uint32_t device, uint32_t number) {
  CUresult result = result_of(client_wait(op_id));
  if (!result) effect_settle(NULL);
  if (!result) host_function_finish(op_id, device, number);
  return result;
}

static CUresult wait_and_tell(uint64_t op_id, uint32_t device, uint32_t number, uint32_t event_id, const char *api) {
  activity told = {.api = api, .wall_start_ns = stream_wall_ns(), .correlation = stream_next_correlation()};
  told.device = device, told.stream = number, told.event_id = event_id;
  CUresult result = wait_for(op_id, device, number);
  if (!result) stream_tell(&told);
  return result;
}

CUresult stream_wait(CUstream handle) {
  CUstream stream = stream_of(handle);
  if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  // The default stream's end includes the streams that it orders itself with.
  pthread_mutex_lock(&lock);
  order_with_default(stream);
  uint64_t last = stream->last_op;
  pthread_mutex_unlock(&lock);
  return wait_and_tell(last, stream->device, stream->number, 0, "cudaStreamSynchronize");
}

CUresult stream_query(CUstream handle) {
  CUstream stream = stream_of(handle);
  if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  pthread_mutex_lock(&lock);
  uint64_t last = stream->last_op;
  pthread_mutex_unlock(&lock);
  CUresult result = result_of(client_query(last));
  if (!result) effect_settle(NULL);
  if (!result) host_function_finish(last, stream->device, stream->number);
  return result;
}

CUresult device_wait(uint32_t device) {
  activity told = {.api = "cudaDeviceSynchronize", .wall_start_ns = stream_wall_ns(), .device = device};
  told.correlation = stream_next_correlation();
  CUresult result = CUDA_SUCCESS;
  struct {
    uint64_t op_id;
    uint32_t stream;
  } ends[1024];
  uint32_t num_ends = 0;
  pthread_mutex_lock(&lock);
  CUstream base = &default_streams[device];
  for (CUstream stream = streams[device]; stream && num_ends < 1022; stream = stream->next)
    if (stream->last_op) ends[num_ends].op_id = stream->last_op, ends[num_ends++].stream = stream->number;
  ends[num_ends].op_id = base->last_op, ends[num_ends++].stream = 0;
  ends[num_ends].op_id = base->followed_by_default, ends[num_ends++].stream = UINT32_MAX;  // destroyed streams
  pthread_mutex_unlock(&lock);
  for (uint32_t i = 0; i < num_ends && !result; i++) result = wait_for(ends[i].op_id, device, ends[i].stream);
  if (!result) stream_tell(&told);
  return result;
}

CUevent event_create(unsigned flags) {
  CUevent event = calloc(1, sizeof *event);
  if (event) event->flags = flags, event->id = ++last_event_id;
  return event;
}

CUresult event_record(CUevent event, CUstream handle) {
  static _Atomic uint32_t desc_id;
  if (!desc_id) desc_id = client_describe("{\"event\": \"record\"}");
  operation op = {.kind = OPERATION_RECORD, .desc_id = desc_id, .event = event};
  return stream_submit(handle, &op, "cudaEventRecord", NULL);
}

CUresult event_wait(CUevent event) {
  if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  return wait_and_tell(event->op_id, event->device, event->stream, event->id, "cudaEventSynchronize");
}

CUresult event_query(CUevent event) {
  if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  CUresult result = result_of(client_query(event->op_id));
  if (!result) effect_settle(NULL);
  if (!result) host_function_finish(event->op_id, event->device, event->stream);
  return result;
}

CUresult event_elapsed_ms(CUevent from, CUevent to, float *ms) {
  uint64_t start, from_ns, to_ns;
  if (!from->op_id || !to->op_id || (from->flags | to->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  CUresult result = event_query(from);
  if (!result) result = event_query(to);
  if (result) return result;
  // Both have ended; their times are gone only after millions of later operations.
  if (!client_times(from->op_id, &start, &from_ns) || !client_times(to->op_id, &start, &to_ns))
    return CUDA_ERROR_INVALID_VALUE;
  *ms = (float)((double)((int64_t)to_ns - (int64_t)from_ns) * 1e-6);
  return CUDA_SUCCESS;
}

// Joins a stream to the capture whose event it waits for.
static CUresult wait_in_capture(CUstream stream, CUevent event) {
  CUgraph graph = event->capture;
  uint32_t index;
  if (stream->capture && stream->capture != graph) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (!stream->capture) {
    stream->branch = graph_add_branch(graph, stream->device);
    stream->capture = graph;
  }
  if (event->node == GRAPH_NO_NODE) return CUDA_SUCCESS;
  operation wait = {.kind = OPERATION_WAIT_OP};
  return graph_append(graph, stream->branch, &wait, event->node, &index);
}

CUresult stream_wait_event(CUstream handle, CUevent event) {
  CUstream stream = stream_of(handle);
  if (event->capture) {
    pthread_mutex_lock(&lock);
    CUresult result = wait_in_capture(stream, event);
    pthread_mutex_unlock(&lock);
    return result;
  }
  // An event from before the capture is no part of the graph, and one that was never recorded holds nothing up.
  if (stream->capture) return event->op_id ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_SUCCESS;
  if (!event->op_id) return CUDA_SUCCESS;
  operation op = {.kind = OPERATION_WAIT_EVENT, .event = event};
  return stream_submit(handle, &op, "cudaStreamWaitEvent", NULL);
}

void stream_leave_capture(CUgraph graph) {
  pthread_mutex_lock(&lock);
  for (uint32_t device = 0; device < PRESET_MAX_DEVICES; device++) {
    for (CUstream stream = streams[device]; stream; stream = stream->next)
      if (stream->capture == graph) stream->capture = NULL;
    if (default_streams[device].capture == graph) default_streams[device].capture = NULL;
  }
  pthread_mutex_unlock(&lock);
}
