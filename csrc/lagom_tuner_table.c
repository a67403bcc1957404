// The two private table buffers: filled, read from a file and flipped, and what the training process calls at a step.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lagom_tuner.h"

table tables[2];
_Atomic uint32_t active;
_Atomic uint32_t disabled;
_Atomic uint32_t capturing;
_Atomic uint32_t current_step;
_Atomic uint64_t num_captured;
pthread_mutex_t swap_lock = PTHREAD_MUTEX_INITIALIZER;
context* contexts;

// Under `swap_lock`, both like `active`: what a commit would flip to, 0: none; and what was decided by before the last one.
static uint32_t prepared, earlier;
static bool has_earlier;  // as it was: no table has been prepared since
static bool is_started;
static char table_path[MAX_PATH];

enum { NOTED_THREADS = 64 };
static _Atomic uint64_t noted[NOTED_THREADS];  // a thread, whose number is a multiple of four, and its call

static _Atomic uint64_t* noted_by(uint64_t thread) {
  return &noted[(thread * UINT64_C(0x9e3779b97f4a7c15)) >> 58];
}

void lagom_note_call(enum lagom_call call) {
  const uint64_t thread = (uint64_t)pthread_self();
  atomic_store_explicit(noted_by(thread), thread | (uint64_t)call, memory_order_relaxed);
}

enum lagom_call lagom_noted_call(void) {
  const uint64_t thread = (uint64_t)pthread_self();
  const uint64_t found = atomic_load_explicit(noted_by(thread), memory_order_relaxed);
  return (found & ~UINT64_C(3)) == thread ? (enum lagom_call)(found & 3) : LAGOM_CALL_UNKNOWN;
}

static uint64_t pack(const lagom_decision* d) {
  return NOTHING_SET | (uint64_t)(d->algorithm + 1) << WORD_ALGORITHM | (uint64_t)(d->protocol + 1) << WORD_PROTOCOL |
         (uint64_t)d->num_channels << WORD_CHANNELS | d->chunk_bytes << WORD_CHUNK;
}

static int by_site(const void* left, const void* right) {
  const lagom_decision *a = left, *b = right;
  const uint64_t m = site_key(a->communicator, a->kind, a->first_bytes), n = site_key(b->communicator, b->kind, b->first_bytes);
  if (m != n) return m < n ? -1 : 1;
  return (a->occurrence > b->occurrence) - (a->occurrence < b->occurrence);  // the row for every call comes last
}

// The rows of one site, from `d` on: `count` of them with equal keys.
static enum table_error fill_site(site* s, const lagom_decision* d, uint32_t count) {
  uint64_t any = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (d[i].last_bytes != d[0].last_bytes) return TABLE_BAD_DECISION;  // rows of one site disagree on its range
    if (i && d[i].occurrence == d[i - 1].occurrence) return TABLE_DUPLICATE;
    if (d[i].occurrence == LAGOM_ANY_OCCURRENCE) any = pack(&d[i]);
  }
  STORE(s->last_bytes, d[0].last_bytes);
  STORE(s->any, any);
  STORE(s->first_place, 0);
  STORE(s->num_places, 0);
  return TABLE_OK;
}

// The cycles, once the sites are in place: `calls` are in the order of their communicators.
static enum table_error fill_cycles(table* t, const lagom_decision* rows, uint32_t num_rows, const uint8_t* calls,
                                    uint32_t num_calls) {
  const uint32_t num_sites = LOAD(t->num_sites);
  for (uint32_t i = 0; i < num_calls; i++) {
    lagom_cycle_call call;
    memcpy(&call, calls + (size_t)i * sizeof(call), sizeof(call));
    role* r = &t->roles[call.communicator];
    if (LOAD(r->num_calls) == 0) STORE(r->first_call, i);
    STORE(r->num_calls, LOAD(r->num_calls) + 1);
    const int32_t found = find_site(t, call.communicator, call.kind, call.num_bytes, -1);
    if (found < 0) return TABLE_BAD_CYCLE;
    site* s = &t->sites[found];
    STORE(t->cycle[i].word, LOAD(s->any));
    STORE(t->cycle[i].site, (uint32_t)found);
    STORE(t->cycle[i].occurrence, LOAD(s->num_places));
    STORE(s->num_places, LOAD(s->num_places) + 1);
  }
  uint32_t used = 0;
  for (uint32_t i = 0; i < num_sites; i++) {
    STORE(t->sites[i].first_place, used);
    used += LOAD(t->sites[i].num_places);
  }
  for (uint32_t i = 0; i < num_calls; i++) {
    const uint32_t at = LOAD(t->cycle[i].site);
    const uint32_t first_call = LOAD(t->roles[LOAD(t->keys[at]) >> KEY_COMMUNICATOR].first_call);
    STORE(t->places[LOAD(t->sites[at].first_place) + LOAD(t->cycle[i].occurrence)], i - first_call);
  }
  for (uint32_t i = 0, at = 0; i < num_rows; i++) {
    const lagom_decision* d = &rows[i];
    while (LOAD(t->keys[at]) != site_key(d->communicator, d->kind, d->first_bytes)) at++;
    const site* s = &t->sites[at];
    if (d->occurrence >= LOAD(s->num_places)) continue;  // the step has fewer such calls
    const uint32_t place = LOAD(t->places[LOAD(s->first_place) + d->occurrence]);
    STORE(t->cycle[LOAD(t->roles[d->communicator].first_call) + place].word, pack(d));
  }
  return TABLE_OK;
}

