// The driver interface: streams, events, host callbacks, stream memory operations, graphs.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "graph.h"
#include "preset.h"
#include "stream.h"

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  // Priorities beyond the range are taken to its ends.
  *stream = stream_create(flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
  return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_HANDLE;
  stream_destroy(stream);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) { return stream_wait(stream); }

EXPORT CUresult cuStreamQuery(CUstream stream) { return stream_query(stream); }

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
  *flags = stream_of(stream)->flags;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
  *id = ((unsigned long long)stream_of(stream)->device + 1) << 32 | stream_of(stream)->number;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  *context = context_primary(stream_of(stream)->device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetDevice(CUstream stream, CUdevice *device) {
  *device = (CUdevice)stream_of(stream)->device;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetAttribute(CUstream stream, int attribute, void *value) {
  memset(value, 0, 64);  // the size of the union
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSetAttribute(CUstream stream, int attribute, const void *value) { return CUDA_SUCCESS; }

EXPORT CUresult cuStreamCopyAttributes(CUstream to, CUstream from) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
  operation op = {.kind = OPERATION_HOST_FUNCTION, .function = function, .argument = argument};
  op.desc_id = client_describe("{\"host_function\": true}");
  return stream_submit(stream, &op, "cudaLaunchHostFunc", NULL);
}

typedef struct {
  CUstream stream;
  CUstreamCallback function;
  void *argument;
} callback;

static void call_back(void *argument) {
  callback call = *(callback *)argument;
  free(argument);
  call.function(call.stream, CUDA_SUCCESS, call.argument);
}

EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *argument, unsigned flags) {
  callback *call = malloc(sizeof *call);
  if (!call) return CUDA_ERROR_OUT_OF_MEMORY;
  *call = (callback){stream, function, argument};
  return cuLaunchHostFunc(stream, call_back, call);
}

static CUresult write_value(CUstream stream, CUdeviceptr to, uint64_t value, uint8_t bytes) {
  operation op = {.kind = OPERATION_WAIT_OP};  // takes no time
  op.effect = (effect){.kind = EFFECT_WRITE_VALUE, .to = (void *)to, .element_bytes = bytes};
  memcpy(op.effect.value, &value, sizeof value);
  return stream_submit(stream, &op, "cuStreamWriteValue", NULL);
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags) {
  return write_value(stream, to, value, 4);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value, unsigned flags) {
  return write_value(stream, to, value, 8);
}

// A wait for a value in memory would need the device to watch memory that other processes write.
EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags) {
  *event = event_create(flags);
  return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  free(event);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) { return event_record(event, stream); }

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  return event_record(event, stream);
}

EXPORT CUresult cuEventQuery(CUevent event) { return event_query(event); }

EXPORT CUresult cuEventSynchronize(CUevent event) { return event_wait(event); }

EXPORT CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to) { return event_elapsed_ms(from, to, ms); }

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) { return event_elapsed_ms(from, to, ms); }

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return stream_wait_event(stream, event);
}

// ---- graphs

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) { return graph_begin_capture(stream, mode); }

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { return graph_end_capture(stream, graph); }

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status) {
  CUgraph graph = stream_of(stream)->capture;
  *status = !graph ? CU_STREAM_CAPTURE_STATUS_NONE
            : graph->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **dependencies, const void **edges, size_t *count) {
  static _Thread_local CUgraphNode last;
  CUstream stream = stream_of(handle);
  cuStreamIsCapturing(handle, status);
  CUgraph capture = *status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? stream->capture : NULL;
  uint32_t node = capture ? capture->last_of_branch[stream->branch] : GRAPH_NO_NODE;
  last = node == GRAPH_NO_NODE ? NULL : capture->nodes[node];
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture;
  if (dependencies) *dependencies = last ? &last : NULL;
  if (edges) *edges = NULL;
  if (count) *count = last ? 1 : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **dependencies, size_t *count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  static _Thread_local int current;
  int before = current;
  current = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  return graph_instantiate(exec, graph);
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
  *graph = graph_create();
  return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { return graph_launch(exec, stream); }

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  graph_destroy(graph);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
  graph_exec_destroy(exec);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  if (nodes)
    for (size_t i = 0; i < *count && i < graph->num_nodes; i++) nodes[i] = graph->nodes[i];
  if (!nodes || *count > graph->num_nodes) *count = graph->num_nodes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuUserObjectCreate(CUuserObject *object, void *argument, CUhostFn destroy, unsigned references,
                                   unsigned flags) {
  *object = malloc(sizeof **object);
  if (!*object) return CUDA_ERROR_OUT_OF_MEMORY;
  **object = (struct CUuserObject_st){destroy, argument, references};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuUserObjectRelease(CUuserObject object, unsigned references) {
  if ((object->references -= references) == 0) {
    object->destroy(object->argument);
    free(object);
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
  graph_user_object *held = malloc(sizeof *held);
  if (!held) return CUDA_ERROR_OUT_OF_MEMORY;
  *held = (graph_user_object){object, references, graph->objects};
  if (!(flags & 1)) object->references += references;  // flag 1: the caller's references move to the graph
  graph->objects = held;
  return CUDA_SUCCESS;
}
