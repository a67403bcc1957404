// liblagom_tuner.so: NCCL tuner ABI v2 to v7 from one decision table. (Over 400 lines: one interface, one file.)
//
// Environment, read when the first communicator is made:
//   LAGOM_TABLE          decision table; %r is this process's rank (RANK, SLURM_PROCID, ...), %p its process id
//   LAGOM_RECORD         record ring to create, same patterns; LAGOM_RECORD_ENTRIES its length (65536)
//   LAGOM_CHAIN_TUNER    tuner for calls without a decision: path, name or "none"; unset: what NCCL would have loaded
//   LAGOM_DISABLE        anything but empty or "0": decide nothing, only chain
//
// Rules of the decision path (get_coll_info, get_chunk_size): no allocation, lock, system call or parse; a call without
// a decision is left as it was; the answer is always success, because NCCL turns any error into a failed collective.
//
// Memory: the table lives in two private buffers, each a seqlock, written only by a swap. The file is never mapped: one
// truncated by somebody else would kill the job with SIGBUS. All state of a communicator is plain, because NCCL never
// runs two calls on one communicator at once; indices are masked all the same.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lagom_ring.h"
#include "lagom_table.h"
#include "nccl_tuner_abi.h"

#ifndef LAGOM_BETWEEN_READS  // a test swaps tables here, where a real swap would hurt most
#define LAGOM_BETWEEN_READS()
#endif
#define EXPORT __attribute__((visibility("default")))
#define COLD __attribute__((noinline, cold))
#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)

enum {
  NUM_COUNTERS = 1024,  // call sites that one communicator can count
  MAX_COUNTERS_USED = NUM_COUNTERS * 3 / 4,
  MAX_PENDING = 32,
  MAX_TRIES = 64,
  NO_COMMUNICATOR = -1,
};
static const float DISABLED = 1e30F;

// ---------------------------------------------------------------------------------------------- errors of a table

enum table_error {
  TABLE_OK = 0,
  TABLE_NO_PATH,
  TABLE_UNREADABLE,
  TABLE_NOT_PRIVATE,
  TABLE_WRONG_SIZE,
  TABLE_WRONG_MAGIC,
  TABLE_WRONG_VERSION,
  TABLE_WRONG_CHECKSUM,
  TABLE_WRONG_GENERATION,
  TABLE_BAD_HEADER,
  TABLE_BAD_COMMUNICATOR,
  TABLE_BAD_DECISION,
  TABLE_DUPLICATE,
  TABLE_NO_MEMORY,
  TABLE_NOT_PREPARED,
  NUM_TABLE_ERRORS
};

static const char* const TABLE_ERROR_TEXT[NUM_TABLE_ERRORS] = {
    "ok",
    "LAGOM_TABLE is not set or too long",
    "cannot be opened or read",
    "is not a regular file of this user that only its owner may write",
    "has another size than its header says, or none that a table can have",
    "is not a lagom table",
    "is of another version",
    "is damaged: the checksum differs",
    "is of another generation than asked for",
    "has an impossible header",
    "has an impossible communicator",
    "has an impossible decision",
    "names a communicator or call twice",
    "does not fit into memory",
    "was not prepared, or another one since",
};

// ------------------------------------------------------------------------------------------------ validating a table

static uint32_t crc_table[256];

static void crc_prepare(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    crc_table[i] = c;
  }
}

