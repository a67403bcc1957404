// See lagom_profiler_network.h. One thread at a time tells of an operation: the proxy thread that makes its progress.
//
// Fields are atomic all the same: an operation that was given up may be taken by another thread while its old one still
// tells of it. What is counted wrongly then is of the operation that was given up: each call looks at the generation.
// NCCL starts a receipt's step again each time it polls in vain: a step's time begins with its first state. It says
// "waiting for the peer" at each poll, which adds up to the same.
#include <stdatomic.h>

#include "lagom_profiler_network.h"
#include "nccl/nccl_profiler_abi.h"

enum { IDLE = 0 };  // no state of NCCL's that we look at is 0

typedef struct {
  _Atomic uint64_t at_ns;
  _Atomic int state;
} transfer;

typedef struct {
  _Atomic uint64_t state;  // generation << 32 | USED | BEGUN
  _Atomic uint64_t collective;
  _Atomic uint32_t num_in_network;
  _Atomic uint64_t busy_since_ns;
  transfer transfers[LAGOM_NETWORK_STEPS];
  _Atomic uint64_t sent_bytes, received_bytes, num_sends, num_receipts, send_gpu_ns, send_peer_ns, send_network_ns;
  _Atomic uint64_t receive_network_ns, receive_flush_ns, receive_gpu_ns, busy_ns, first_ns, last_ns;
} operation;

#define USED 1ULL
#define BEGUN 2ULL

static operation operations[LAGOM_NETWORK_OPERATIONS];
static _Atomic uint32_t next_operation;
_Static_assert((LAGOM_NETWORK_OPERATIONS & (LAGOM_NETWORK_OPERATIONS - 1)) == 0, "a power of two");
_Static_assert(LAGOM_NETWORK_OPERATIONS <= 1 << 16, "an operation in 16 bits");

#define GET(field) atomic_load_explicit(&(field), memory_order_relaxed)
#define SET(field, value) atomic_store_explicit(&(field), (value), memory_order_relaxed)
#define ADD(field, value) SET(field, GET(field) + (value))  // one thread at a time

// A handle: generation << 32 | operation << 16 | step << 8 | tag.
static operation* operation_of(uint64_t handle) {
  operation* o = &operations[handle >> 16 & (LAGOM_NETWORK_OPERATIONS - 1)];
  const uint64_t state = atomic_load_explicit(&o->state, memory_order_acquire);
  return state >> 32 == handle >> 32 && (state & USED) ? o : NULL;
}

uint64_t lagom_network_start(uint64_t collective) {
  const uint32_t index =
      atomic_fetch_add_explicit(&next_operation, 1, memory_order_relaxed) & (LAGOM_NETWORK_OPERATIONS - 1);
  operation* o = &operations[index];
  uint64_t state = GET(o->state);
  if ((state & USED) && lagom_is_under_way(GET(o->collective))) return 0;
  const uint64_t generation = (state >> 32) + 1;
  // Not USED while it is filled, so that its old handle is dead.
  if (!atomic_compare_exchange_strong_explicit(&o->state, &state, generation << 32, memory_order_acquire,
                                               memory_order_relaxed)) {
    return 0;
  }
  SET(o->collective, collective);
  SET(o->num_in_network, 0);
  for (int i = 0; i < LAGOM_NETWORK_STEPS; i++) SET(o->transfers[i].state, IDLE);
  _Atomic uint64_t* const sums[] = {&o->sent_bytes,      &o->received_bytes,     &o->num_sends,        &o->num_receipts,
                                    &o->send_gpu_ns,     &o->send_peer_ns,       &o->send_network_ns,  &o->receive_network_ns,
                                    &o->receive_flush_ns, &o->receive_gpu_ns,    &o->busy_ns,          &o->first_ns,
                                    &o->last_ns};
  for (size_t i = 0; i < sizeof(sums) / sizeof(*sums); i++) SET(*sums[i], 0);
  atomic_store_explicit(&o->state, generation << 32 | USED, memory_order_release);
  return generation << 32 | (uint64_t)index << 16 | LAGOM_TAG_OPERATION;
}

