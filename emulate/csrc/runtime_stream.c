// The runtime interface: streams, events, graphs.
#include "runtime.h"

#define ENTER()                          \
  do {                                   \
    cudaError_t error = runtime_enter(); \
    if (error) return error;             \
  } while (0)

EXPORT cudaError_t cudaStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  ENTER();
  return runtime_result(cuStreamCreateWithPriority(stream, flags, priority));
}

EXPORT cudaError_t cudaStreamCreateWithFlags(CUstream *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(CUstream *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(CUstream stream) { return runtime_result(cuStreamDestroy_v2(stream)); }

EXPORT cudaError_t cudaStreamSynchronize(CUstream stream) {
  ENTER();
  return runtime_result(cuStreamSynchronize(stream));
}

EXPORT cudaError_t cudaStreamQuery(CUstream stream) {
  ENTER();
  return runtime_result(cuStreamQuery(stream));
}

EXPORT cudaError_t cudaStreamGetPriority(CUstream stream, int *priority) {
  ENTER();
  return runtime_result(cuStreamGetPriority(stream, priority));
}

EXPORT cudaError_t cudaStreamGetFlags(CUstream stream, unsigned *flags) {
  ENTER();
  return runtime_result(cuStreamGetFlags(stream, flags));
}

EXPORT cudaError_t cudaStreamGetId(CUstream stream, unsigned long long *id) {
  ENTER();
  return runtime_result(cuStreamGetId(stream, id));
}

EXPORT cudaError_t cudaStreamGetDevice(CUstream stream, int *device) {
  ENTER();
  return runtime_result(cuStreamGetDevice(stream, device));
}

EXPORT cudaError_t cudaStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  ENTER();
  return runtime_result(cuStreamWaitEvent(stream, event, flags));
}

EXPORT cudaError_t cudaLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
  ENTER();
  return runtime_result(cuLaunchHostFunc(stream, function, argument));
}

EXPORT cudaError_t cudaStreamAddCallback(CUstream stream, CUstreamCallback function, void *argument, unsigned flags) {
  ENTER();
  return runtime_result(cuStreamAddCallback(stream, function, argument, flags));
}

EXPORT cudaError_t cudaEventCreateWithFlags(CUevent *event, unsigned flags) {
  ENTER();
  return runtime_result(cuEventCreate(event, flags));
}

EXPORT cudaError_t cudaEventCreate(CUevent *event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(CUevent event) { return runtime_result(cuEventDestroy_v2(event)); }

EXPORT cudaError_t cudaEventRecord(CUevent event, CUstream stream) {
  ENTER();
  return runtime_result(cuEventRecord(event, stream));
}

EXPORT cudaError_t cudaEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(CUevent event) { return runtime_result(cuEventQuery(event)); }

EXPORT cudaError_t cudaEventSynchronize(CUevent event) { return runtime_result(cuEventSynchronize(event)); }

EXPORT cudaError_t cudaEventElapsedTime(float *ms, CUevent from, CUevent to) {
  return runtime_result(cuEventElapsedTime_v2(ms, from, to));
}

EXPORT cudaError_t cudaEventElapsedTime_v2(float *ms, CUevent from, CUevent to) {
  return cudaEventElapsedTime(ms, from, to);
}

// ---- graphs

EXPORT cudaError_t cudaStreamBeginCapture(CUstream stream, int mode) {
  ENTER();
  return runtime_result(cuStreamBeginCapture_v2(stream, mode));
}

EXPORT cudaError_t cudaStreamEndCapture(CUstream stream, CUgraph *graph) {
  ENTER();
  return runtime_result(cuStreamEndCapture(stream, graph));
}

EXPORT cudaError_t cudaStreamIsCapturing(CUstream stream, int *status) {
  ENTER();
  return runtime_result(cuStreamIsCapturing(stream, status));
}

EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                               const CUgraphNode **dependencies, const void **edges, size_t *count) {
  ENTER();
  return runtime_result(cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count));
}

#if RUNTIME_MAJOR >= 13
EXPORT cudaError_t cudaStreamGetCaptureInfo(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                            const CUgraphNode **dependencies, const void **edges, size_t *count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count);
}
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                               const CUgraphNode **dependencies, size_t *count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}
#endif

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
  return runtime_result(cuThreadExchangeStreamCaptureMode(mode));
}

EXPORT cudaError_t cudaGraphCreate(CUgraph *graph, unsigned flags) { return runtime_result(cuGraphCreate(graph, flags)); }

EXPORT cudaError_t cudaGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  ENTER();
  return runtime_result(cuGraphInstantiateWithFlags(exec, graph, flags));
}

EXPORT cudaError_t cudaGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(CUgraphExec exec, CUstream stream) {
  ENTER();
  return runtime_result(cuGraphLaunch(exec, stream));
}

EXPORT cudaError_t cudaGraphUpload(CUgraphExec exec, CUstream stream) { return cudaSuccess; }

EXPORT cudaError_t cudaGraphDestroy(CUgraph graph) { return runtime_result(cuGraphDestroy(graph)); }

EXPORT cudaError_t cudaGraphExecDestroy(CUgraphExec exec) { return runtime_result(cuGraphExecDestroy(exec)); }

EXPORT cudaError_t cudaGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  return runtime_result(cuGraphGetNodes(graph, nodes, count));
}

EXPORT cudaError_t cudaUserObjectCreate(CUuserObject *object, void *argument, CUhostFn destroy, unsigned references,
                                        unsigned flags) {
  return runtime_result(cuUserObjectCreate(object, argument, destroy, references, flags));
}

EXPORT cudaError_t cudaUserObjectRelease(CUuserObject object, unsigned references) {
  return runtime_result(cuUserObjectRelease(object, references));
}

EXPORT cudaError_t cudaGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
  return runtime_result(cuGraphRetainUserObject(graph, object, references, flags));
}