static uint32_t crc_update(uint32_t crc, const uint8_t* data, size_t size) {
  for (size_t i = 0; i < size; i++) crc = crc_table[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
  return crc;
}

static uint32_t table_checksum(const uint8_t* data, size_t size) {
  static const uint8_t zero[4] = {0};
  const size_t at = offsetof(lagom_table_header, checksum);
  uint32_t crc = crc_update(0xFFFFFFFFu, data, at);
  crc = crc_update(crc, zero, sizeof(zero));
  return ~crc_update(crc, data + at + sizeof(zero), size - at - sizeof(zero));
}

static size_t grain_of(int protocol) {
  return protocol == NCCL_LL ? NCCL_GRAIN_LL : protocol == NCCL_LL128 ? NCCL_GRAIN_LL128 : NCCL_GRAIN_SIMPLE;
}

static bool is_sound_communicator(const lagom_communicator* c) {
  if (c->max_channels > NCCL_MAX_CHANNELS || c->num_ranks < 1 || c->num_ranks > (1u << 24) || c->num_nodes > c->num_ranks) return false;
  if (c->creation_order >= (1u << 24) || c->description[LAGOM_DESCRIPTION_BYTES - 1] != 0) return false;
  size_t length = strlen(c->description);
  for (size_t i = 0; i < LAGOM_DESCRIPTION_BYTES; i++) {
    uint8_t byte = (uint8_t)c->description[i];
    if (i < length ? byte < 0x20 || byte == 0x7F : byte != 0) return false;
  }
  return true;
}

static bool is_sound_decision(const lagom_decision* d, uint32_t num_communicators) {
  if (d->communicator >= num_communicators || d->kind >= NCCL_NUM_KINDS) return false;
  if (d->first_bytes < 1 || d->last_bytes < d->first_bytes || d->last_bytes > LAGOM_MAX_BYTES) return false;
  if (d->algorithm < -1 || d->algorithm >= NCCL_NUM_ALGORITHMS) return false;
  if (d->protocol < -1 || d->protocol >= NCCL_NUM_PROTOCOLS) return false;
  if (d->num_channels > NCCL_MAX_CHANNELS) return false;
  if (d->chunk_bytes && (d->chunk_bytes < NCCL_GRAIN_LL || d->chunk_bytes > LAGOM_MAX_CHUNK_BYTES)) return false;
  if (d->chunk_bytes && d->protocol >= 0 && d->chunk_bytes < grain_of(d->protocol)) return false;
  return d->occurrence == LAGOM_ANY_OCCURRENCE || d->occurrence < LAGOM_MAX_ROWS;
}

static int by_place(const void* left, const void* right) {
  const lagom_communicator *a = left, *b = right;
  if (a->num_ranks != b->num_ranks) return a->num_ranks < b->num_ranks ? -1 : 1;
  if (a->num_nodes != b->num_nodes) return a->num_nodes < b->num_nodes ? -1 : 1;
  return (a->creation_order > b->creation_order) - (a->creation_order < b->creation_order);
}

static enum table_error check_communicators(const uint8_t* data, uint32_t count) {
  lagom_communicator* sorted = malloc((size_t)count * sizeof(*sorted) + 1);
  if (!sorted) return TABLE_NO_MEMORY;
  enum table_error error = TABLE_OK;
  memcpy(sorted, data + sizeof(lagom_table_header), (size_t)count * sizeof(*sorted));
  for (uint32_t i = 0; i < count && !error; i++) {
    if (!is_sound_communicator(&sorted[i])) error = TABLE_BAD_COMMUNICATOR;
  }
  if (!error) qsort(sorted, count, sizeof(*sorted), by_place);
  for (uint32_t i = 1; i < count && !error; i++) {
    if (by_place(&sorted[i - 1], &sorted[i]) == 0) error = TABLE_DUPLICATE;
  }
  free(sorted);
  return error;
}

// Trusts no byte of `data`. Duplicate decisions and overlapping ranges are found when the buffer is filled.
static enum table_error check_table(const uint8_t* data, size_t size) {
  lagom_table_header h;
  if (size < sizeof(h)) return TABLE_WRONG_SIZE;
  memcpy(&h, data, sizeof(h));
  if (h.magic != LAGOM_TABLE_MAGIC) return TABLE_WRONG_MAGIC;
  if (h.version != LAGOM_TABLE_VERSION) return TABLE_WRONG_VERSION;
  if (h.header_bytes != sizeof(h) || h.communicator_bytes != sizeof(lagom_communicator) ||
      h.decision_bytes != sizeof(lagom_decision) || h.flags || h.reserved || h.generation == 0 ||
      h.num_communicators > LAGOM_MAX_COMMUNICATORS || h.num_decisions > LAGOM_MAX_DECISIONS) {
    return TABLE_BAD_HEADER;
  }
  uint64_t expected = sizeof(h) + (uint64_t)h.num_communicators * sizeof(lagom_communicator) +
                      (uint64_t)h.num_decisions * sizeof(lagom_decision);
  if (h.file_bytes != size || expected != size) return TABLE_WRONG_SIZE;
  if (table_checksum(data, size) != h.checksum) return TABLE_WRONG_CHECKSUM;
  enum table_error error = check_communicators(data, h.num_communicators);
  if (error) return error;
  const uint8_t* row = data + size - (size_t)h.num_decisions * sizeof(lagom_decision);
  for (uint32_t i = 0; i < h.num_decisions; i++, row += sizeof(lagom_decision)) {
    lagom_decision d;
    memcpy(&d, row, sizeof(d));
    if (!is_sound_decision(&d, h.num_communicators)) return TABLE_BAD_DECISION;
  }
  return TABLE_OK;
}

// ------------------------------------------------------------------------------------- the two private table buffers

// The call sites in the order of their keys (communicator, kind, first bytes), found by bisection; each points to one
// word for each occurrence. The keys lie apart and close together, because the cost of a decision is its cache misses:
// 1,024 sites are 8 KiB.
typedef struct {
  _Atomic uint64_t last_bytes;
  _Atomic uint32_t first_row;
  _Atomic uint32_t num_rows;  // 0: no occurrence has a row of its own
  _Atomic uint64_t any;       // for calls beyond those rows, and for all while no step was marked; 0: none
} site;

// A decision in a word: chunk | channels, protocol + 1, algorithm + 1, "there is one". 0: none.
enum { NOTHING_SET = 1, WORD_ALGORITHM = 1, WORD_PROTOCOL = 5, WORD_CHANNELS = 8, WORD_CHUNK = 16 };

typedef struct {
  _Atomic uint32_t sequence;  // odd while being written
  _Atomic uint32_t num_sites;
  _Atomic uint64_t generation;
  uint32_t num_communicators;  // these two: under `swap_lock` only
  lagom_communicator communicators[LAGOM_MAX_COMMUNICATORS];
  _Atomic uint32_t max_channels[LAGOM_MAX_COMMUNICATORS];
  _Alignas(64) _Atomic uint64_t keys[LAGOM_MAX_DECISIONS];
  _Alignas(64) site sites[LAGOM_MAX_DECISIONS];
  _Atomic uint64_t rows[LAGOM_MAX_ROWS];
} table;

static table tables[2];
static _Atomic uint32_t active;  // 0: no table, else 1 + index of the current one
static uint32_t prepared;        // under `swap_lock`; 0: none, else 1 + index of the one that a commit would flip to
static _Atomic uint32_t disabled;
static _Atomic uint32_t current_step;
static bool gathers_are_uncapped;  // written once, before the first communicator is used
static pthread_mutex_t swap_lock = PTHREAD_MUTEX_INITIALIZER;

// Below 2^62: 1,024 communicators, 8 kinds, 2^48 bytes and one more.
enum { KEY_KIND = 49, KEY_COMMUNICATOR = 52 };
_Static_assert(LAGOM_MAX_BYTES < 1ULL << KEY_KIND && LAGOM_MAX_COMMUNICATORS <= 1u << 10, "a key holds them");

static uint64_t site_key(uint32_t communicator, uint32_t kind, uint64_t num_bytes) {
  return (uint64_t)communicator << KEY_COMMUNICATOR | (uint64_t)(kind & 7) << KEY_KIND | num_bytes;
}

static uint64_t bytes_of_key(uint64_t key) { return key & ((1ULL << KEY_KIND) - 1); }

static bool holds(table* t, uint32_t at, uint64_t key) {
  const uint64_t found = LOAD(t->keys[at]);
  return found <= key && found >> KEY_KIND == key >> KEY_KIND &&
         bytes_of_key(key) <= LOAD(t->sites[at].last_bytes);
}

// The place of the site whose range holds a call, or -1; looks at `hint` first.
static int32_t find_site(table* t, uint32_t communicator, uint32_t kind, uint64_t num_bytes, int32_t hint) {
  uint32_t length = LOAD(t->num_sites), at = 0;
  if (length == 0 || length > LAGOM_MAX_DECISIONS || num_bytes > LAGOM_MAX_BYTES) return -1;
  const uint64_t key = site_key(communicator, kind, num_bytes);
  if (hint >= 0 && (uint32_t)hint < length && holds(t, (uint32_t)hint, key)) return hint;
  while (length > 1) {
    const uint32_t half = length / 2;
    at += LOAD(t->keys[at + half]) <= key ? half : 0;
    length -= half;
  }
  return holds(t, at, key) ? (int32_t)at : -1;
}

static uint32_t hash_of(uint32_t kind, uint64_t num_bytes) {
  uint64_t h = (num_bytes ^ (uint64_t)kind << 40) * 0x9E3779B97F4A7C15ULL;
  return (uint32_t)((h ^ h >> 32) * 0xD6E8FEB86659FD93ULL >> 32);
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

// The rows of one site, from `d` on: `count` of them with equal keys. Words of occurrences go to `used` and after.
static enum table_error fill_site(table* t, site* s, const lagom_decision* d, uint32_t count, uint32_t used) {
  uint32_t num_rows = 0;
  uint64_t any = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (d[i].last_bytes != d[0].last_bytes) return TABLE_BAD_DECISION;  // rows of one site disagree on its range
    if (i && d[i].occurrence == d[i - 1].occurrence) return TABLE_DUPLICATE;
    if (d[i].occurrence == LAGOM_ANY_OCCURRENCE) any = pack(&d[i]);
    else num_rows = d[i].occurrence + 1;
  }
  if (num_rows > LAGOM_MAX_ROWS - used) return TABLE_BAD_DECISION;  // occurrences too far apart
  for (uint32_t n = 0; n < num_rows; n++) STORE(t->rows[used + n], 0);
  for (uint32_t i = 0; i < count; i++) {
    if (d[i].occurrence != LAGOM_ANY_OCCURRENCE) STORE(t->rows[used + d[i].occurrence], pack(&d[i]));
  }
  STORE(s->last_bytes, d[0].last_bytes);
  STORE(s->first_row, used);
  STORE(s->num_rows, num_rows);
  STORE(s->any, any);
  return TABLE_OK;
}

// Fills a table that no one decides by, from rows in the order of `by_site`.
static enum table_error fill(table* t, const lagom_decision* rows, uint32_t count) {
  uint32_t num_sites = 0, used = 0;
  STORE(t->num_sites, 0);
  for (uint32_t i = 0, n; i < count; i += n) {
    const lagom_decision* d = &rows[i];
    const uint64_t key = site_key(d->communicator, d->kind, d->first_bytes);
    for (n = 1; i + n < count; n++) {
      if (site_key(d[n].communicator, d[n].kind, d[n].first_bytes) != key) break;
    }
    const bool is_of_same_kind = i && d[-1].communicator == d->communicator && d[-1].kind == d->kind;
    if (is_of_same_kind && d[-1].last_bytes >= d->first_bytes) return TABLE_DUPLICATE;
    site* s = &t->sites[num_sites];
    enum table_error error = fill_site(t, s, d, n, used);
    if (error) return error;
    STORE(t->keys[num_sites], key);
    used += LOAD(s->num_rows);
    num_sites++;
  }
  STORE(t->num_sites, num_sites);
  return TABLE_OK;
}

// ------------------------------------------------------------------------------------------------------ communicators

// Where a decision came from: for the record only.
typedef struct {
  uint64_t generation;
  uint32_t communicator;
} origin;

// The fields of a word; a word, not a struct, goes from hand to hand, because copies of just written structs stall.
static int algorithm_of(uint64_t word) { return word ? (int)(word >> WORD_ALGORITHM & 0xF) - 1 : -1; }
static int protocol_of(uint64_t word) { return word ? (int)(word >> WORD_PROTOCOL & 0x7) - 1 : -1; }
static int channels_of(uint64_t word) { return (int)(word >> WORD_CHANNELS & 0xFF); }
static size_t chunk_of(uint64_t word) { return (size_t)(word >> WORD_CHUNK); }

typedef struct {
  uint64_t key;  // bytes and kind, 0: free
  uint32_t step;
  uint32_t count;
} counter;

// A call that was asked about but not yet seen launched (v6 on).
typedef struct {
  uint64_t num_bytes;
  int kind;
  int counter;
  uint32_t earlier;  // calls of the same site asked about before it in this batch
  bool launched;
  uint64_t applied;  // the decision's word, 0: none, or not on offer
} pending_call;

typedef struct context {
  struct context* next;
  uint64_t comm_id;
  size_t num_ranks;
  size_t num_nodes;
  uint32_t order_in_ranks;  // among communicators of this process with the same number of ranks
  uint32_t order_in_nodes;  // ... and of nodes
  int version;
  void* chained;            // the chained tuner's context
  bool is_chained;
  _Atomic int32_t communicator[2];  // index in each table buffer
  uint32_t num_counters;
  // v6 on: the batch of calls between two launches
  uint32_t num_pending;
  uint32_t batch_step;
  bool is_launching;
  bool is_overfull;
  pending_call pending[MAX_PENDING];
  // v2: what is left of the aggregate that was asked about last
  size_t members_bytes;
  int members_kind;
  uint64_t members_applied;
  _Alignas(64) counter counters[NUM_COUNTERS];
} context;

static context* contexts;  // under swap_lock

static int32_t find_communicator(const table* t, const context* c) {
  int32_t by_ranks = NO_COMMUNICATOR;
  for (uint32_t i = 0; i < t->num_communicators; i++) {
    const lagom_communicator* k = &t->communicators[i];
    if (k->num_ranks != c->num_ranks) continue;
    if (k->num_nodes == c->num_nodes && k->creation_order == c->order_in_nodes) return (int32_t)i;
    if (k->num_nodes == 0 && k->creation_order == c->order_in_ranks) by_ranks = (int32_t)i;
  }
  return by_ranks;
}

// ------------------------------------------------------------------------------------------------- process-wide start

static lagom_ring record;
static bool is_started;
static char table_path[MAX_PATH];
static uint64_t next_own_id = 1;

#define LOG(log, level, ...)                                                                               \
  do {                                                                                                     \
    if (log) log(level, NCCL_SUBSYSTEM_INIT | NCCL_SUBSYSTEM_TUNING, "lagom_tuner", __LINE__, __VA_ARGS__); \
  } while (0)

// Fills the buffer that is not decided by: all of a switch that can fail.
static enum table_error prepare_locked(const uint8_t* data, size_t size, uint64_t generation) {
  prepared = 0;
  enum table_error error = check_table(data, size);
  if (error) return error;
  lagom_table_header h;
  memcpy(&h, data, sizeof(h));
  if (generation && h.generation != generation) return TABLE_WRONG_GENERATION;
  const size_t num_row_bytes = (size_t)h.num_decisions * sizeof(lagom_decision);
  lagom_decision* rows = malloc(num_row_bytes + 1);
  if (!rows) return TABLE_NO_MEMORY;
  memcpy(rows, data + size - num_row_bytes, num_row_bytes);
  qsort(rows, h.num_decisions, sizeof(*rows), by_site);

  uint32_t now = LOAD(active);
  uint32_t index = now == 1 ? 1 : 0;
  table* t = &tables[index];
  uint32_t sequence = LOAD(t->sequence);
  STORE(t->sequence, sequence + 1);
  atomic_thread_fence(memory_order_release);
  STORE(t->generation, h.generation);
  error = fill(t, rows, h.num_decisions);
  free(rows);
  t->num_communicators = error ? 0 : h.num_communicators;
  memcpy(t->communicators, data + sizeof(h), (size_t)t->num_communicators * sizeof(lagom_communicator));
  for (uint32_t i = 0; i < t->num_communicators; i++) STORE(t->max_channels[i], t->communicators[i].max_channels);
  for (context* c = contexts; c; c = c->next) STORE(c->communicator[index], find_communicator(t, c));
  atomic_store_explicit(&t->sequence, sequence + 2, memory_order_release);
  if (!error) prepared = index + 1;
  return error;
}

static enum table_error commit_locked(uint64_t generation) {
  if (!prepared) return TABLE_NOT_PREPARED;
  if (generation && LOAD(tables[prepared - 1].generation) != generation) return TABLE_WRONG_GENERATION;
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
                      LAGOM_MAX_DECISIONS * sizeof(lagom_decision);
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

static COLD void start_record(nccl_logger log) {
  const char* pattern = getenv("LAGOM_RECORD");
  if (!pattern || !*pattern) return;
  char path[MAX_PATH];
  if (ring_create(&record, pattern, getenv("LAGOM_RECORD_ENTRIES"), LAGOM_RECORD_MAGIC, LAGOM_RECORD_VERSION,
                  sizeof(lagom_record_entry), path)) {
    LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: recording to %s", path);
  } else {
    LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: cannot create the record %s; nothing is recorded", pattern);
  }
}

static COLD void start_locked(void) {
  if (is_started) return;
  is_started = true;
  crc_prepare();
  const char* off = getenv("LAGOM_DISABLE");
  if (off && *off && strcmp(off, "0") != 0) STORE(disabled, 1);
  const char* pattern = getenv("LAGOM_TABLE");
  if (pattern && *pattern && !expand_path(pattern, table_path)) table_path[0] = 0;
}

static COLD void load_first_table(nccl_logger log) {
  if (!table_path[0] || LOAD(active)) return;
  enum table_error error = load_locked(0);
  if (error) {
    LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: table %s refused: it %s; nothing is tuned", table_path,
        TABLE_ERROR_TEXT[error]);
    return;
  }
  table* t = &tables[LOAD(active) - 1];
  LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: table %s, generation %llu%s", table_path, (unsigned long long)t->generation,
      LOAD(disabled) ? ", disabled" : "");
}