// Fills a table that no one decides by, from rows in the order of `by_site`.
static enum table_error fill_sites(table* t, const lagom_decision* rows, uint32_t count) {
  uint32_t num_sites = 0;
  STORE(t->num_sites, 0);
  for (uint32_t i = 0, n; i < count; i += n) {
    const lagom_decision* d = &rows[i];
    const uint64_t key = site_key(d->communicator, d->kind, d->first_bytes);
    for (n = 1; i + n < count; n++) {
      if (site_key(d[n].communicator, d[n].kind, d[n].first_bytes) != key) break;
    }
    const bool is_of_same_kind = i && d[-1].communicator == d->communicator && d[-1].kind == d->kind;
    if (is_of_same_kind && d[-1].last_bytes >= d->first_bytes) return TABLE_DUPLICATE;
    enum table_error error = fill_site(&t->sites[num_sites], d, n);
    if (error) return error;
    STORE(t->keys[num_sites], key);
    num_sites++;
  }
  STORE(t->num_sites, num_sites);
  return TABLE_OK;
}

static enum table_error fill(table* t, const lagom_table_header* h, const lagom_decision* rows, const uint8_t* calls) {
  for (uint32_t i = 0; i < t->num_communicators; i++) {
    role* r = &t->roles[i];
    STORE(r->lease_calls, t->communicators[i].lease_calls);
    STORE(r->max_channels, t->communicators[i].max_channels);
    STORE(r->first_call, 0);
    STORE(r->num_calls, 0);
  }
  const enum table_error error = fill_sites(t, rows, h->num_decisions);
  return error ? error : fill_cycles(t, rows, h->num_decisions, calls, h->num_calls);
}

int32_t find_communicator(const table* t, const context* c) {
  int32_t by_ranks = NO_COMMUNICATOR;
  for (uint32_t i = 0; i < t->num_communicators; i++) {
    const lagom_communicator* k = &t->communicators[i];
    if (k->num_ranks != c->num_ranks) continue;
    if (k->num_nodes == c->num_nodes && k->creation_order == c->order_in_nodes) return (int32_t)i;
    if (k->num_nodes == 0 && k->creation_order == c->order_in_ranks) by_ranks = (int32_t)i;
  }
  return by_ranks;
}

// Fills the buffer that is not decided by: all of a switch that can fail.
static enum table_error prepare_locked(const uint8_t* data, size_t size, uint64_t generation) {
  prepared = 0;
  has_earlier = false;
  enum table_error error = check_table(data, size);
  if (error) return error;
  lagom_table_header h;
  memcpy(&h, data, sizeof(h));
  if (generation && h.generation != generation) return TABLE_WRONG_GENERATION;
  const size_t num_row_bytes = (size_t)h.num_decisions * sizeof(lagom_decision);
  lagom_decision* rows = malloc(num_row_bytes + 1);
  if (!rows) return TABLE_NO_MEMORY;
  const uint8_t* communicators = data + sizeof(h);
  const uint8_t* decisions = communicators + (size_t)h.num_communicators * sizeof(lagom_communicator);
  memcpy(rows, decisions, num_row_bytes);
  qsort(rows, h.num_decisions, sizeof(*rows), by_site);

