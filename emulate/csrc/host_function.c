#define _GNU_SOURCE
#include "host_function.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "client.h"

typedef struct entry {
  uint64_t op_id;
  uint32_t device, stream;
  CUhostFn function;
  void *argument;
  bool is_claimed;
  struct entry *next;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static entry *first;
static bool has_worker;

static void leave(entry *mine) {  // needs the lock
  entry **at = &first;
  while (*at != mine) at = &(*at)->next;
  *at = mine->next;
  free(mine);
  pthread_cond_broadcast(&changed);
}

static void run(entry *mine) {  // needs the lock, gives it up while the callback runs
  mine->is_claimed = true;
  pthread_mutex_unlock(&lock);
  mine->function(mine->argument);
  pthread_mutex_lock(&lock);
  leave(mine);
}

static entry *first_of(uint32_t device, uint32_t stream) {
  entry *at = first;
  while (!(at->device == device && at->stream == stream)) at = at->next;
  return at;
}

// The oldest that may run: one whose predecessor in its stream still runs, on whatever thread, waits for it.
static entry *first_runnable(void) {
  entry *at = first;
  while (at && (at->is_claimed || first_of(at->device, at->stream) != at)) at = at->next;
  return at;
}

static entry *find(uint64_t op_id) {
  entry *at = first;
  while (at && at->op_id != op_id) at = at->next;
  return at;
}

static void *work(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  for (;;) {
    entry *next = first_runnable();
    if (!next) {
      pthread_cond_wait(&changed, &lock);
      continue;
    }
    uint64_t op_id = next->op_id;
    pthread_mutex_unlock(&lock);
    bool has_failed = client_wait_in_background(op_id) == CLIENT_FAILED;
    pthread_mutex_lock(&lock);
    next = find(op_id);  // who waited for the stream may have run it meanwhile
    if (next && !next->is_claimed) {
      if (has_failed) leave(next);  // the job has been refused: its callbacks never run, and nobody waits for them
      else run(next);
    }
  }
  return NULL;
}

void host_function_add(uint64_t op_id, uint32_t device, uint32_t stream, CUhostFn function, void *argument) {
  entry *made = malloc(sizeof *made);
  if (!made) abort();
  *made = (entry){op_id, device, stream, function, argument, false, NULL};
  pthread_mutex_lock(&lock);
  entry **end = &first;
  while (*end) end = &(*end)->next;
  *end = made;
  if (!has_worker) {
    pthread_t worker;
    has_worker = !pthread_create(&worker, NULL, work, NULL);
    if (has_worker) pthread_detach(worker);
  }
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static entry *next_of(uint64_t op_id, uint32_t device, uint32_t stream) {
  entry *at = first;
  while (at && !(at->device == device && at->stream == stream && at->op_id <= op_id)) at = at->next;
  return at;
}

void host_function_finish(uint64_t op_id, uint32_t device, uint32_t stream) {
  pthread_mutex_lock(&lock);
  for (entry *mine; (mine = next_of(op_id, device, stream));) {
    if (mine->is_claimed)
      pthread_cond_wait(&changed, &lock);
    else
      run(mine);
  }
  pthread_mutex_unlock(&lock);
}