static void record_entry(const lagom_record_entry* entry) {
  if (record.header) ring_append(&record, entry, sizeof(*entry));
}
_Static_assert(sizeof(lagom_record_entry) % 8 == 0 && offsetof(lagom_record_entry, sequence) == 0, "word copies");

// ------------------------------------------------------------------------------------------------- the chained tuner

// The tuner that answers where the table has no decision. As NCCL does, the newest version it exports that is not newer
// than the host's is used, and translated.
typedef struct {
  int version;  // 0: none
  const void* tuner;
} chain_link;

static chain_link chain;
static const void* const OWN_TUNERS[8];

static bool take_chain(nccl_logger log, void* library, const char* name, int host_version) {
  if (!library) return false;
  for (int version = host_version; version >= 2; version--) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", version);
    const void* tuner = dlsym(library, symbol);
    if (!tuner) continue;
    if (tuner == OWN_TUNERS[version]) break;
    chain = (chain_link){.version = version, .tuner = tuner};
    LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: calls without a decision go to %s (v%d)", name, version);
    return true;  // the library stays open: its code runs until the process ends
  }
  dlclose(library);
  return false;
}

static bool open_chain(nccl_logger log, const char* name, const char* prefix, int host_version) {
  char path[MAX_PATH];
  if (!strcmp(name, "STATIC_PLUGIN")) return take_chain(log, dlopen(NULL, RTLD_NOW), name, host_version);
  if (take_chain(log, dlopen(name, RTLD_NOW | RTLD_LOCAL), name, host_version)) return true;
  if (strchr(name, '/') || snprintf(path, sizeof(path), "%s-%s.so", prefix, name) >= (int)sizeof(path)) return false;
  return take_chain(log, dlopen(path, RTLD_NOW | RTLD_LOCAL), path, host_version);
}

