// What the parts of the tuner plug-in share: the table in memory, a communicator's state, what NCCL asks.
//
// Memory: the table lives in two private buffers, each a seqlock, written only by a swap. The file is never mapped: one
// truncated by somebody else would kill the job with SIGBUS. All state of a communicator is plain, because NCCL never
// runs two calls on one communicator at once; indices are masked all the same. Everything here is hidden: the shared
// object exports the tuner's and the profiler's tables and the calls of `lagom_tuner_table.c`.
#ifndef LAGOM_TUNER_H
#define LAGOM_TUNER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lagom_capture.h"
#include "lagom_ring.h"
#include "lagom_table.h"
#include "nccl/nccl_tuner_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define COLD __attribute__((noinline, cold))
#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)

enum {
  MAX_PENDING = 32,
  MAX_TRIES = 64,
  NO_COMMUNICATOR = -1,
};
#define DISABLED 1e30F

#define LOG(log, level, ...)                                                                               \
  do {                                                                                                     \
    if (log) log(level, NCCL_SUBSYSTEM_INIT | NCCL_SUBSYSTEM_TUNING, "lagom_tuner", __LINE__, __VA_ARGS__); \
  } while (0)

// --------------------------------------------------------------------------------------------------- errors of a table

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
  TABLE_BAD_CYCLE,
  TABLE_DUPLICATE,
  TABLE_NO_MEMORY,
  TABLE_NOT_PREPARED,
  NUM_TABLE_ERRORS
};

// --------------------------------------------------------------------------------------------------- a table in memory

// The call sites in the order of their keys (communicator, kind, first bytes), found by bisection. The keys lie apart and
// close together, because the cost of a decision is its cache misses: 1,024 sites are 8 KiB.
typedef struct {
  _Atomic uint64_t last_bytes;
  _Atomic uint64_t any;          // for calls that take no place in a cycle; 0: none
  _Atomic uint32_t first_place;  // in `places`: where it stands in its communicator's cycle, ascending
  _Atomic uint32_t num_places;
} site;

// A place of a cycle: the site whose call stands there, and the word of its decision. A job that goes on as it did finds
// each call where the one before left off, without a search.
typedef struct {
  _Atomic uint64_t word;
  _Atomic uint32_t site;
  _Atomic uint32_t occurrence;
} cycle_place;

typedef struct {
  _Atomic uint64_t lease_calls;  // 0: for good
  _Atomic uint32_t max_channels;
  _Atomic uint32_t first_call;  // in `cycle`
  _Atomic uint32_t num_calls;   // 0: it has no cycle
} role;

// A decision in a word: chunk | channels, protocol + 1, algorithm + 1, "there is one". 0: none.
enum { NOTHING_SET = 1, WORD_ALGORITHM = 1, WORD_PROTOCOL = 5, WORD_CHANNELS = 8, WORD_CHUNK = 16 };

typedef struct {
  _Atomic uint32_t sequence;  // odd while being written; not the same for two tables that this buffer has held
  _Atomic uint32_t num_sites;
  _Atomic uint64_t generation;
  uint32_t num_communicators;  // these two: under `swap_lock` only
  lagom_communicator communicators[LAGOM_MAX_COMMUNICATORS];
  role roles[LAGOM_MAX_COMMUNICATORS];
  _Alignas(64) _Atomic uint64_t keys[LAGOM_MAX_DECISIONS];
  _Alignas(64) site sites[LAGOM_MAX_DECISIONS];
  _Alignas(64) cycle_place cycle[LAGOM_MAX_CALLS];
  _Atomic uint32_t places[LAGOM_MAX_CALLS];
} table;

// Below 2^62: 1,024 communicators, 8 kinds, 2^48 bytes and one more.
enum { KEY_KIND = 49, KEY_COMMUNICATOR = 52 };
_Static_assert(LAGOM_MAX_BYTES < 1ULL << KEY_KIND && LAGOM_MAX_COMMUNICATORS <= 1u << 10, "a key holds them");

static inline uint64_t site_key(uint32_t communicator, uint32_t kind, uint64_t num_bytes) {
  return (uint64_t)communicator << KEY_COMMUNICATOR | (uint64_t)(kind & 7) << KEY_KIND | num_bytes;
}

static inline uint64_t bytes_of_key(uint64_t key) { return key & ((1ULL << KEY_KIND) - 1); }

// The fields of a word; a word, not a struct, goes from hand to hand, because copies of just written structs stall.
static inline int algorithm_of(uint64_t word) { return word ? (int)(word >> WORD_ALGORITHM & 0xF) - 1 : -1; }
static inline int protocol_of(uint64_t word) { return word ? (int)(word >> WORD_PROTOCOL & 0x7) - 1 : -1; }
static inline int channels_of(uint64_t word) { return (int)(word >> WORD_CHANNELS & 0xFF); }
static inline size_t chunk_of(uint64_t word) { return (size_t)(word >> WORD_CHUNK); }