bool lagom_network_begin(uint64_t handle, uint64_t* collective) {
  operation* o = operation_of(handle);
  if (!o || (atomic_fetch_or_explicit(&o->state, BEGUN, memory_order_relaxed) & BEGUN)) return false;
  *collective = GET(o->collective);
  return true;
}

bool lagom_network_end(uint64_t handle, uint64_t* collective, lagom_network* done) {
  operation* o = operation_of(handle);
  if (!o) return false;
  uint64_t state = GET(o->state);
  *collective = GET(o->collective);
  *done = (lagom_network){GET(o->sent_bytes),         GET(o->received_bytes),   GET(o->num_sends),    GET(o->num_receipts),
                          GET(o->send_gpu_ns),        GET(o->send_peer_ns),     GET(o->send_network_ns),
                          GET(o->receive_network_ns), GET(o->receive_flush_ns), GET(o->receive_gpu_ns), GET(o->busy_ns),
                          GET(o->first_ns),           GET(o->last_ns)};
  const bool is_mine = atomic_compare_exchange_strong_explicit(&o->state, &state, state & ~(USED | BEGUN),
                                                               memory_order_release, memory_order_relaxed);
  return is_mine && (state & BEGUN);
}

uint64_t lagom_network_start_step(uint64_t handle, int step) {
  if ((handle & LAGOM_TAG_MASK) != LAGOM_TAG_OPERATION || !operation_of(handle)) return 0;
  return (handle & ~0xFFFFULL) | (uint64_t)((unsigned)step % LAGOM_NETWORK_STEPS) << 8 | LAGOM_TAG_STEP;
}

// What a step waited for in the state that it leaves.
static _Atomic uint64_t* waited(operation* o, int state) {
  switch (state) {
    case NCCL_STATE_SEND_GPU_WAIT: return &o->send_gpu_ns;
    case NCCL_STATE_SEND_PEER_WAIT: return &o->send_peer_ns;
    case NCCL_STATE_SEND_WAIT: return &o->send_network_ns;
    case NCCL_STATE_RECEIVE_WAIT: return &o->receive_network_ns;
    case NCCL_STATE_RECEIVE_FLUSH_WAIT: return &o->receive_flush_ns;
    case NCCL_STATE_RECEIVE_GPU_WAIT: return &o->receive_gpu_ns;
    default: return NULL;
  }
}

static void change(operation* o, transfer* t, int to, uint64_t now_ns) {
  const int from = GET(t->state);
  _Atomic uint64_t* const time = waited(o, from);
  if (time) ADD(*time, now_ns - GET(t->at_ns));
  if (from == NCCL_STATE_SEND_WAIT && GET(o->num_in_network) > 0) {
    ADD(o->num_in_network, -1u);
    if (GET(o->num_in_network) == 0) ADD(o->busy_ns, now_ns - GET(o->busy_since_ns));
  }
  if (to == NCCL_STATE_SEND_WAIT) {
    if (GET(o->num_in_network) == 0) SET(o->busy_since_ns, now_ns);
    ADD(o->num_in_network, 1u);
  }
  SET(t->state, to);
  SET(t->at_ns, now_ns);
}

void lagom_network_set_state(uint64_t handle, int state, size_t num_bytes, uint64_t now_ns) {
  operation* o = operation_of(handle);
  if (!o || !waited(o, state)) return;
  transfer* t = &o->transfers[handle >> 8 & (LAGOM_NETWORK_STEPS - 1)];
  if (GET(o->first_ns) == 0) SET(o->first_ns, now_ns);
  change(o, t, state, now_ns);
  // NCCL gives the size with every state; before these it is still that of the step before.
  if (state == NCCL_STATE_SEND_WAIT) {
    ADD(o->num_sends, 1u);
    ADD(o->sent_bytes, num_bytes);
  } else if (state == NCCL_STATE_RECEIVE_FLUSH_WAIT) {
    ADD(o->num_receipts, 1u);
    ADD(o->received_bytes, num_bytes);
  }
}

void lagom_network_end_step(uint64_t handle, uint64_t now_ns) {
  operation* o = operation_of(handle);
  if (!o) return;
  transfer* t = &o->transfers[handle >> 8 & (LAGOM_NETWORK_STEPS - 1)];
  if (GET(t->state) == IDLE) return;
  change(o, t, IDLE, now_ns);
  SET(o->last_ns, now_ns);
}