// The tuner that a network plug-in brings (AWS's, for one). NCCL_NET_PLUGIN may be a list, of which NCCL takes the first
// that fits the machine; the first that brings a tuner is taken here.
static bool open_net_chain(nccl_logger log, int host_version) {
  const char* net = getenv("NCCL_NET_PLUGIN");
  char list[MAX_PATH];
  char* rest = NULL;
  if (net && !strcasecmp(net, "none")) return false;
  if (snprintf(list, sizeof(list), "%s", net && *net ? net : "libnccl-net.so") >= (int)sizeof(list)) {
    LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: NCCL_NET_PLUGIN is too long; no tuner is looked for in it");
    return false;
  }
  for (char* name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
    if (open_chain(log, name, "libnccl-net", host_version)) return true;
  }
  return false;
}

static COLD void start_chain(nccl_logger log, int host_version) {
  const char* name = getenv("LAGOM_CHAIN_TUNER");
  if (name && !strcasecmp(name, "none")) return;
  if (name && *name) {
    if (!open_chain(log, name, "libnccl-tuner", host_version)) {
      LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: LAGOM_CHAIN_TUNER %s has no tuner that fits; NCCL decides", name);
    }
    return;
  }
  if (open_chain(log, "libnccl-tuner.so", "libnccl-tuner", host_version)) return;
  if (open_net_chain(log, host_version)) return;
  LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: no other tuner is installed; calls without a decision are NCCL's");
}

static void to_v5_constants(const nccl_constants_v7* from, nccl_constants_v5* to) {
  memcpy(to->base_latencies, from->base_latencies, sizeof(to->base_latencies));
  memcpy(to->link_latencies, from->link_latencies, sizeof(to->link_latencies));
  for (int i = 0; i < 5; i++) memcpy(to->bandwidths[i], from->bandwidths[i], sizeof(to->bandwidths[i]));
}

static void to_v7_constants(const nccl_constants_v5* from, nccl_constants_v7* to) {
  memcpy(to->base_latencies, from->base_latencies, sizeof(to->base_latencies));
  memcpy(to->link_latencies, from->link_latencies, sizeof(to->link_latencies));
  for (int i = 0; i < 5; i++) memcpy(to->bandwidths[i], from->bandwidths[i], sizeof(from->bandwidths[i]));
}

static COLD void init_chained(context* c, nccl_logger log, nccl_nvlink_domains* domains, void* constants) {
  nccl_result result = NCCL_SUCCESS;
  if (chain.version == 0) return;
  if (chain.version <= 4) {  // v2, v3 and v4 share init
    result = ((const nccl_tuner_v2*)chain.tuner)->init(c->num_ranks, c->num_nodes, log, &c->chained);
  } else if (chain.version == 7 || c->version < 7) {  // the same constants on both sides
    result = ((const nccl_tuner_v5*)chain.tuner)
                 ->init(&c->chained, c->comm_id, c->num_ranks, c->num_nodes, log, domains, constants);
  } else {
    nccl_constants_v5 narrow;
    if (constants) to_v5_constants(constants, &narrow);
    result = ((const nccl_tuner_v5*)chain.tuner)
                 ->init(&c->chained, c->comm_id, c->num_ranks, c->num_nodes, log, domains, constants ? &narrow : NULL);
    if (constants && result == NCCL_SUCCESS) to_v7_constants(&narrow, constants);
  }
  c->is_chained = result == NCCL_SUCCESS;
  if (!c->is_chained) LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: the chained tuner failed to start (%d); left out", result);
}

static void finalize_chained(context* c) {
  if (!c->is_chained) return;
  switch (chain.version) {
    case 2: ((const nccl_tuner_v2*)chain.tuner)->destroy(c->chained); break;
    case 3: ((const nccl_tuner_v3*)chain.tuner)->destroy(c->chained); break;
    case 4: ((const nccl_tuner_v4*)chain.tuner)->destroy(c->chained); break;
    default: ((const nccl_tuner_v5*)chain.tuner)->finalize(c->chained);
  }
}

// --------------------------------------------------------------------------------------------------- the decision path

// What NCCL asks, in the form common to v2 to v7. `cost` is NULL and `algorithm`, `protocol` are set for v2 only.
typedef struct {
  int kind;
  size_t num_bytes;
  int num_pipe_ops;
  float* cost;
  int num_algorithms;
  int num_protocols;
  int registered;
  bool collnet_support;
  bool nvls_support;
  int* algorithm;
  int* protocol;
  int* num_channels;
} question;

static void ask_chained_v2(context* c, const question* q) {
  const nccl_tuner_v2* t = chain.tuner;
  if (!q->cost) {
    t->get_coll_info(c->chained, q->kind, q->num_bytes, q->collnet_support, q->nvls_support, q->num_pipe_ops,
                     q->algorithm, q->protocol, q->num_channels);
    return;
  }
  int a = -1, p = -1;
  const int np = q->num_protocols;
  if (q->num_algorithms < 6 || np < 3) return;
  bool nvls = q->cost[NCCL_NVLS * np + NCCL_SIMPLE] >= 0 || q->cost[NCCL_NVLS_TREE * np + NCCL_SIMPLE] >= 0;
  bool collnet = q->cost[NCCL_COLLNET_CHAIN * np + NCCL_SIMPLE] >= 0;
  t->get_coll_info(c->chained, q->kind, q->num_bytes, collnet, nvls, q->num_pipe_ops, &a, &p, q->num_channels);
  if (a >= 0 && a < q->num_algorithms && p >= 0 && p < np && q->cost[a * np + p] >= 0) q->cost[a * np + p] = 0;
}