  uint32_t now = LOAD(active);
  uint32_t index = now == 1 ? 1 : 0;
  table* t = &tables[index];
  uint32_t sequence = LOAD(t->sequence);
  STORE(t->sequence, sequence + 1);
  atomic_thread_fence(memory_order_release);
  STORE(t->generation, h.generation);
  t->num_communicators = h.num_communicators;
  memcpy(t->communicators, communicators, (size_t)h.num_communicators * sizeof(lagom_communicator));
  error = fill(t, &h, rows, decisions + num_row_bytes);
  free(rows);
  if (error) t->num_communicators = 0;
  for (context* c = contexts; c; c = c->next) STORE(c->communicator[index], find_communicator(t, c));
  atomic_store_explicit(&t->sequence, sequence + 2, memory_order_release);
  if (!error) prepared = index + 1;
  return error;
}

static enum table_error commit_locked(uint64_t generation) {
  if (!prepared) return TABLE_NOT_PREPARED;
  if (generation && LOAD(tables[prepared - 1].generation) != generation) return TABLE_WRONG_GENERATION;
  earlier = LOAD(active);
  has_earlier = true;
  atomic_store_explicit(&active, prepared, memory_order_release);
  prepared = 0;
  return TABLE_OK;
}

static enum table_error install_locked(const uint8_t* data, size_t size, uint64_t generation) {
  enum table_error error = prepare_locked(data, size, generation);
  return error ? error : commit_locked(generation);
}

static enum table_error load_locked(uint64_t generation) {
  if (!table_path[0]) return TABLE_NO_PATH;
  int fd = open(table_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return TABLE_UNREADABLE;
  struct stat st;
  const size_t most = sizeof(lagom_table_header) + LAGOM_MAX_COMMUNICATORS * sizeof(lagom_communicator) +
                      LAGOM_MAX_DECISIONS * sizeof(lagom_decision) + LAGOM_MAX_CALLS * sizeof(lagom_cycle_call);
  enum table_error error = TABLE_OK;
  uint8_t* data = NULL;
  if (fstat(fd, &st)) error = TABLE_UNREADABLE;
  else if (!S_ISREG(st.st_mode) || (st.st_mode & 022) || (st.st_uid != geteuid() && st.st_uid != 0)) {
    error = TABLE_NOT_PRIVATE;
  } else if (st.st_size < (off_t)sizeof(lagom_table_header) || (uint64_t)st.st_size > most) {
    error = TABLE_WRONG_SIZE;
  } else if (!(data = malloc((size_t)st.st_size + 1))) {
    error = TABLE_NO_MEMORY;
  }
  size_t size = 0;
  while (!error && size <= (size_t)st.st_size) {
    ssize_t got = pread(fd, data + size, (size_t)st.st_size + 1 - size, (off_t)size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) error = TABLE_UNREADABLE;
    if (got <= 0) break;
    size += (size_t)got;
  }
  if (!error && size != (size_t)st.st_size) error = TABLE_WRONG_SIZE;
  if (!error) error = install_locked(data, size, generation);
  free(data);
  close(fd);
  return error;
}

void start_locked(void) {
  if (is_started) return;
  is_started = true;
  crc_prepare();
  const char* off = getenv("LAGOM_DISABLE");
  if (off && *off && strcmp(off, "0") != 0) STORE(disabled, 1);
  const char* pattern = getenv("LAGOM_TABLE");
  if (pattern && *pattern && !expand_path(pattern, table_path)) table_path[0] = 0;
}

void load_first_table(nccl_logger log) {
  if (!table_path[0] || LOAD(active)) return;
  enum table_error error = load_locked(0);
  if (error) {
    LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: table %s refused: it %s; nothing is tuned", table_path,
        table_error_text(error));
    return;
  }
  table* t = &tables[LOAD(active) - 1];
  LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: table %s, generation %llu%s", table_path, (unsigned long long)t->generation,
      LOAD(disabled) ? ", disabled" : "");
}

// ------------------------------------------------------------------------- what the training process calls, at a step

// Marks a step boundary for who reads the record, and now and then writes that to its file; nothing is decided by it,
// because each rank counts its steps by itself. Returns the new step's number.
EXPORT uint32_t lagom_step(void) {
  const uint32_t step = atomic_fetch_add_explicit(&current_step, 1, memory_order_relaxed) + 1;
  if (ring_is_due(&record)) lagom_record_flush();
  return step;
}

