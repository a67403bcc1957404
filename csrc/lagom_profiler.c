// NCCL profiler plug-in, ABI v4 to v7, in liblagom_tuner.so: GPU start and end of every collective.
//
// Environment, read when the first communicator is made:
//   NCCL_PROFILER_PLUGIN      this library's path: NCCL then loads it as a profiler
//   LAGOM_PROFILE             profile ring to create, %r and %p as in LAGOM_RECORD; unset: NCCL is asked for no event
//   LAGOM_PROFILE_ENTRIES     the ring's length (65536)
//   LAGOM_PROFILE_CHANNELS    anything but empty or "0": an entry for each channel after that of its collective
//   LAGOM_PROFILE_NETWORK     likewise: what the network did for each collective
// NCCL loads one profiler. Another one that a site has set is not chained: it is displaced, and the log says so.
//
// How NCCL 2.27 to 2.30.7 go about it: each block of a collective's kernel writes globaltimer into host memory when it
// starts and when it ends. The communicator's proxy progress thread polls these words and reports them as channel events,
// on one node, too: the events need no network. The launching thread (or CUDA's callback thread, for a graph) reports the
// collective itself, before its channels. NCCL keeps 64 such words for each channel, so a proxy thread that falls 64
// collectives behind reads the times of later ones; nothing tells.
//
// What the network did is told by the same thread, of processes that use the network's transport (lagom_profiler_network.h).
// With PXN another process of the node sends for this one: of that nothing is told here, and that process must not follow
// the pointers that NCCL passes on to it.
//
// Rules of the callbacks: no allocation, lock or system call, never wait; always success, because NCCL would go on anyway.
// A collective lives in a slot of a fixed pool from its event until its last channel has ended. Handles are numbers, not
// pointers: index and generation of the slot, so that an event of a slot that has been given up is recognised and counted.
// A slot is used while it is pinned, and is written out and freed by whoever unpins it last; the pool is never freed,
// because NCCL's threads may outlive a communicator. So may their calls: communicators that share resources share a proxy
// thread, and NCCL does not say that no thread is in a callback of ours when it ends one. Contexts are never freed either.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lagom_capture.h"
#include "lagom_profile.h"
#include "lagom_profiler_network.h"
#include "nccl/nccl_profiler_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define COLD __attribute__((noinline, cold))
#define LOG(log, level, ...)                                                                  \
  do {                                                                                        \
    if (log) log(level, NCCL_SUBSYSTEM_INIT, "lagom_profiler", __LINE__, __VA_ARGS__);        \
  } while (0)

// ------------------------------------------------------------------------------------------------------------- handles

enum tag { TAG_GROUP = 1, TAG_CALL = 2, TAG_COLLECTIVE = 3, TAG_CHANNEL = 4, TAG_MASK = LAGOM_TAG_MASK };

// A call: time << 4 | captured << 3 | tag. A group, which is what one kernel runs: number << 4 | tag. A collective or channel: generation << 32 | slot << 16 | channel << 8 | tag.
static uint64_t handle_of(enum tag tag, uint32_t slot, uint32_t generation, uint32_t channel) {
  return (uint64_t)generation << 32 | (uint64_t)slot << 16 | (uint64_t)channel << 8 | tag;
}
_Static_assert(LAGOM_PROFILE_POOL <= 1 << 16 && (LAGOM_PROFILE_POOL & (LAGOM_PROFILE_POOL - 1)) == 0, "slot in 16 bits");
_Static_assert(LAGOM_PROFILE_MAX_CHANNELS <= 64, "a channel in a word of bits");

static uint64_t host_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);  // no system call: the vDSO answers
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------- slots

// State of a slot: generation << 32 | OPEN | pins * PIN. Free: neither OPEN nor CLOSED.
#define OPEN 0x80000000ULL
#define CLOSED 0x40000000ULL  // being filled or written out by one thread
#define PIN 1ULL
#define PINS 0xFFFFULL