static void ask_chained(context* c, const question* q) {
  float** table = (float**)(void*)q->cost;
  switch (chain.version) {
    case 2:
      ask_chained_v2(c, q);
      return;
    case 3:
      ((const nccl_tuner_v3*)chain.tuner)
          ->get_coll_info(c->chained, q->kind, q->num_bytes, q->num_pipe_ops, table, q->num_algorithms,
                          q->num_protocols, q->num_channels);
      return;
    default:  // v4 to v7 share the call and its place
      ((const nccl_tuner_v5*)chain.tuner)
          ->get_coll_info(c->chained, q->kind, q->num_bytes, q->num_pipe_ops, table, q->num_algorithms,
                          q->num_protocols, q->registered, q->num_channels);
  }
}
#define SAME_PLACE(a, b, field) _Static_assert(offsetof(a, field) == offsetof(b, field), #field " moved")
SAME_PLACE(nccl_tuner_v4, nccl_tuner_v5, get_coll_info);
SAME_PLACE(nccl_tuner_v6, nccl_tuner_v5, get_coll_info);
SAME_PLACE(nccl_tuner_v7, nccl_tuner_v5, get_coll_info);
SAME_PLACE(nccl_tuner_v6, nccl_tuner_v5, finalize);
SAME_PLACE(nccl_tuner_v7, nccl_tuner_v5, finalize);
SAME_PLACE(nccl_tuner_v7, nccl_tuner_v6, get_chunk_size);
SAME_PLACE(nccl_tuner_v3, nccl_tuner_v2, init);
SAME_PLACE(nccl_tuner_v4, nccl_tuner_v2, init);
_Static_assert(sizeof(nccl_tuner_v5) == 4 * sizeof(void*) && sizeof(nccl_tuner_v6) == 5 * sizeof(void*), "tuner");
_Static_assert(sizeof(nccl_constants_v5) == 8 * (21 + 63 + 60), "constants v5");
_Static_assert(sizeof(nccl_constants_v7) == 8 * (21 + 63 + 75), "constants v7");

// Without step marks nothing tells where a step begins: one call too many, of an evaluation say, would shift every later
// decision for good. So the row for every call decides until the first mark, and for calls beyond the last occurrence.
static uint64_t word_of(table* t, const site* s, int64_t occurrence) {
  const uint32_t num_rows = LOAD(s->num_rows), first_row = LOAD(s->first_row);
  LAGOM_BETWEEN_READS();
  const bool is_own = occurrence >= 0 && occurrence < num_rows && LOAD(current_step) > 0;
  const uint64_t word = is_own ? LOAD(t->rows[(first_row + (uint32_t)occurrence) & (LAGOM_MAX_ROWS - 1)]) : LOAD(s->any);
  return word == NOTHING_SET ? 0 : word;
}

// Channels within the communicator's own. NCCL 2.29 and 2.30 ask for grouped broadcasts of several roots (an uneven
// all-gather) as for an all-gather, which nothing tells apart, and index their channels by the answer without a cap: there
// an all-gather is left NCCL's channels unless the communicator's are known.
static uint64_t limited(uint64_t word, uint32_t kind, uint32_t most) {
  const uint64_t wanted = (uint64_t)channels_of(word);
  uint64_t allowed = most && wanted > most ? most : wanted;
  if (!most && kind == NCCL_ALL_GATHER && gathers_are_uncapped) allowed = 0;
  return word ^ (wanted ^ allowed) << WORD_CHANNELS;
}

// The word for the `occurrence`-th call of its site in the step, 0: none. Retries when a swap was under way.
static uint64_t look_up(context* c, uint32_t kind, uint64_t num_bytes, int64_t occurrence, int32_t hint, origin* from) {
  from->generation = 0;
  from->communicator = (uint32_t)NO_COMMUNICATOR;
  for (int attempt = 0; attempt < MAX_TRIES; attempt++) {
    uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
    if (now == 0 || LOAD(disabled)) return 0;
    table* t = &tables[(now - 1) & 1];
    uint32_t sequence = atomic_load_explicit(&t->sequence, memory_order_acquire);
    if (sequence & 1) continue;
    from->generation = LOAD(t->generation);
    int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
    from->communicator = (uint32_t)communicator;
    uint64_t word = 0;
    uint32_t most = 0;
    if (communicator >= 0) {
      int32_t place = find_site(t, (uint32_t)communicator, kind, num_bytes, hint);
      if (place >= 0) word = word_of(t, &t->sites[place & (LAGOM_MAX_DECISIONS - 1)], occurrence);
      most = LOAD(t->max_channels[communicator & (LAGOM_MAX_COMMUNICATORS - 1)]);
    }
    atomic_thread_fence(memory_order_acquire);
    if (LOAD(t->sequence) != sequence) continue;
    if (word) word = limited(word, kind, most);
    return word == NOTHING_SET ? 0 : word;  // nothing of it is left: a chained tuner is asked
  }
  from->generation = 0;
  return 0;
}

// What a call is counted under: the first bytes of its site, or its own where it has none; `place` is the site's, or -1.
// Between steps, when tables are swapped, nothing is counted, so a swap between this and the look-up does no harm.
static uint64_t counted_as(context* c, uint32_t kind, uint64_t num_bytes, int32_t* place) {
  const uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
  *place = -1;
  if (now == 0 || LOAD(disabled)) return num_bytes;
  table* t = &tables[(now - 1) & 1];
  const int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
  if (communicator >= 0) *place = find_site(t, (uint32_t)communicator, kind, num_bytes, -1);
  return *place < 0 ? num_bytes : bytes_of_key(LOAD(t->keys[*place & (LAGOM_MAX_DECISIONS - 1)]));
}

// The counter of a call site, started anew when the step has changed; -1 when the communicator has too many.
static int counter_of(context* c, uint32_t kind, uint64_t num_bytes, uint32_t step) {
  if (num_bytes > LAGOM_MAX_BYTES) return -1;
  const uint64_t key = num_bytes << 3 | kind;
  uint32_t i = hash_of(kind, num_bytes);
  for (uint32_t n = 0; n < NUM_COUNTERS; n++, i++) {
    counter* k = &c->counters[i & (NUM_COUNTERS - 1)];
    if (k->key == 0) {
      if (c->num_counters >= MAX_COUNTERS_USED) return -1;
      c->num_counters++;
      *k = (counter){.key = key, .step = step};
    } else if (k->key != key) {
      continue;
    }
    if (k->step != step) {
      k->step = step;
      k->count = 0;
    }
    return (int)(i & (NUM_COUNTERS - 1));
  }
  return -1;
}

// Counts the calls of the last batch that were seen launched, and forgets the others: queries and simulations.
static void settle_batch(context* c, uint32_t step) {
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (!p->launched || p->counter < 0) continue;
    c->counters[p->counter & (NUM_COUNTERS - 1)].count++;
  }
  c->num_pending = 0;
  c->batch_step = step;
  c->is_launching = false;
  c->is_overfull = false;
}

static pending_call* pending_of(context* c, const question* q, uint64_t counted, uint32_t step) {
  if (c->is_launching || c->batch_step != step) settle_batch(c, step);
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (p->num_bytes == q->num_bytes && p->kind == q->kind) return p;
  }
  if (c->num_pending >= MAX_PENDING) {
    c->is_overfull = true;
    return NULL;
  }
  pending_call* p = &c->pending[c->num_pending++ & (MAX_PENDING - 1)];
  p->num_bytes = q->num_bytes;
  p->kind = q->kind;
  p->launched = false;
  p->applied = 0;
  p->counter = counter_of(c, (uint32_t)q->kind, counted, step);
  p->earlier = 0;
  for (uint32_t i = 0; i + 1 < c->num_pending; i++) p->earlier += c->pending[i & (MAX_PENDING - 1)].counter == p->counter;
  return p;
}

static bool is_unclamped(int algorithm, size_t num_nodes) {
  // NCCL does not cap the channels of these; a number above the communicator's own would crash.
  return algorithm == NCCL_COLLNET_DIRECT || algorithm == NCCL_COLLNET_CHAIN || (algorithm == NCCL_NVLS && num_nodes > 1);
}

