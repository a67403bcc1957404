// Streams, events and the operations on them.
#ifndef LAGOM_EMULATED_GPU_STREAM_H
#define LAGOM_EMULATED_GPU_STREAM_H
#include <stdbool.h>

#include "abi.h"
#include "client.h"
#include "effect.h"

enum operation_kind {
  OPERATION_KERNEL,
  OPERATION_COPY,
  OPERATION_FILL,
  OPERATION_RECORD,
  OPERATION_WAIT_EVENT,
  OPERATION_WAIT_OP,  // on an operation of another stream (default stream, branches of a graph)
  OPERATION_HOST_FUNCTION,
};

typedef struct {
  enum operation_kind kind;
  uint32_t desc_id;
  const char *name;  // of kernels; lives as long as the process
  uint32_t grid[3], block[3], shared_bytes;
  int copy_kind;  // CUPTI's number
  uint64_t bytes;
  uint64_t *sequence;  // collectives: counter of their communicator
  uint64_t after_op;
  CUevent event;
  CUhostFn function;
  void *argument;
  effect effect;
} operation;

// What the profiler interface is told: an operation (without a call where a graph launched it), or only a call of the host, which
// has waited where `operation` is NULL.
typedef struct {
  const operation *operation;
  uint64_t op_id, after_op;
  uint64_t wall_start_ns, wall_end_ns;  // CLOCK_MONOTONIC, of the call
  uint64_t host_ns;                     // the host's virtual clock after the call
  uint32_t correlation, device, stream, event_id, graph_id, graph_node;
  const char *api;
} activity;

struct CUstream_st {
  uint32_t device, number;  // ordinal; number on this GPU, 0 for the default stream
  int priority;
  unsigned flags;
  uint64_t last_op;
  // For streams that order themselves with the default stream: its newest operation that this one follows, and this one's
  // newest that the default stream follows.
  uint64_t follows_default, followed_by_default;
  CUgraph capture;         // the graph it records into, and its branch there
  uint32_t branch;
  int capture_mode;
  struct CUstream_st *next;
};

struct CUevent_st {
  unsigned flags;
  uint32_t id, device;
  uint64_t op_id;
  uint32_t stream;
  CUgraph capture;  // recorded while its stream recorded a graph
  uint32_t node;
};

CUstream stream_create(unsigned flags, int priority);
void stream_destroy(CUstream stream);
CUstream stream_of(CUstream handle);  // the default streams have numbers for handles

// Issues an operation, or records it where the stream captures a graph.
CUresult stream_submit(CUstream handle, const operation *op, const char *api, uint64_t *op_id);

// The same for an operation that belongs to a launched graph.
CUresult stream_submit_node(CUstream stream, const operation *op, uint64_t cost_ns, uint32_t correlation, uint32_t graph_id,
                            uint32_t graph_node, uint64_t *op_id);

CUresult stream_wait(CUstream handle);
CUresult stream_query(CUstream handle);
CUresult device_wait(uint32_t device);

CUevent event_create(unsigned flags);
CUresult event_record(CUevent event, CUstream handle);
CUresult event_wait(CUevent event);
CUresult event_query(CUevent event);
CUresult event_elapsed_ms(CUevent from, CUevent to, float *ms);
CUresult stream_wait_event(CUstream handle, CUevent event);

void stream_leave_capture(CUgraph graph);  // every stream that records into it

CUresult result_of(enum client_result result);
uint32_t stream_next_correlation(void);
void stream_observe(void (*observer)(const activity *));
uint64_t stream_wall_ns(void);          // 0 while nobody observes
void stream_tell(activity *what);  // with the end of its call
#endif
