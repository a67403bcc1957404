// Results that are still to come. An operation's part is given when it is issued; what it receives is brought when somebody
// needs it: before memory that it writes is read or written exactly, when a stream was waited for, when the communicator ends.
// So no call of NCCL waits for other ranks, and pipelines may issue in any order.
#include <stdlib.h>

#include "device.h"
#include "nccl_comm.h"

typedef struct pending {
  task task;
  bool is_running;
  struct pending* next;
} pending;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pending *first, **last = &first;
static _Thread_local bool is_settling;  // what we copy must not settle again

// Entries of one class are settled in their order: collectives of a communicator, messages from one rank.
static bool is_same_class(const task* a, const task* b) {
  if (a->comm != b->comm) return false;
  const bool is_message = a->kind == TASK_RECEIVE;
  const int* places = a->comm->members.places;
  return is_message == (b->kind == TASK_RECEIVE) && (!is_message || places[a->root] == places[b->root]);
}

static void remove_entry(pending* entry) {
  pending** at = &first;
  while (*at != entry) at = &(*at)->next;
  *at = entry->next;
  if (!*at) last = at;
  free(entry);
}

// With the lock held, which is given up while it waits. Returns with the oldest of the entry's class gone.
static ncclResult_t settle_oldest_like(const task* like) {
  pending* entry = first;
  while (entry && !is_same_class(&entry->task, like)) entry = entry->next;
  if (!entry) return ncclSuccess;
  if (entry->is_running) {
    pthread_cond_wait(&changed, &lock);
    return ncclSuccess;
  }
  entry->is_running = true;
  pthread_mutex_unlock(&lock);
  is_settling = true;
  ncclResult_t result = exchange_settle(&entry->task);
  is_settling = false;
  if (result) comm_fail(entry->task.comm, result, "%s", shared_error());
  pthread_mutex_lock(&lock);
  remove_entry(entry);
  pthread_cond_broadcast(&changed);
  return result;
}

static bool overlaps(const pending* entry, const void* at, size_t bytes) {
  size_t length;
  const char* to = exchange_output(&entry->task, &length);
  return length && to < (const char*)at + bytes && (const char*)at < to + length;
}

enum which { OVERLAPPING, OF_COMM, READY, ALL };

static bool is_wanted(const pending* entry, enum which which, ncclComm_t comm, const void* at, size_t bytes) {
  switch (which) {
    case OVERLAPPING: return overlaps(entry, at, bytes);
    case OF_COMM: return entry->task.comm == comm;
    case READY: return !entry->is_running && exchange_is_ready(&entry->task);
    default: return true;
  }
}

static ncclResult_t settle(enum which which, ncclComm_t comm, const void* at, size_t bytes) {
  ncclResult_t result = ncclSuccess;
  pthread_mutex_lock(&lock);
  for (;;) {
    pending* entry = first;
    while (entry && !is_wanted(entry, which, comm, at, bytes)) entry = entry->next;
    if (!entry) break;
    const task like = entry->task;
    const ncclResult_t one = settle_oldest_like(&like);
    if (one && !result) result = one;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

// The device's: before it touches a range; without one, after a wait. What has ended there has been given by all, where a
// coordinator decides what has ended.
static bool on_touch(const void* at, size_t bytes, bool may_wait) {
  if (is_settling || !first) return true;
  if (!at || !may_wait) settle(getenv("LAGOM_EMULATION_SOCKET") ? READY : ALL, NULL, NULL, 0);
  if (!at) return true;
  if (may_wait) settle(OVERLAPPING, NULL, at, bytes);
  pthread_mutex_lock(&lock);
  const pending* entry = first;
  while (entry && !overlaps(entry, at, bytes)) entry = entry->next;
  pthread_mutex_unlock(&lock);
  return !entry;
}

static void listen(void) { lagom_emulated_gpu.set_settle(on_touch); }

ncclResult_t pending_add(const task* t) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, listen);
  size_t in_bytes, out_bytes;
  const void* in = exchange_input(t, &in_bytes);
  const void* out = exchange_output(t, &out_bytes);
  ncclResult_t result = settle(OVERLAPPING, NULL, in, in_bytes);
  if (!result) result = settle(OVERLAPPING, NULL, out, out_bytes);
  if (result) return result;
  pending* entry = calloc(1, sizeof(*entry));
  entry->task = *t;
  pthread_mutex_lock(&lock);
  for (;;) {  // a slot must be free: all ranks have seen what it held
    int num_waiting = 0;
    for (const pending* e = first; e; e = e->next) num_waiting += is_same_class(&e->task, t);
    if (num_waiting < NUM_SLOTS - 1) break;
    result = settle_oldest_like(t);
    if (result) break;
  }
  pthread_mutex_unlock(&lock);
  if (!result) result = exchange_give(&entry->task);
  if (result || t->kind == TASK_SEND) {
    if (result) comm_fail(t->comm, result, "%s", shared_error());
    free(entry);
    return result;
  }
  pthread_mutex_lock(&lock);
  *last = entry, last = &entry->next;
  pthread_mutex_unlock(&lock);
  return ncclSuccess;
}

void pending_finish(ncclComm_t comm) { settle(OF_COMM, comm, NULL, 0); }