static bool has_unclamped_minimum(const question* q, size_t num_nodes) {
  float least = DISABLED;
  bool unclamped = false;
  const float* cost = q->cost;
  for (int a = 0; a < q->num_algorithms; a++) {
    const bool risky = is_unclamped(a, num_nodes);
    for (int p = 0; p < q->num_protocols; p++, cost++) {
      if (!(*cost >= 0) || *cost > least) continue;
      unclamped = *cost < least ? risky : unclamped || risky;
      least = *cost;
    }
  }
  return unclamped;
}

// NCCL 2.21 takes algorithm and protocol unchecked, so only what is known to be available is written.
static bool is_safe_in_v2(int algorithm, int protocol, const question* q, size_t num_nodes) {
  if (algorithm < 0 && protocol < 0) return true;
  if (protocol == NCCL_LL128) return false;  // off where NVLink is missing; nobody tells
  if (algorithm == NCCL_RING) return protocol >= 0;
  if (q->kind != NCCL_ALL_REDUCE) return false;
  if (algorithm == NCCL_TREE) return protocol >= 0;
  if (protocol != NCCL_SIMPLE) return false;
  switch (algorithm) {
    case NCCL_COLLNET_DIRECT:
    case NCCL_COLLNET_CHAIN: return q->collnet_support && num_nodes > 1;
    case NCCL_NVLS: return q->nvls_support && (num_nodes == 1 || q->collnet_support);
    case NCCL_NVLS_TREE: return q->nvls_support && num_nodes > 1;
    default: return false;  // one of the two alone, or an algorithm that 2.21 lacks
  }
}

static bool apply_v2(const context* c, uint64_t word, const question* q) {
  const int algorithm = algorithm_of(word), protocol = protocol_of(word);
  if (!is_safe_in_v2(algorithm, protocol, q, c->num_nodes)) return false;
  if (algorithm >= 0) {
    *q->algorithm = algorithm;
    *q->protocol = protocol;
  }
  bool unclamped = algorithm >= 0 ? is_unclamped(algorithm, c->num_nodes) : q->collnet_support;
  if (channels_of(word) > 0 && !unclamped) *q->num_channels = channels_of(word);
  return true;
}

// 0 selects if it is the only one: ties go to the lowest entry up to 2.30, to the highest from 2.31 on. What is
// unavailable stays at -1: lowering it would crash, and writing -1 elsewhere selects from 2.31 on.
static bool select_entry(int algorithm, int protocol, const question* q) {
  if (algorithm >= q->num_algorithms || protocol >= q->num_protocols) return false;
  float* cost = q->cost;
  const int count = q->num_algorithms * q->num_protocols, wanted = algorithm * q->num_protocols + protocol;
  if (!(cost[wanted] >= 0)) return false;
  int num_free = 0;
  for (int i = 0; i < count; i++) num_free += cost[i] == 0;
  if (num_free) {
    for (int i = 0; i < count; i++) cost[i] = cost[i] == 0 ? DISABLED : cost[i];
  }
  cost[wanted] = 0;
  return true;
}

// One of the two alone: all others are made too dear, and NCCL picks the cheapest of those left.
static bool restrict_entries(int algorithm, int protocol, const question* q) {
  bool is_offered = false;
  for (int pass = 0; pass < 2; pass++) {
    float* cost = q->cost;
    for (int a = 0; a < q->num_algorithms; a++) {
      for (int p = 0; p < q->num_protocols; p++, cost++) {
        if (!(*cost >= 0)) continue;
        const bool is_wanted = a == algorithm || p == protocol;
        if (pass == 0) is_offered = is_offered || is_wanted;
        else if (!is_wanted) *cost = DISABLED;
      }
    }
    if (!is_offered) return false;
  }
  return true;
}

// Writes a decision into the cost table; all of it or, where NCCL does not offer what it asks for, nothing.
static bool apply_to_costs(const context* c, uint64_t word, const question* q) {
  const int algorithm = algorithm_of(word), protocol = protocol_of(word);
  if (algorithm >= 0 && protocol >= 0) {
    if (!select_entry(algorithm, protocol, q)) return false;
  } else if (algorithm >= 0 || protocol >= 0) {
    if (!restrict_entries(algorithm, protocol, q)) return false;
  }
  if (channels_of(word) > 0) {
    bool unclamped = algorithm >= 0 ? is_unclamped(algorithm, c->num_nodes) : has_unclamped_minimum(q, c->num_nodes);
    if (!unclamped) *q->num_channels = channels_of(word);
  }
  return true;
}

static bool apply(const context* c, uint64_t word, const question* q) {
  return q->cost ? apply_to_costs(c, word, q) : apply_v2(c, word, q);
}

// Whether NCCL asks without a call behind it: 2.31's symmetric query, or nothing on offer.
static bool is_query(const question* q) {
  if (q->num_pipe_ops <= 0 || q->kind < 0 || q->kind >= NCCL_NUM_KINDS || q->num_bytes == 0) return true;
  if (!q->cost) return false;
  const float* cost = q->cost;
  const int count = q->num_algorithms * q->num_protocols;
  for (int i = 0; i < count; i++) {
    if (cost[i] >= 0) return false;
  }
  return true;
}

// 2.21 asks once for the aggregate of a group of equal collectives, then once for each member, also for a group of one.
// The member calls repeat the aggregate's decision and are not counted.
static bool is_member_call(context* c, const question* q) {
  if (q->kind != c->members_kind || q->num_bytes > c->members_bytes) {
    c->members_bytes = 0;
    return false;
  }
  c->members_bytes -= q->num_bytes;
  return true;
}

static COLD void record_decision(const context* c, const question* q, uint64_t word, const origin* from,
                                 const float* offered, uint32_t step, int64_t occurrence, uint32_t flags) {
  lagom_record_entry e = {
      .comm_id = c->comm_id,
      .num_bytes = q->num_bytes,
      .generation = from->generation,
      .step = step,
      .occurrence = occurrence < 0 ? LAGOM_ANY_OCCURRENCE : (uint32_t)occurrence,
      .communicator = from->communicator,
      .event = LAGOM_EVENT_DECISION,
      .kind = (uint32_t)q->kind,
      .flags = flags,
      .abi_version = (uint32_t)c->version,
      .num_pipe_ops = q->num_pipe_ops,
      .registered = q->cost ? q->registered : (q->collnet_support ? 1 : 0) | (q->nvls_support ? 2 : 0),
      .algorithm = algorithm_of(word),
      .protocol = protocol_of(word),
      .num_channels = *q->num_channels,
      .chunk_set = chunk_of(word),
  };
  memcpy(e.cost_us, offered, sizeof(e.cost_us));
  record_entry(&e);
}

static void keep_offer(const question* q, float* offered) {
  for (int i = 0; i < LAGOM_COST_ENTRIES; i++) {
    int a = i / NCCL_NUM_PROTOCOLS, p = i % NCCL_NUM_PROTOCOLS;
    bool has = q->cost && a < q->num_algorithms && p < q->num_protocols;
    offered[i] = has ? q->cost[a * q->num_protocols + p] : -1.0F;
  }
}

