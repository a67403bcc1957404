// The binary interface between NCCL and a profiler plug-in, versions 4 to 7: the parts of it that we use.
//
// Struct layouts, enum values and call signatures are facts about NCCL, read in the releases named next to each; names
// and words are ours, so that the plug-in builds without NCCL's headers.
//
//   release       newest version it looks for   what is new
//   2.26          v3                            channel events without GPU time; no plug-in of ours
//   2.27          v4                            GPU time of channel events
//   2.28          v5                            API call events; type of 64 bits; init's arguments in another order
//   2.29 - 2.30   v6                            copy-engine events
//   2.31 - 2.32   v7                            which collectives run by symmetric-memory kernels; tags of callers
//
// Left out: v1 to v3, which know no GPU time. v1 and v2 report the host's enqueueing and the network; v3's channel events
// carry no time at all, and the host hears of them when the proxy thread comes by. v7 was read in sources between releases.
#ifndef LAGOM_NCCL_PROFILER_ABI_H
#define LAGOM_NCCL_PROFILER_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_tuner_abi.h"  // nccl_result, nccl_logger

enum nccl_event_type {
  NCCL_EVENT_GROUP = 1 << 0,
  NCCL_EVENT_COLLECTIVE = 1 << 1,
  NCCL_EVENT_P2P = 1 << 2,
  NCCL_EVENT_PROXY_OPERATION = 1 << 3,
  NCCL_EVENT_PROXY_STEP = 1 << 4,
  NCCL_EVENT_CHANNEL = 1 << 6,          // v3
  NCCL_EVENT_GROUP_CALL = 1 << 8,       // v5
  NCCL_EVENT_COLLECTIVE_CALL = 1 << 9,  // v5
};

enum nccl_event_state {
  NCCL_STATE_SEND_GPU_WAIT = 8,
  NCCL_STATE_SEND_WAIT = 9,  // this and the next but one tell a transfer's size
  NCCL_STATE_RECEIVE_WAIT = 10,
  NCCL_STATE_RECEIVE_FLUSH_WAIT = 11,
  NCCL_STATE_RECEIVE_GPU_WAIT = 12,
  NCCL_STATE_PROXY_OPERATION_IN_PROGRESS = 19,  // v4, as are the rest; by the network's transport only
  NCCL_STATE_SEND_PEER_WAIT = 20,
  NCCL_STATE_CHANNEL_STOP = 22,
};

// A collective as it is launched. `count` is per rank where ranks send or receive shards, and for all-gather and
// broadcast it counts bytes (type ncclInt8), whatever the caller's type was.
typedef struct {
  uint64_t sequence;  // per communicator and kind
  const char* kind;   // "AllReduce"
  const void* sent;
  void* received;
  size_t count;
  int root;
  const char* type;   // "ncclBfloat16"
  uint8_t num_channels;
  uint8_t num_warps;
  const char* algorithm;  // "RING"
  const char* protocol;   // "SIMPLE"
  void* group;            // v5 on; v4 ends before it
  const char* variant;    // v7 on, as are these
  bool is_symmetric;
  uint64_t tag;
} nccl_collective_event;

typedef struct {
  const char* kind;
  size_t count;
  const char* type;
  int root;
  void* stream;
  bool is_captured;
} nccl_collective_call_event;

typedef struct {
  uint8_t channel;
  uint64_t timer_ns;  // the GPU's globaltimer
} nccl_channel_event;

// What a channel sends to a peer, or receives from it. Of another process of the node where that one's GPU is nearer to
// the network card (PXN): context and parent are addresses of that process then.
typedef struct {
  int pid;  // of the process whose collective it is
  uint8_t channel;
  int peer;
  int num_steps;
  int chunk_bytes;
  int is_send;
} nccl_proxy_operation_event;

typedef struct {
  int step;
} nccl_proxy_step_event;

// One layout serves four versions. v4's type is one byte, and NCCL does not clear the seven bytes after it.
typedef struct {
  union {
    uint8_t type_v4;
    uint64_t type;  // v5 on
  };
  void* parent;  // of a collective: its call event (v5 on), its group (v4); of a channel or proxy operation: the collective
  int rank;
  union {
    nccl_collective_event collective;
    nccl_collective_call_event call;  // v5 on
    nccl_channel_event channel;
    nccl_proxy_operation_event proxy_operation;
    nccl_proxy_step_event proxy_step;
  };
} nccl_event;

