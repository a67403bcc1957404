// What NCCL's proxy thread tells of a collective's transfers over the network, gathered by proxy operation.
//
// An operation is one channel's sending to, or receiving from, one peer; a step is one transfer of it, of which at most
// eight are under way. NCCL says of a step: posted, waiting for the GPU, waiting for the peer's credit, in the network,
// done; of a receipt: waiting for the data, being flushed to the GPU, waiting for the GPU to take it, done.
#ifndef LAGOM_PROFILER_NETWORK_H
#define LAGOM_PROFILER_NETWORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LAGOM_NETWORK_OPERATIONS = 1 << 14, LAGOM_NETWORK_STEPS = 8 };  // under way at once in one process; NCCL_STEPS

typedef enum {  // low bits of a handle; 0 to 4 are the profiler's
  LAGOM_TAG_OPERATION = 5,
  LAGOM_TAG_STEP = 6,
  LAGOM_TAG_MASK = 7,
} lagom_network_tag;

// Sums over steps, but for first, last and busy. Host's CLOCK_MONOTONIC in nanoseconds.
typedef struct {
  uint64_t sent_bytes, received_bytes;
  uint64_t num_sends, num_receipts;
  uint64_t send_gpu_ns, send_peer_ns, send_network_ns;
  uint64_t receive_network_ns, receive_flush_ns, receive_gpu_ns;
  uint64_t busy_ns;            // with at least one of its sends in the network
  uint64_t first_ns, last_ns;  // first step posted, last one done; 0: none
} lagom_network;

// A handle for an operation of `collective`, any word; 0: no room.
uint64_t lagom_network_start(uint64_t collective);
// The network makes progress with it: true once, with its collective. Other transports' operations never come here, and end untold.
bool lagom_network_begin(uint64_t operation, uint64_t* collective);
// True if it had begun: its collective and what it did. The handle is dead then.
bool lagom_network_end(uint64_t operation, uint64_t* collective, lagom_network* done);

uint64_t lagom_network_start_step(uint64_t operation, int step);
void lagom_network_set_state(uint64_t step, int state, size_t num_bytes, uint64_t now_ns);
void lagom_network_end_step(uint64_t step, uint64_t now_ns);

// Of lagom_profiler.c: whether more can come for a collective. An operation whose collective is over makes room.
bool lagom_is_under_way(uint64_t collective);

#endif