typedef struct {
  _Atomic uint64_t state;
  _Atomic uint64_t started, ended;  // a bit for each channel
  _Atomic uint64_t seen_ns;
  _Atomic uint32_t num_operations;  // of the network, begun and not ended
  _Atomic bool lacks_operations;    // there was no room for some
  lagom_profile_entry entry;        // written before the slot opens, but for what the network did
  _Atomic uint64_t start_ns[LAGOM_PROFILE_MAX_CHANNELS];
  _Atomic uint64_t end_ns[LAGOM_PROFILE_MAX_CHANNELS];
} slot;

static slot pool[LAGOM_PROFILE_POOL];
static _Atomic uint32_t next_slot;
static _Atomic uint32_t next_launch = 1;
static lagom_ring ring;
static pthread_mutex_t flush_lock = PTHREAD_MUTEX_INITIALIZER;
static bool with_channels, with_network;

static void count(uint64_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// Writes to the profile's file what is not there yet; before it is read. Not for a callback of NCCL's.
EXPORT void lagom_profile_flush(void) {
  if (!ring_is_own(&ring)) return;  // asked before the lock, which a forked child may have found taken
  pthread_mutex_lock(&flush_lock);
  ring_flush(&ring);
  pthread_mutex_unlock(&flush_lock);
}

__attribute__((destructor)) static void flush_at_exit(void) { lagom_profile_flush(); }

static uint32_t num_bits(uint64_t word) { return (uint32_t)__builtin_popcountll(word); }

// Writes the collective of a slot that is CLOSED by this thread, and frees the slot.
static void write_out(slot* s) {
  const uint64_t started = atomic_load_explicit(&s->started, memory_order_relaxed);
  const uint64_t ended = atomic_load_explicit(&s->ended, memory_order_relaxed);
  lagom_profile_entry e = s->entry;
  for (uint64_t bits = started; bits; bits &= bits - 1) {
    const uint64_t at = atomic_load_explicit(&s->start_ns[__builtin_ctzll(bits)], memory_order_relaxed);
    if (e.start_ns == 0 || at < e.start_ns) e.start_ns = at;
  }
  for (uint64_t bits = ended; bits; bits &= bits - 1) {
    const uint64_t at = atomic_load_explicit(&s->end_ns[__builtin_ctzll(bits)], memory_order_relaxed);
    if (at > e.end_ns) e.end_ns = at;
  }
  e.num_started = num_bits(started);
  e.num_ended = num_bits(ended);
  e.seen_ns = atomic_load_explicit(&s->seen_ns, memory_order_relaxed);
  if (atomic_load_explicit(&s->num_operations, memory_order_relaxed) ||
      atomic_load_explicit(&s->lacks_operations, memory_order_relaxed)) {
    e.flags |= LAGOM_PROFILE_NETWORK_INCOMPLETE;
  }
  if (e.num_ended == 0 || e.num_ended < e.num_channels || ended != started) e.flags |= LAGOM_PROFILE_INCOMPLETE;
  ring_append(&ring, &e, sizeof(e));
  for (uint64_t bits = with_channels ? ended & started : 0; bits; bits &= bits - 1) {
    const int channel = __builtin_ctzll(bits);
    e.event = LAGOM_PROFILE_CHANNEL;
    e.channel = (uint32_t)channel;
    e.start_ns = atomic_load_explicit(&s->start_ns[channel], memory_order_relaxed);
    e.end_ns = atomic_load_explicit(&s->end_ns[channel], memory_order_relaxed);
    ring_append(&ring, &e, sizeof(e));
  }
  const uint64_t generation = (atomic_load_explicit(&s->state, memory_order_relaxed) >> 32) + 1;
  atomic_store_explicit(&s->state, generation << 32, memory_order_release);
  __atomic_fetch_sub(&ring.header->num_open, 1, __ATOMIC_RELEASE);  // who reads 0 finds all entries
}

// The slot whose turn it is, CLOSED for this thread; NULL if a thread is in it just now. A collective that still holds it
// is LAGOM_PROFILE_POOL collectives old: it is given up and written out with what has been seen.
static slot* take_slot(uint32_t* index) {
  *index = atomic_fetch_add_explicit(&next_slot, 1, memory_order_relaxed) & (LAGOM_PROFILE_POOL - 1);
  slot* s = &pool[*index];
  uint64_t state = atomic_load_explicit(&s->state, memory_order_relaxed);
  if (state & OPEN) {
    state &= ~PINS;  // closes only an unpinned one
    if (!atomic_compare_exchange_strong_explicit(&s->state, &state, (state & ~OPEN) | CLOSED, memory_order_acquire,
                                                 memory_order_relaxed)) {
      return NULL;
    }
    write_out(s);
    state = atomic_load_explicit(&s->state, memory_order_relaxed);
  }
  if (state & CLOSED) return NULL;
  return atomic_compare_exchange_strong_explicit(&s->state, &state, state | CLOSED, memory_order_acquire,
                                                 memory_order_relaxed)
             ? s
             : NULL;
}

bool lagom_is_under_way(uint64_t collective) {
  const uint64_t state =
      atomic_load_explicit(&pool[collective >> 16 & (LAGOM_PROFILE_POOL - 1)].state, memory_order_relaxed);
  return state >> 32 == collective >> 32 && (state & OPEN);
}

// NULL: the collective is over.
static slot* pin(uint64_t handle) {
  slot* s = &pool[handle >> 16 & (LAGOM_PROFILE_POOL - 1)];
  uint64_t state = atomic_load_explicit(&s->state, memory_order_relaxed);
  do {
    if (state >> 32 != handle >> 32 || !(state & OPEN)) return NULL;
  } while (!atomic_compare_exchange_weak_explicit(&s->state, &state, state + PIN, memory_order_acquire,
                                                  memory_order_relaxed));
  return s;
}

// The last one out writes a collective whose channels have all ended, and what the network does for it: the kernel's end
// does not wait for the last sends' completion. Both are read after the pin is gone, or two
// threads that end the last two channels at once would each leave it to the other; that the slot may be another
// collective's by then does no harm, because its state is another.
static void unpin(slot* s) {
  const uint32_t num_channels = s->entry.num_channels;
  uint64_t state = atomic_fetch_sub_explicit(&s->state, PIN, memory_order_acq_rel) - PIN;
  if ((state & PINS) || num_channels == 0) return;
  if (num_bits(atomic_load_explicit(&s->ended, memory_order_relaxed)) < num_channels) return;
  if (atomic_load_explicit(&s->num_operations, memory_order_relaxed)) return;
  if (atomic_compare_exchange_strong_explicit(&s->state, &state, (state & ~OPEN) | CLOSED, memory_order_acquire,
                                              memory_order_relaxed)) {
    write_out(s);
  }
}

// ------------------------------------------------------------------------------------------------- what NCCL's words mean

typedef struct {
  const char* word;
  int value;
} meaning;

static const meaning KINDS[] = {{"AllReduce", NCCL_ALL_REDUCE}, {"AllGather", NCCL_ALL_GATHER},
                                {"ReduceScatter", NCCL_REDUCE_SCATTER}, {"Broadcast", NCCL_BROADCAST},
                                {"Reduce", NCCL_REDUCE}, {NULL, -1}};
static const meaning ALGORITHMS[] = {{"RING", NCCL_RING}, {"TREE", NCCL_TREE}, {"NVLS", NCCL_NVLS},
                                     {"NVLS_TREE", NCCL_NVLS_TREE}, {"PAT", NCCL_PAT},
                                     {"COLLNET_DIRECT", NCCL_COLLNET_DIRECT}, {"COLLNET_CHAIN", NCCL_COLLNET_CHAIN},
                                     {NULL, -1}};
static const meaning PROTOCOLS[] = {{"SIMPLE", NCCL_SIMPLE}, {"LL", NCCL_LL}, {"LL128", NCCL_LL128}, {NULL, -1}};
static const meaning TYPE_BYTES[] = {{"ncclInt8", 1}, {"ncclBfloat16", 2}, {"ncclFloat32", 4}, {"ncclFloat16", 2},
                                     {"ncclUint8", 1}, {"ncclInt32", 4}, {"ncclUint32", 4}, {"ncclInt64", 8},
                                     {"ncclUint64", 8}, {"ncclFloat64", 8}, {"ncclFloat8e4m3", 1},
                                     {"ncclFloat8e5m2", 1}, {NULL, 0}};

static int look_up(const meaning* table, const char* word) {
  while (table->word && !(word && strcmp(table->word, word) == 0)) table++;
  return table->value;
}

// ------------------------------------------------------------------------------------------------------------ callbacks

typedef struct context {
  struct context* next;
  _Atomic bool is_over;  // its communicator is destroyed
  int* mask;  // NCCL's own, one for all communicators of a loaded NCCL
  uint64_t comm_id;
  uint32_t rank, num_ranks, num_nodes, version;
} context;

static uint64_t start_collective(const context* c, const nccl_event* event) {
  const nccl_collective_event* call = &event->collective;
  const int kind = look_up(KINDS, call->kind);
  if (kind < 0) return 0;
  uint32_t index;
  slot* s = take_slot(&index);
  if (!s) {
    count(&ring.header->num_dropped);
    return 0;
  }
  const bool is_sharded = kind == NCCL_ALL_GATHER || kind == NCCL_REDUCE_SCATTER;
  const uint64_t parent = c->version >= 5 ? (uint64_t)(uintptr_t)event->parent : 0;
  const bool has_call = (parent & TAG_MASK) == TAG_CALL;
  const uint64_t group = (uint64_t)(uintptr_t)(c->version >= 5 ? call->group : event->parent);
  s->entry = (lagom_profile_entry){
      .comm_id = c->comm_id,
      .call = call->sequence,
      .num_bytes = call->count * (uint64_t)look_up(TYPE_BYTES, call->type) * (is_sharded ? c->num_ranks : 1),
      .called_ns = has_call ? parent >> 4 : 0,
      .launched_ns = host_ns(),
      .event = LAGOM_PROFILE_COLLECTIVE,
      .kind = (uint32_t)kind,
      .rank = c->rank,
      .num_ranks = c->num_ranks,
      .num_nodes = c->num_nodes,
      .algorithm = look_up(ALGORITHMS, call->algorithm),
      .protocol = look_up(PROTOCOLS, call->protocol),
      .num_channels = call->num_channels,
      .flags = (has_call && (parent & 8) ? LAGOM_PROFILE_CAPTURED : 0) |
               (c->version >= 7 && call->is_symmetric ? LAGOM_PROFILE_SYMMETRIC : 0),
      .abi_version = c->version,
      .launch = (group & TAG_MASK) == TAG_GROUP ? (uint32_t)(group >> 4) : 0,
  };
  atomic_store_explicit(&s->started, 0, memory_order_relaxed);
  atomic_store_explicit(&s->ended, 0, memory_order_relaxed);
  atomic_store_explicit(&s->seen_ns, 0, memory_order_relaxed);
  atomic_store_explicit(&s->num_operations, 0, memory_order_relaxed);
  atomic_store_explicit(&s->lacks_operations, false, memory_order_relaxed);
  const uint64_t generation = atomic_load_explicit(&s->state, memory_order_relaxed) >> 32;
  count(&ring.header->num_open);
  atomic_store_explicit(&s->state, generation << 32 | OPEN, memory_order_release);
  return handle_of(TAG_COLLECTIVE, index, (uint32_t)generation, 0);
}

// NULL, and the event counted, if its collective had been given up.
static slot* pin_for_channel(uint64_t handle) {
  slot* s = pin(handle);
  if (!s) count(&ring.header->num_late);
  return s;
}

static uint64_t start_channel(const nccl_event* event) {
  const uint64_t parent = (uint64_t)(uintptr_t)event->parent;
  const uint32_t channel = event->channel.channel;
  if ((parent & TAG_MASK) != TAG_COLLECTIVE || channel >= LAGOM_PROFILE_MAX_CHANNELS) return 0;
  slot* s = pin_for_channel(parent);
  if (!s) return 0;
  atomic_store_explicit(&s->start_ns[channel], event->channel.timer_ns, memory_order_relaxed);
  atomic_fetch_or_explicit(&s->started, 1ULL << channel, memory_order_release);
  unpin(s);
  return (parent & ~0xFFFFULL) | handle_of(TAG_CHANNEL, 0, 0, channel);
}

static void end_channel(uint64_t handle, uint64_t timer_ns) {
  const uint32_t channel = handle >> 8 & (LAGOM_PROFILE_MAX_CHANNELS - 1);
  slot* s = pin_for_channel(handle);
  if (!s) return;
  atomic_store_explicit(&s->end_ns[channel], timer_ns, memory_order_relaxed);
  atomic_store_explicit(&s->seen_ns, host_ns(), memory_order_relaxed);
  atomic_fetch_or_explicit(&s->ended, 1ULL << channel, memory_order_release);
  unpin(s);
}

static int own_pid;

static uint64_t start_operation(const nccl_event* event) {
  const uint64_t parent = (uint64_t)(uintptr_t)event->parent;
  if (event->proxy_operation.pid != own_pid || (parent & TAG_MASK) != TAG_COLLECTIVE) return 0;
  const uint64_t made = lagom_network_start(parent);
  slot* s = made ? NULL : pin(parent);
  if (s) {
    atomic_store_explicit(&s->lacks_operations, true, memory_order_relaxed);
    unpin(s);
  }
  return made;
}

static void begin_operation(uint64_t handle) {
  uint64_t collective;
  slot* s = lagom_network_begin(handle, &collective) ? pin(collective) : NULL;
  if (!s) return;
  atomic_fetch_add_explicit(&s->num_operations, 1, memory_order_relaxed);
  unpin(s);
}

// One thread at a time ends operations of a collective: its communicator's proxy thread.
static void end_operation(uint64_t handle) {
  uint64_t collective;
  lagom_network done;
  slot* s = lagom_network_end(handle, &collective, &done) ? pin(collective) : NULL;
  if (!s) return;
  lagom_profile_entry* e = &s->entry;
  e->sent_bytes += done.sent_bytes, e->received_bytes += done.received_bytes;
  e->num_sends += (uint32_t)done.num_sends, e->num_receipts += (uint32_t)done.num_receipts;
  e->send_gpu_ns += done.send_gpu_ns, e->send_peer_ns += done.send_peer_ns, e->send_network_ns += done.send_network_ns;
  e->receive_network_ns += done.receive_network_ns, e->receive_flush_ns += done.receive_flush_ns;
  e->receive_gpu_ns += done.receive_gpu_ns;
  if (done.busy_ns > e->network_busy_ns) e->network_busy_ns = done.busy_ns;
  if (done.first_ns && (!e->network_start_ns || done.first_ns < e->network_start_ns)) e->network_start_ns = done.first_ns;
  if (done.last_ns > e->network_end_ns) e->network_end_ns = done.last_ns;
  atomic_fetch_sub_explicit(&s->num_operations, 1, memory_order_relaxed);
  unpin(s);
}

// The context of a proxy operation or step may be another process's: it is not looked at.
static uint64_t start_of(const context* c, uint64_t type, const nccl_event* event) {
  const uint64_t parent = (uint64_t)(uintptr_t)event->parent;
  if (type == NCCL_EVENT_PROXY_OPERATION) return start_operation(event);
  if (type == NCCL_EVENT_PROXY_STEP) return lagom_network_start_step(parent, event->proxy_step.step);
  if (!c || atomic_load_explicit(&c->is_over, memory_order_relaxed)) return 0;
  switch (type) {
    case NCCL_EVENT_GROUP:
      // 2.27 reports the collectives only of a group that has a handle.
      return (uint64_t)atomic_fetch_add_explicit(&next_launch, 1, memory_order_relaxed) << 4 | TAG_GROUP;
    case NCCL_EVENT_COLLECTIVE_CALL:
      lagom_note_call(event->call.is_captured ? LAGOM_CALL_CAPTURED : LAGOM_CALL_OUTSIDE);
      return host_ns() << 4 | (event->call.is_captured ? 8 : 0) | TAG_CALL;
    case NCCL_EVENT_COLLECTIVE: return start_collective(c, event);
    case NCCL_EVENT_CHANNEL: return start_channel(event);
    default: return 0;  // send and receive, grouped calls, copy engines: not recorded
  }
}

static nccl_result start_event_v4(void* ctx, void** handle, nccl_event* event) {
  if (handle) *handle = event && ring.header ? (void*)(uintptr_t)start_of(ctx, event->type_v4, event) : NULL;
  return NCCL_SUCCESS;
}

static nccl_result start_event(void* ctx, void** handle, nccl_event* event) {
  if (handle) *handle = event && ring.header ? (void*)(uintptr_t)start_of(ctx, event->type, event) : NULL;
  return NCCL_SUCCESS;
}

static nccl_result record_event_state(void* event, int state, nccl_event_state_arguments* arguments) {
  const uint64_t handle = (uint64_t)(uintptr_t)event;
  if (!arguments || !ring.header) return NCCL_SUCCESS;
  switch (handle & TAG_MASK) {
    case TAG_CHANNEL:
      if (state == NCCL_STATE_CHANNEL_STOP) end_channel(handle, arguments->timer_ns);
      break;
    case LAGOM_TAG_OPERATION:
      if (state == NCCL_STATE_PROXY_OPERATION_IN_PROGRESS) begin_operation(handle);
      break;
    case LAGOM_TAG_STEP:
      lagom_network_set_state(handle, state, arguments->num_bytes, host_ns());
      break;
    default: break;
  }
  return NCCL_SUCCESS;
}

// A call's and a group's end say nothing that is kept; a channel has ended with its last state.
static nccl_result stop_event(void* event) {
  const uint64_t handle = (uint64_t)(uintptr_t)event;
  if (!ring.header) return NCCL_SUCCESS;
  if ((handle & TAG_MASK) == LAGOM_TAG_STEP) lagom_network_end_step(handle, host_ns());
  if ((handle & TAG_MASK) == LAGOM_TAG_OPERATION) end_operation(handle);
  return NCCL_SUCCESS;
}

// -------------------------------------------------------------------------------------- start and end of a communicator

enum {
  WANTED = NCCL_EVENT_COLLECTIVE | NCCL_EVENT_CHANNEL,
  NETWORK = NCCL_EVENT_PROXY_OPERATION | NCCL_EVENT_PROXY_STEP,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static context* contexts;  // all of these under `lock`
static context* past;      // of communicators that are gone: kept, see above
static bool is_started;
static bool is_off;

// The calls are always wanted: what is captured is told by them alone (lagom_capture.h), and they cost a host call each.
static int mask_of(const context* c) {
  return (is_off ? 0 : WANTED | (with_network ? NETWORK : 0)) | (c->version >= 5 ? NCCL_EVENT_COLLECTIVE_CALL : 0);
}

static COLD bool is_set(const char* name) {
  const char* value = getenv(name);
  return value && *value && strcmp(value, "0") != 0;
}

static COLD void start_profile(nccl_logger log) {
  char path[MAX_PATH];
  is_started = true;
  own_pid = (int)getpid();
  const char* pattern = getenv("LAGOM_PROFILE");
  if (!pattern || !*pattern) return;
  with_channels = is_set("LAGOM_PROFILE_CHANNELS");
  with_network = is_set("LAGOM_PROFILE_NETWORK");
  if (ring_create(&ring, pattern, getenv("LAGOM_PROFILE_ENTRIES"), LAGOM_PROFILE_MAGIC, LAGOM_PROFILE_VERSION,
                  sizeof(lagom_profile_entry), path)) {
    LOG(log, NCCL_LOG_LEVEL_INFO, "PROFILER/lagom: writing %s; no other profiler plug-in runs", path);
  } else {
    LOG(log, NCCL_LOG_LEVEL_WARN, "PROFILER/lagom: cannot create %s; nothing is profiled", pattern);
  }
}

static COLD nccl_result start(void** out, int version, uint64_t comm_id, int* mask, int num_nodes, int num_ranks,
                              int rank, nccl_logger log) {
  if (!out || !mask) return NCCL_SUCCESS;
  *out = NULL;
  pthread_mutex_lock(&lock);
  if (!is_started) start_profile(log);
  context* c = ring.header ? calloc(1, sizeof(*c)) : NULL;
  if (!ring.header) *mask = 0;
  if (c) {
    *c = (context){.next = contexts, .mask = mask, .comm_id = comm_id, .rank = (uint32_t)rank,
                   .num_ranks = (uint32_t)num_ranks, .num_nodes = (uint32_t)num_nodes, .version = (uint32_t)version};
    contexts = c;
    // Never 0 in between: other communicators of this NCCL are running under the same mask.
    __atomic_store_n(mask, mask_of(c), __ATOMIC_RELAXED);
    *out = c;
    lagom_profile_entry e = {.comm_id = comm_id, .event = LAGOM_PROFILE_COMMUNICATOR, .called_ns = host_ns(),
                             .rank = c->rank, .num_ranks = c->num_ranks, .num_nodes = c->num_nodes, .algorithm = -1,
                             .protocol = -1, .abi_version = c->version};
    ring_append(&ring, &e, sizeof(e));
  }
  pthread_mutex_unlock(&lock);
  return NCCL_SUCCESS;
}

static nccl_result init_v4(void** context_out, int* mask, const char* comm_name, uint64_t comm_id, int num_nodes,
                           int num_ranks, int rank, nccl_logger log) {
  (void)comm_name;
  return start(context_out, 4, comm_id, mask, num_nodes, num_ranks, rank, log);
}

#define DEFINE_INIT(version)                                                                                    \
  static nccl_result init_v##version(void** context_out, uint64_t comm_id, int* mask, const char* comm_name,     \
                                     int num_nodes, int num_ranks, int rank, nccl_logger log) {                  \
    (void)comm_name;                                                                                            \
    return start(context_out, version, comm_id, mask, num_nodes, num_ranks, rank, log);                         \
  }
DEFINE_INIT(5)
DEFINE_INIT(6)
DEFINE_INIT(7)

// Writes out what this rank of the communicator has left open: a kernel that was aborted never ends.
static COLD nccl_result finish(void* ctx) {
  context* c = ctx;
  if (!c || atomic_exchange_explicit(&c->is_over, true, memory_order_relaxed)) return NCCL_SUCCESS;
  for (uint32_t i = 0; i < LAGOM_PROFILE_POOL; i++) {
    slot* s = &pool[i];
    uint64_t state = atomic_load_explicit(&s->state, memory_order_relaxed);
    if (!(state & OPEN) || (state & PINS)) continue;
    if (!atomic_compare_exchange_strong_explicit(&s->state, &state, state + PIN, memory_order_acquire,
                                                 memory_order_relaxed)) {
      continue;
    }
    const bool is_mine = s->entry.comm_id == c->comm_id && s->entry.rank == c->rank;
    uint64_t pinned = state + PIN;
    if (is_mine && atomic_compare_exchange_strong_explicit(&s->state, &pinned, (state & ~OPEN) | CLOSED,
                                                           memory_order_acquire, memory_order_relaxed)) {
      write_out(s);
    } else {
      unpin(s);
    }
  }
  pthread_mutex_lock(&lock);
  for (context** link = &contexts; *link; link = &(*link)->next) {
    if (*link == c) {
      *link = c->next;
      break;
    }
  }
  c->next = past;
  past = c;
  pthread_mutex_unlock(&lock);
  lagom_profile_flush();
  return NCCL_SUCCESS;
}

#define NAME "lagom"
EXPORT const nccl_profiler_v4 ncclProfiler_v4 = {NAME, init_v4, start_event_v4, stop_event, record_event_state, finish};
EXPORT const nccl_profiler_v5 ncclProfiler_v5 = {NAME, init_v5, start_event, stop_event, record_event_state, finish};
EXPORT const nccl_profiler_v5 ncclProfiler_v6 = {NAME, init_v6, start_event, stop_event, record_event_state, finish};
EXPORT const nccl_profiler_v5 ncclProfiler_v7 = {NAME, init_v7, start_event, stop_event, record_event_state, finish};

// 0: NCCL reports no more than that a call is made from the next one on, and its kernels take no times; 1: again. What a CUDA graph captured
// stays as it was. Returns the number of communicators that are profiled.
EXPORT int lagom_profile_enable(int is_enabled) {
  int num = 0;
  pthread_mutex_lock(&lock);
  is_off = !is_enabled;
  for (context* c = contexts; c; c = c->next, num++) __atomic_store_n(c->mask, mask_of(c), __ATOMIC_RELAXED);
  pthread_mutex_unlock(&lock);
  return num;
}