static void answer(context* c, const question* q) {
  if (!c || !q->num_channels) return;
  if (q->cost && (q->num_algorithms < 1 || q->num_algorithms > 32 || q->num_protocols < 1 || q->num_protocols > 8)) return;
  float offered[LAGOM_COST_ENTRIES];
  if (record.header) keep_offer(q, offered);
  const uint32_t step = LOAD(current_step), kind = (uint32_t)q->kind;
  origin from = {.communicator = (uint32_t)NO_COMMUNICATOR};
  uint64_t word = 0;
  int64_t occurrence = -1;
  uint32_t flags = 0;
  if (is_query(q)) {
    flags = LAGOM_FLAG_NOT_COUNTED;
  } else if (c->version == 2 && is_member_call(c, q)) {
    word = c->members_applied;
    flags = LAGOM_FLAG_NOT_COUNTED;
    if (word && apply_v2(c, word, q)) flags |= LAGOM_FLAG_MATCHED | LAGOM_FLAG_APPLIED;
  } else {
    int32_t place;
    const uint64_t counted = counted_as(c, kind, q->num_bytes, &place);
    pending_call* p = c->version >= 6 ? pending_of(c, q, counted, step) : NULL;
    int k = p ? p->counter : -1;
    if (c->version < 6) k = counter_of(c, kind, counted, step);
    if (k >= 0) occurrence = (int64_t)c->counters[k].count + (p ? p->earlier : 0);
    if (k >= 0 && c->version < 6) c->counters[k].count++;
    word = look_up(c, kind, q->num_bytes, occurrence, place, &from);
    if (word) flags = apply(c, word, q) ? LAGOM_FLAG_MATCHED | LAGOM_FLAG_APPLIED : LAGOM_FLAG_MATCHED;
    uint64_t applied = flags & LAGOM_FLAG_APPLIED ? word : 0;
    if (p) p->applied = applied;
    if (c->version == 2) {
      c->members_bytes = q->num_bytes;
      c->members_kind = q->kind;
      c->members_applied = applied;
    }
  }
  if (!(flags & LAGOM_FLAG_APPLIED) && c->is_chained) {
    ask_chained(c, q);
    flags |= LAGOM_FLAG_CHAINED;
  }
  if (record.header) record_decision(c, q, word, &from, offered, step, occurrence, flags);
}

// Chunk the decision asks for, made safe: a multiple of the protocol's grain, never below one, and for NVLS and CollNet
// never above NCCL's own (NVLS buffers hold nvlsChunkSize a step, which NCCL's clamp does not know).
static size_t safe_chunk(size_t wanted, size_t offered, int algorithm, int protocol) {
  bool may_raise = algorithm == NCCL_TREE || algorithm == NCCL_RING || algorithm == NCCL_PAT;
  size_t chunk = !may_raise && wanted > offered ? offered : wanted;
  size_t grain = grain_of(protocol);
  chunk -= chunk % grain;
  return chunk < grain ? grain : chunk;
}

typedef enum { CHUNK_OURS, CHUNK_UNCLEAR, CHUNK_NOT_OURS } chunk_owner;

// getChunkSize does not say which call it is about. It comes after the batch's getCollInfo calls, with the bytes of one
// channel, up to three times a call. Every pending call that it may be about is taken as launched; the chunk is ours if
// all of them agree on it.
static chunk_owner find_chunk(context* c, int kind, size_t num_bytes, int algorithm, int protocol, size_t* wanted) {
  chunk_owner owner = CHUNK_NOT_OURS;
  bool is_first = true;
  c->is_launching = true;
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    const uint64_t word = p->applied;
    if (p->kind != kind || p->num_bytes < num_bytes) continue;
    if (algorithm_of(word) >= 0 && algorithm_of(word) != algorithm) continue;
    if (protocol_of(word) >= 0 && protocol_of(word) != protocol) continue;
    p->launched = true;
    const chunk_owner mine = word ? CHUNK_OURS : CHUNK_NOT_OURS;
    if (is_first) {
      *wanted = chunk_of(word);
      owner = mine;
    } else if (owner != mine || *wanted != chunk_of(word)) {
      owner = CHUNK_UNCLEAR;
    }
    is_first = false;
  }
  return c->is_overfull && !is_first ? CHUNK_UNCLEAR : owner;
}

static nccl_result get_chunk_size(void* ctx, int kind, size_t num_bytes, int algorithm, int protocol, int num_channels,
                                  size_t* chunk_bytes) {
  context* c = ctx;
  if (!c || !chunk_bytes) return NCCL_SUCCESS;
  const size_t offered = *chunk_bytes;
  size_t wanted = 0;
  uint32_t flags = 0;
  chunk_owner owner = find_chunk(c, kind, num_bytes, algorithm, protocol, &wanted);
  if (owner == CHUNK_OURS) {
    flags = LAGOM_FLAG_MATCHED;
    if (wanted && protocol >= 0 && protocol < NCCL_NUM_PROTOCOLS) {
      *chunk_bytes = safe_chunk(wanted, offered, algorithm, protocol);
      flags |= LAGOM_FLAG_APPLIED;
    }
  } else if (owner == CHUNK_NOT_OURS && c->is_chained && chain.version >= 6) {
    const nccl_tuner_v6* t = chain.tuner;
    if (t->get_chunk_size) {
      t->get_chunk_size(c->chained, kind, num_bytes, algorithm, protocol, num_channels, chunk_bytes);
      flags = LAGOM_FLAG_CHAINED;
    }
  }
  if (record.header) {
    lagom_record_entry e = {
        .comm_id = c->comm_id,
        .num_bytes = num_bytes,
        .chunk_offered = offered,
        .chunk_set = *chunk_bytes,
        .step = LOAD(current_step),
        .occurrence = LAGOM_ANY_OCCURRENCE,
        .communicator = (uint32_t)NO_COMMUNICATOR,
        .event = LAGOM_EVENT_CHUNK,
        .kind = (uint32_t)kind,
        .flags = flags,
        .abi_version = (uint32_t)c->version,
        .algorithm = algorithm,
        .protocol = protocol,
        .num_channels = num_channels,
    };
    record_entry(&e);
  }
  return NCCL_SUCCESS;
}

// ------------------------------------------------------------------------------------------------- start and end of a
// communicator

// The release of the NCCL that calls us: that of the library which holds its logger. 0: it does not say.
static COLD int release_of_host(nccl_logger log) {
  Dl_info info;
  void* address;
  memcpy(&address, &log, sizeof(address));  // a function's address, as dladdr takes it
  if (!log || !dladdr(address, &info) || !info.dli_fname) return 0;
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return 0;
  int release = 0;
  nccl_result (*get_version)(int*) = NULL;
  void* symbol = dlsym(library, "ncclGetVersion");
  memcpy(&get_version, &symbol, sizeof(symbol));
  if (get_version && get_version(&release) != NCCL_SUCCESS) release = 0;
  dlclose(library);
  return release;
}

// AllGatherV came with 2.29 and takes the tuner's channels as they are; from 2.31 on a tuner can only lower them.
static bool is_uncapped(int release, int version) {
  return version >= 5 && version <= 6 && (release == 0 || (release >= 22900 && release < 23100));
}

// Places are given in the order of creation and never again: creation is the same on all ranks of a communicator, while
// each rank destroys in its own time (asynchronous reclaim, garbage collection), so a place that became free on one rank
// may still be taken on another.
typedef struct {
  size_t num_ranks;
  size_t num_nodes;
  uint32_t count;
} creation;

static creation creations[LAGOM_MAX_COMMUNICATORS];  // (ranks, nodes) -> communicators made; nodes 0: any
static uint32_t num_creations;

static uint32_t next_order(size_t num_ranks, size_t num_nodes) {
  uint32_t i = 0;
  while (i < num_creations && (creations[i].num_ranks != num_ranks || creations[i].num_nodes != num_nodes)) i++;
  if (i == LAGOM_MAX_COMMUNICATORS) return UINT32_MAX;  // beyond what a table can name
  if (i == num_creations) creations[num_creations++] = (creation){.num_ranks = num_ranks, .num_nodes = num_nodes};
  return creations[i].count++;
}