typedef union {
  size_t num_bytes;
  void* data;
  uint64_t timer_ns;  // NCCL_STATE_CHANNEL_STOP
} nccl_event_state_arguments;

typedef struct {  // 2.27
  const char* name;
  nccl_result (*init)(void** context, int* mask, const char* comm_name, uint64_t comm_id, int num_nodes, int num_ranks,
                      int rank, nccl_logger log);
  nccl_result (*start_event)(void* context, void** handle, nccl_event* event);
  nccl_result (*stop_event)(void* handle);
  nccl_result (*record_event_state)(void* handle, int state, nccl_event_state_arguments* arguments);
  nccl_result (*finalize)(void* context);
} nccl_profiler_v4;

typedef struct {  // 2.28 (v5), 2.29 (v6), 2.31 (v7)
  const char* name;
  nccl_result (*init)(void** context, uint64_t comm_id, int* mask, const char* comm_name, int num_nodes, int num_ranks,
                      int rank, nccl_logger log);
  nccl_result (*start_event)(void* context, void** handle, nccl_event* event);
  nccl_result (*stop_event)(void* handle);
  nccl_result (*record_event_state)(void* handle, int state, nccl_event_state_arguments* arguments);
  nccl_result (*finalize)(void* context);
} nccl_profiler_v5;

#define NCCL_EVENT_AT(field, offset) _Static_assert(offsetof(nccl_event, field) == (offset), "nccl_event." #field)

// Offsets of 2.27.3 (v4), 2.28.3 and 2.28.9 (v5), 2.29.2, 2.30.3 and 2.30.7 (v6), 2.31 (v7), on a 64-bit machine.
_Static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8 && sizeof(int) == 4 && sizeof(bool) == 1, "LP64");
NCCL_EVENT_AT(type_v4, 0);
NCCL_EVENT_AT(type, 0);
NCCL_EVENT_AT(parent, 8);
NCCL_EVENT_AT(rank, 16);
NCCL_EVENT_AT(collective.sequence, 24);
NCCL_EVENT_AT(collective.kind, 32);
NCCL_EVENT_AT(collective.sent, 40);
NCCL_EVENT_AT(collective.received, 48);
NCCL_EVENT_AT(collective.count, 56);
NCCL_EVENT_AT(collective.root, 64);
NCCL_EVENT_AT(collective.type, 72);
NCCL_EVENT_AT(collective.num_channels, 80);
NCCL_EVENT_AT(collective.num_warps, 81);
NCCL_EVENT_AT(collective.algorithm, 88);
NCCL_EVENT_AT(collective.protocol, 96);
NCCL_EVENT_AT(collective.group, 104);
NCCL_EVENT_AT(collective.variant, 112);
NCCL_EVENT_AT(collective.is_symmetric, 120);
NCCL_EVENT_AT(collective.tag, 128);
NCCL_EVENT_AT(call.kind, 24);
NCCL_EVENT_AT(call.count, 32);
NCCL_EVENT_AT(call.type, 40);
NCCL_EVENT_AT(call.root, 48);
NCCL_EVENT_AT(call.stream, 56);
NCCL_EVENT_AT(call.is_captured, 64);
NCCL_EVENT_AT(channel.channel, 24);
NCCL_EVENT_AT(channel.timer_ns, 32);
NCCL_EVENT_AT(proxy_operation.pid, 24);
NCCL_EVENT_AT(proxy_operation.channel, 28);
NCCL_EVENT_AT(proxy_operation.peer, 32);
NCCL_EVENT_AT(proxy_operation.num_steps, 36);
NCCL_EVENT_AT(proxy_operation.chunk_bytes, 40);
NCCL_EVENT_AT(proxy_operation.is_send, 44);
NCCL_EVENT_AT(proxy_step.step, 24);
_Static_assert(sizeof(nccl_event_state_arguments) == 8, "state arguments");
_Static_assert(sizeof(nccl_profiler_v4) == 48 && sizeof(nccl_profiler_v5) == 48, "plug-in");

#endif
