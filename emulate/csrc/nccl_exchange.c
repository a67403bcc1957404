// Exact results of small operations: each rank gives its part, and computes from all parts what it is to receive. Device memory
// of the emulated device is this process's memory. Larger operations leave their output as it is, and are counted.
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "nccl_comm.h"

static size_t bytes_of(const task* t) { return t->count * type_bytes(t->type); }

// Bytes that one rank gives; equal on all ranks where all must agree.
static size_t part_bytes(const task* t) {
  const bool is_wide = t->kind == TASK_REDUCE_SCATTER || t->kind == TASK_ALL_TO_ALL || t->kind == TASK_SCATTER;
  return bytes_of(t) * (is_wide ? (size_t)t->comm->num_ranks : 1);
}

bool exchange_is_exact(const task* t) {
  if (part_bytes(t) > SLOT_BYTES || !t->count) return false;
  if (t->kind >= TASK_SEND && !shared_has_pairs(t->comm->shared)) return false;
  int is_capturing = 0;  // what is captured runs later, and again
  return !(cuStreamIsCapturing(t->stream, &is_capturing) == CUDA_SUCCESS && is_capturing);
}

static int place_of(const task* t, int rank) { return t->comm->members.places[rank]; }

// Whether this rank, or one that it stands for, has a part.
static bool gives(const task* t) {
  if (t->kind == TASK_BROADCAST || t->kind == TASK_SCATTER) return place_of(t, t->root) == t->comm->members.own;
  return true;
}

// A receive from an absent rank brings what its stand-in sends here in the same group. Where this rank is the stand-in, that is
// what it sends to itself (`send`); else the next message, which the receive from the stand-in itself takes afterwards.
static bool is_from_absent(const task* t) { return t->kind == TASK_RECEIVE && !comm_has_process(t->comm, t->root); }

ncclResult_t exchange_give(task* t) {
  if (is_from_absent(t) && t->send) memmove(t->receive, t->send, bytes_of(t));
  if (t->kind == TASK_SEND && !comm_has_process(t->comm, t->root)) return ncclSuccess;
  if (t->kind == TASK_SEND) return shared_send(t->comm->shared, place_of(t, t->root), t->send, bytes_of(t));
  if (t->kind == TASK_RECEIVE) return ncclSuccess;
  return shared_give(t->comm->shared, t->send, gives(t) ? part_bytes(t) : 0, &t->given);
}

static ncclResult_t copy_from(task* t, int rank, size_t offset, void* to) {
  const void* part;
  ncclResult_t result = shared_part(t->comm->shared, t->given, place_of(t, rank), &part);
  if (!result) memcpy(to, (const char*)part + offset, bytes_of(t));
  return result;
}

static ncclResult_t reduce_from_all(task* t, size_t offset) {
  const int n = t->comm->num_ranks;
  const void** parts = calloc((size_t)n, sizeof(*parts));
  ncclResult_t result = ncclSuccess;
  for (int r = 0; r < n && !result; r++) {
    result = shared_part(t->comm->shared, t->given, place_of(t, r), &parts[r]);
    parts[r] = (const char*)parts[r] + offset;
  }
  if (!result) reduce_parts(t->receive, parts, n, t->count, t->type, &t->how);
  free(parts);
  return result;
}

static ncclResult_t collect(task* t) {
  const int n = t->comm->num_ranks, own = t->comm->rank;
  const size_t bytes = bytes_of(t), at = (size_t)own * bytes;
  ncclResult_t result = ncclSuccess;
  switch (t->kind) {
    case TASK_ALL_REDUCE: return reduce_from_all(t, 0);
    case TASK_REDUCE: return own == t->root ? reduce_from_all(t, 0) : ncclSuccess;
    case TASK_REDUCE_SCATTER: return reduce_from_all(t, at);
    case TASK_BROADCAST: return copy_from(t, t->root, 0, t->receive);
    case TASK_SCATTER: return copy_from(t, t->root, at, t->receive);
    default: break;
  }
  if (t->kind == TASK_GATHER && own != t->root) return ncclSuccess;
  for (int r = 0; r < n && !result; r++) {
    result = copy_from(t, r, t->kind == TASK_ALL_TO_ALL ? at : 0, (char*)t->receive + (size_t)r * bytes);
  }
  return result;
}

ncclResult_t exchange_settle(task* t) {
  if (t->kind == TASK_SEND || (is_from_absent(t) && t->send)) return ncclSuccess;
  if (is_from_absent(t)) return shared_look(t->comm->shared, place_of(t, t->root), t->receive, bytes_of(t));
  if (t->kind == TASK_RECEIVE) return shared_receive(t->comm->shared, place_of(t, t->root), t->receive, bytes_of(t));
  ncclResult_t result = collect(t);
  if (!result) shared_took(t->comm->shared, t->given);
  return result;
}

const void* exchange_input(const task* t, size_t* num_bytes) {
  *num_bytes = t->send && gives(t) ? part_bytes(t) : 0;
  return t->send;
}

const void* exchange_output(const task* t, size_t* num_bytes) {
  const bool is_at_root = t->root == t->comm->rank;
  const bool is_wide = t->kind == TASK_ALL_GATHER || t->kind == TASK_ALL_TO_ALL || t->kind == TASK_GATHER;
  const bool has_none = t->kind == TASK_SEND || ((t->kind == TASK_REDUCE || t->kind == TASK_GATHER) && !is_at_root);
  *num_bytes = has_none ? 0 : bytes_of(t) * (is_wide ? (size_t)t->comm->num_ranks : 1);
  return t->receive;
}

bool exchange_is_ready(const task* t) {
  if (is_from_absent(t) && t->send) return true;
  if (t->kind == TASK_RECEIVE) return shared_has_message(t->comm->shared, place_of(t, t->root));
  for (int r = 0; r < t->comm->members.num_present; r++) {
    if (!shared_has_part(t->comm->shared, t->given, r)) return false;
  }
  return true;
}