// Reads LAGOM_TABLE again and, if it is sound and of `generation` (0: any), decides by it from the next call on. Returns
// 0, or an error for lagom_error_text, and then the old table stays. Ranks agree first, then all call it at one step.
EXPORT int lagom_swap(uint64_t generation) {
  pthread_mutex_lock(&swap_lock);
  start_locked();
  enum table_error error = load_locked(generation);
  pthread_mutex_unlock(&swap_lock);
  return (int)error;
}

// The same from memory.
EXPORT int lagom_install(const void* data, size_t size, uint64_t generation) {
  pthread_mutex_lock(&swap_lock);
  start_locked();
  enum table_error error = data ? install_locked(data, size, generation) : TABLE_WRONG_SIZE;
  pthread_mutex_unlock(&swap_lock);
  return (int)error;
}

// The same in two steps, for ranks that have to agree in between: what can fail, and nothing changes; then one store. A
// prepared table is dropped by the next one that is prepared, installed or swapped.
EXPORT int lagom_prepare(const void* data, size_t size, uint64_t generation) {
  pthread_mutex_lock(&swap_lock);
  start_locked();
  enum table_error error = data ? prepare_locked(data, size, generation) : TABLE_WRONG_SIZE;
  pthread_mutex_unlock(&swap_lock);
  return (int)error;
}

EXPORT int lagom_commit(uint64_t generation) {
  pthread_mutex_lock(&swap_lock);
  enum table_error error = commit_locked(generation);
  pthread_mutex_unlock(&swap_lock);
  return (int)error;
}

// Undoes the commit of a generation: what was decided by before is so again, as far as its calls had come. Nothing to do
// where another one is in force.
EXPORT int lagom_take_back(uint64_t generation) {
  pthread_mutex_lock(&swap_lock);
  const uint32_t now = LOAD(active);
  enum table_error error = TABLE_OK;
  if (now && LOAD(tables[now - 1].generation) == generation) {
    if (has_earlier) atomic_store_explicit(&active, earlier, memory_order_release);
    else error = TABLE_NOT_PREPARED;
    has_earlier = false;
  }
  pthread_mutex_unlock(&swap_lock);
  return (int)error;
}

EXPORT const char* lagom_error_text(int error) { return table_error_text((enum table_error)error); }

// The generation decided by, 0 if none.
EXPORT uint64_t lagom_generation(void) {
  pthread_mutex_lock(&swap_lock);
  uint32_t now = LOAD(active);
  uint64_t generation = now && !LOAD(disabled) ? LOAD(tables[now - 1].generation) : 0;
  pthread_mutex_unlock(&swap_lock);
  return generation;
}

// 0: decide nothing from the next call on (the chain still answers); 1: decide again.
EXPORT void lagom_enable(int is_enabled) {
  pthread_mutex_lock(&swap_lock);
  start_locked();
  STORE(disabled, is_enabled ? 0 : 1);
  pthread_mutex_unlock(&swap_lock);
}

// 1: the job begins to capture a CUDA graph; 0: it has ended. Returns how many calls were asked about since it began that
// are not known to be outside of it.
EXPORT uint64_t lagom_capture(int is_begun) {
  pthread_mutex_lock(&swap_lock);
  start_locked();
  if (is_begun) STORE(num_captured, 0);
  STORE(capturing, is_begun ? 1 : 0);
  const uint64_t num = LOAD(num_captured);
  pthread_mutex_unlock(&swap_lock);
  return num;
}

// Says which communicator of the table NCCL's `comm_id` is, where creation order would not tell. Returns the number of
// communicators changed (0: no such id). Call it before the communicator's first collective, or between steps.
EXPORT int lagom_bind(uint64_t comm_id, uint32_t num_nodes, uint32_t creation_order) {
  int num_bound = 0;
  pthread_mutex_lock(&swap_lock);
  for (context* c = contexts; c; c = c->next) {
    if (c->comm_id != comm_id) continue;
    if (num_nodes) c->order_in_nodes = creation_order;
    else c->order_in_ranks = creation_order;
    for (int i = 0; i < 2; i++) STORE(c->communicator[i], find_communicator(&tables[i], c));
    num_bound++;
  }
  pthread_mutex_unlock(&swap_lock);
  return num_bound;
}