// Ranks of one communicator in one process (one thread, several GPUs) are the same communicator: from v5 on they share
// the id.
static void place_in_order(context* c) {
  size_t num_members = 0;
  context* first = NULL;
  for (context* other = contexts; c->version >= 5 && other; other = other->next) {
    if (other->version < 5 || other->comm_id != c->comm_id || other->num_ranks != c->num_ranks) continue;
    first = other;
    num_members++;
  }
  if (first && num_members < c->num_ranks) {
    c->order_in_ranks = first->order_in_ranks;
    c->order_in_nodes = first->order_in_nodes;
    return;
  }
  c->order_in_ranks = next_order(c->num_ranks, 0);
  c->order_in_nodes = next_order(c->num_ranks, c->num_nodes);
}

static COLD nccl_result start(void** out, int version, uint64_t comm_id, size_t num_ranks, size_t num_nodes,
                              nccl_logger log, nccl_nvlink_domains* domains, void* constants) {
  static bool is_opened;
  if (!out) return NCCL_SUCCESS;
  context* c = aligned_alloc(64, sizeof(*c));
  *out = c;
  if (!c) return NCCL_SUCCESS;
  memset(c, 0, sizeof(*c));
  c->version = version;
  c->num_ranks = num_ranks;
  c->num_nodes = num_nodes;
  pthread_mutex_lock(&swap_lock);
  start_locked();
  if (!is_opened) {
    is_opened = true;
    load_first_table(log);
    start_record(log);
    start_chain(log, version);
    gathers_are_uncapped = is_uncapped(release_of_host(log), version);
  }
  c->comm_id = version >= 5 ? comm_id : next_own_id++;
  place_in_order(c);
  for (int i = 0; i < 2; i++) STORE(c->communicator[i], find_communicator(&tables[i], c));
  c->next = contexts;
  contexts = c;
  uint32_t now = LOAD(active);
  int32_t communicator = now ? LOAD(c->communicator[now - 1]) : NO_COMMUNICATOR;
  LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: communicator of %zu ranks on %zu nodes, number %u of its kind: %s", num_ranks,
      num_nodes, c->order_in_nodes, communicator < 0 ? "not in the table" : tables[now - 1].communicators[communicator].description);
  lagom_record_entry e = {.comm_id = c->comm_id, .num_bytes = num_ranks, .event = LAGOM_EVENT_INIT,
                          .occurrence = c->order_in_nodes, .communicator = (uint32_t)communicator,
                          .abi_version = (uint32_t)version, .num_pipe_ops = (int)num_nodes,
                          .step = LOAD(current_step), .algorithm = -1, .protocol = -1};
  record_entry(&e);
  pthread_mutex_unlock(&swap_lock);
  init_chained(c, log, domains, constants);
  return NCCL_SUCCESS;
}

static COLD nccl_result finish(void* ctx) {
  context* c = ctx;
  if (!c) return NCCL_SUCCESS;
  finalize_chained(c);
  pthread_mutex_lock(&swap_lock);
  for (context** link = &contexts; *link; link = &(*link)->next) {
    if (*link == c) {
      *link = c->next;
      break;
    }
  }
  pthread_mutex_unlock(&swap_lock);
  free(c);
  return NCCL_SUCCESS;
}

// ---------------------------------------------------------------------------------------------- the six tuner versions

#define DEFINE_OLD_INIT(version)                                                                              \
  static nccl_result init_v##version(size_t num_ranks, size_t num_nodes, nccl_logger log, void** context_out) { \
    return start(context_out, version, 0, num_ranks, num_nodes, log, NULL, NULL);                             \
  }
DEFINE_OLD_INIT(2)
DEFINE_OLD_INIT(3)
DEFINE_OLD_INIT(4)

#define DEFINE_INIT(version, constants_type)                                                                   \
  static nccl_result init_v##version(void** context_out, uint64_t comm_id, size_t num_ranks, size_t num_nodes, \
                                     nccl_logger log, nccl_nvlink_domains* domains, constants_type* constants) { \
    return start(context_out, version, comm_id, num_ranks, num_nodes, log, domains, constants);                \
  }
DEFINE_INIT(5, nccl_constants_v5)
DEFINE_INIT(6, nccl_constants_v5)
DEFINE_INIT(7, nccl_constants_v7)

static nccl_result get_coll_info_v2(void* ctx, int kind, size_t num_bytes, int collnet_support, int nvls_support,
                                    int num_pipe_ops, int* algorithm, int* protocol, int* num_channels) {
  if (!algorithm || !protocol) return NCCL_SUCCESS;
  question q = {.kind = kind, .num_bytes = num_bytes, .num_pipe_ops = num_pipe_ops, .num_channels = num_channels,
                .collnet_support = collnet_support, .nvls_support = nvls_support, .algorithm = algorithm,
                .protocol = protocol};
  answer(ctx, &q);
  return NCCL_SUCCESS;
}

static nccl_result get_coll_info(void* ctx, int kind, size_t num_bytes, int num_pipe_ops, float** cost,
                                 int num_algorithms, int num_protocols, int registered, int* num_channels) {
  if (!cost) return NCCL_SUCCESS;
  question q = {.kind = kind, .num_bytes = num_bytes, .num_pipe_ops = num_pipe_ops, .cost = (float*)(void*)cost,
                .num_algorithms = num_algorithms, .num_protocols = num_protocols, .registered = registered,
                .num_channels = num_channels};
  answer(ctx, &q);
  return NCCL_SUCCESS;
}

static nccl_result get_coll_info_v3(void* ctx, int kind, size_t num_bytes, int num_pipe_ops, float** cost,
                                    int num_algorithms, int num_protocols, int* num_channels) {
  return get_coll_info(ctx, kind, num_bytes, num_pipe_ops, cost, num_algorithms, num_protocols, 0, num_channels);
}

#define NAME "lagom"
EXPORT const nccl_tuner_v2 ncclTunerPlugin_v2 = {NAME, init_v2, get_coll_info_v2, finish};
EXPORT const nccl_tuner_v3 ncclTunerPlugin_v3 = {NAME, init_v3, get_coll_info_v3, finish};
EXPORT const nccl_tuner_v4 ncclTunerPlugin_v4 = {NAME, init_v4, get_coll_info, finish};
EXPORT const nccl_tuner_v5 ncclTunerPlugin_v5 = {NAME, init_v5, get_coll_info, finish};
EXPORT const nccl_tuner_v6 ncclTunerPlugin_v6 = {NAME, init_v6, get_coll_info, finish, get_chunk_size};
EXPORT const nccl_tuner_v7 ncclTunerPlugin_v7 = {NAME, init_v7, get_coll_info, finish, get_chunk_size};
static const void* const OWN_TUNERS[8] = {NULL, NULL, &ncclTunerPlugin_v2, &ncclTunerPlugin_v3, &ncclTunerPlugin_v4,
                                          &ncclTunerPlugin_v5, &ncclTunerPlugin_v6, &ncclTunerPlugin_v7};

// ------------------------------------------------------------------------- what the training process calls, at a step

// Marks a step boundary: the next call of each kind and size is occurrence 0 again. Returns the new step's number.
EXPORT uint32_t lagom_step(void) { return atomic_fetch_add_explicit(&current_step, 1, memory_order_relaxed) + 1; }

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

EXPORT const char* lagom_error_text(int error) {
  return error >= 0 && error < NUM_TABLE_ERRORS ? TABLE_ERROR_TEXT[error] : "unknown error";
}

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
