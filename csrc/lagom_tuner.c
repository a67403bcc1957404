// liblagom_tuner.so: NCCL tuner ABI v2 to v7 from one decision table.
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
// Here: communicators and the versions of the interface. The rest: lagom_tuner_*.c, with lagom_tuner.h between them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "lagom_tuner.h"

static uint64_t next_own_id = 1;  // under swap_lock, as are these
static uint64_t finished_asked, finished_matched, finished_large;  // of communicators that are gone
static bool gathers_are_uncapped;  // written once, before the first communicator is used

// --------------------------------------------------------------------------------------------------- the decision path

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

// NCCL 2.29 and 2.30 ask for grouped broadcasts of several roots (an uneven all-gather) as for one pipelined all-gather
// with neither NVLS nor CollNet on offer, and index their channels by the answer without a cap. What the communicator has
// nobody tells, and what another call of its role ran with, or ran with in an earlier job, is no limit of it. On one node
// NVLS is on offer for all gathers of a communicator or for none, so ranks agree on what this says.
static bool may_be_uneven_gather(const context* c, const question* q) {
  if (!gathers_are_uncapped || q->kind != NCCL_ALL_GATHER || !q->cost) return false;
  if (q->num_pipe_ops > 1) return false;
  const bool has_nvls = q->num_algorithms > NCCL_NVLS && q->num_protocols > NCCL_SIMPLE &&
                        q->cost[NCCL_NVLS * q->num_protocols + NCCL_SIMPLE] >= 0;
  return !(has_nvls && c->num_nodes == 1);
}

static void answer(context* c, const question* q) {
  if (!c || !q->num_channels) return;
  if (q->cost && (q->num_algorithms < 1 || q->num_algorithms > 32 || q->num_protocols < 1 || q->num_protocols > 8)) return;
  float offered[LAGOM_COST_ENTRIES];
  if (record.header) keep_offer(q, offered);
  origin from = {.communicator = (uint32_t)NO_COMMUNICATOR, .occurrence = LAGOM_ANY_OCCURRENCE};
  uint64_t word = 0;
  uint32_t flags = 0;
  if (is_query(q)) {
    flags = LAGOM_FLAG_NOT_COUNTED;
  } else if (c->version == 2 && is_member_call(c, q)) {
    word = c->members_applied;
    flags = LAGOM_FLAG_NOT_COUNTED;
    if (word && apply_v2(c, word, q)) flags |= LAGOM_FLAG_MATCHED | LAGOM_FLAG_APPLIED;
  } else {
    if (LOAD(capturing) && !decides()) atomic_fetch_add_explicit(&num_captured, 1, memory_order_relaxed);
    pending_call* p = NULL;
    if (c->version >= 6) p = pending_of(c, q);
    else STORE(c->num_large, LOAD(c->num_large) + (q->num_bytes >= LAGOM_LEAST_BYTES));
    const call_place at = {.kind = (uint32_t)q->kind, .num_bytes = q->num_bytes, .asked = p,
                           .keeps_channels = may_be_uneven_gather(c, q)};
    word = look_up(c, &at, &from);
    follow(c, p, &from);
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
  if (!(flags & LAGOM_FLAG_NOT_COUNTED)) {
    STORE(c->num_asked, LOAD(c->num_asked) + 1);
    STORE(c->num_matched, LOAD(c->num_matched) + (flags & LAGOM_FLAG_MATCHED ? 1 : 0));
  }
  if (record.header) record_decision(c, q, word, &from, offered, flags);
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
  } else if (owner == CHUNK_NOT_OURS) {
    if (ask_chained_chunk(c, kind, num_bytes, algorithm, protocol, num_channels, chunk_bytes)) flags = LAGOM_FLAG_CHAINED;
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

// AllGatherV came with 2.29 and takes the tuner's channels as they are; from 2.31 on a tuner can only lower them. NCCL has
// a variable to do without it, and reads it as a number.
static COLD bool is_uncapped(int release, int version) {
  const char* wanted = getenv("NCCL_ALLGATHERV_ENABLE");
  if (wanted && *wanted) {
    char* end = NULL;
    if (strtoll(wanted, &end, 0) == 0 && end != wanted) return false;
  }
  return version >= 5 && version <= 6 && (release == 0 || (release >= 22900 && release < 23100));
}

// Places are given in the order of creation and, until a restart, never again: creation is the same on all ranks of a communicator, while
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

// How many calls NCCL asked about on communicators of several ranks, and for how many of them the table had a decision.
EXPORT void lagom_counts(uint64_t* num_asked, uint64_t* num_matched) {
  pthread_mutex_lock(&swap_lock);
  *num_asked = finished_asked;
  *num_matched = finished_matched;
  for (context* c = contexts; c; c = c->next) {
    if (c->num_ranks < 2) continue;
    *num_asked += LOAD(c->num_asked);
    *num_matched += LOAD(c->num_matched);
  }
  pthread_mutex_unlock(&swap_lock);
}

// How many calls of LAGOM_LEAST_BYTES and more were made or asked about on each communicator of this process, for as many
// of them as there is room for; returns how many there are. Ranks that have made the same calls count the same.
EXPORT size_t lagom_calls(uint64_t* comm_ids, uint64_t* num_ranks, uint64_t* num_calls, size_t room) {
  pthread_mutex_lock(&swap_lock);
  size_t n = 0;
  for (context* c = contexts; c; c = c->next, n++) {
    if (n >= room) continue;
    comm_ids[n] = c->comm_id;
    num_ranks[n] = c->num_ranks;
    num_calls[n] = LOAD(c->num_large);
  }
  pthread_mutex_unlock(&swap_lock);
  return n;
}

// How many of the calls on communicators of several ranks had LAGOM_LEAST_BYTES and more.
EXPORT uint64_t lagom_num_large(void) {
  pthread_mutex_lock(&swap_lock);
  uint64_t num = finished_large;
  for (context* c = contexts; c; c = c->next) num += c->num_ranks > 1 ? LOAD(c->num_large) : 0;
  pthread_mutex_unlock(&swap_lock);
  return num;
}

// The process begins anew: its process groups are gone and are made again, as they are in ranks that were just started,
// whose counts begin at 0. Call it where no communicator is being made.
EXPORT void lagom_restart(void) {
  pthread_mutex_lock(&swap_lock);
  num_creations = 0;
  STORE(current_step, 0);
  pthread_mutex_unlock(&swap_lock);
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
  if (c->num_ranks > 1) {
    finished_asked += LOAD(c->num_asked);
    finished_matched += LOAD(c->num_matched);
    finished_large += LOAD(c->num_large);
  }
  pthread_mutex_unlock(&swap_lock);
  free(c);
  lagom_record_flush();
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
const void* const OWN_TUNERS[8] = {NULL, NULL, &ncclTunerPlugin_v2, &ncclTunerPlugin_v3, &ncclTunerPlugin_v4,
                                          &ncclTunerPlugin_v5, &ncclTunerPlugin_v6, &ncclTunerPlugin_v7};