static inline size_t grain_of(int protocol) {
  return protocol == NCCL_LL ? NCCL_GRAIN_LL : protocol == NCCL_LL128 ? NCCL_GRAIN_LL128 : NCCL_GRAIN_SIMPLE;
}

// ------------------------------------------------------------------------------------------------------ a communicator

// How far a communicator's calls have come since a table came into force. Of a table with another sequence: not at all.
typedef struct {
  uint32_t sequence;   // the table's; 0: none
  uint32_t place;      // of its cycle, where the next call is looked for
  uint64_t num_calls;  // of LAGOM_LEAST_BYTES and more
} progress;

// A call that was asked about but not yet seen launched (v6 on).
typedef struct {
  uint64_t num_bytes;
  int kind;
  uint32_t buffer;  // of the table that it was asked about under
  progress before;  // what it found, if it and those before it in the batch are launched
  bool launched;
  uint64_t applied;  // the decision's word, 0: none, or not on offer
} pending_call;

// Which call a decision is wanted for.
typedef struct {
  uint32_t kind;
  uint64_t num_bytes;
  const pending_call* asked;  // NULL, or the same call, which may have been asked about before
  bool keeps_channels;        // NCCL might take more channels than the communicator has
} call_place;

// Where a decision came from: for the record, and to follow the communicator's calls.
typedef struct {
  uint64_t generation;
  uint32_t communicator;
  uint32_t occurrence;
  uint32_t buffer;
  progress before;  // sequence 0: there is no table
  progress after;
} origin;

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
  _Atomic uint64_t num_asked;       // calls, and those for which the table had a decision
  _Atomic uint64_t num_matched;
  _Atomic uint64_t num_large;       // calls of LAGOM_LEAST_BYTES and more, those asked about and not launched yet included
  progress ahead[2];                // under the table of each buffer, what is pending taken as launched
  progress launched[2];             // v6 on: what was
  // v6 on: the batch of calls between two launches
  uint32_t num_pending;
  bool is_launching;
  bool is_overfull;
  pending_call pending[MAX_PENDING];
  // v2: what is left of the aggregate that was asked about last
  size_t members_bytes;
  int members_kind;
  uint64_t members_applied;
} context;

// ------------------------------------------------------------------------------------------------------ what NCCL asks

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

// -------------------------------------------------------------------------------------------------------- shared state

extern table tables[2];
extern _Atomic uint32_t active;  // 0: no table, else 1 + index of the current one
extern _Atomic uint32_t disabled;
extern _Atomic uint32_t capturing;  // the job is capturing a CUDA graph
extern _Atomic uint32_t current_step;
extern _Atomic uint64_t num_captured;  // calls asked about during the capture, by any thread
extern pthread_mutex_t swap_lock;
extern context* contexts;           // under swap_lock
extern lagom_ring record;
extern const void* const OWN_TUNERS[8];

// Whether the table decides about this thread's latest call. What a graph captures stays for good, so a call that is
// captured never does, and while we know of a capture only calls do that are known to be outside: other ranks may make
// them before or after theirs.
static inline bool decides(void) {
  const enum lagom_call call = lagom_noted_call();
  return !LOAD(disabled) && call != LAGOM_CALL_CAPTURED && (!LOAD(capturing) || call == LAGOM_CALL_OUTSIDE);
}

// ----------------------------------------------------------------------------------------------------------- the parts

enum table_error check_table(const uint8_t* data, size_t size);
const char* table_error_text(enum table_error error);
void crc_prepare(void);

void start_locked(void);
void load_first_table(nccl_logger log);
int32_t find_communicator(const table* t, const context* c);

int32_t find_site(table* t, uint32_t communicator, uint32_t kind, uint64_t num_bytes, int32_t hint);
uint64_t look_up(context* c, const call_place* at, origin* from);
pending_call* pending_of(context* c, const question* q);
void follow(context* c, pending_call* p, const origin* from);

bool apply(const context* c, uint64_t word, const question* q);
bool apply_v2(const context* c, uint64_t word, const question* q);

void start_record(nccl_logger log);
void record_entry(const lagom_record_entry* entry);
void lagom_record_flush(void);
COLD void record_decision(const context* c, const question* q, uint64_t word, const origin* from, const float* offered,
                          uint32_t flags);
void keep_offer(const question* q, float* offered);

void start_chain(nccl_logger log, int host_version);
void init_chained(context* c, nccl_logger log, nccl_nvlink_domains* domains, void* constants);
void finalize_chained(context* c);
void ask_chained(context* c, const question* q);
// True where the chained tuner has been asked for a chunk.
bool ask_chained_chunk(context* c, int kind, size_t num_bytes, int algorithm, int protocol, int num_channels,
                       size_t* chunk_bytes);

#endif
