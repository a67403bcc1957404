// How NCCL spreads what it decided over channels and cuts it into chunks, per release; aggregation of grouped calls.
// Facts from NCCL's enqueue.cc at v2.21.5 to v2.30.7.
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_host_state.h"

enum { NVLS_CHUNK_BYTES = 128 << 10, SIMPLE_STEP = 512 << 10 };

// --------------------------------------------------------------------------------------------------------- preparation

static void prepare_2_21(fake_comm* comm, int flags) {
  for (int first = 0; first < comm->num_tasks;) {  // neighbours of one kind, operator and type
    host_task* t = &comm->tasks[first];
    fake_call sum = t->call;
    int end = first + 1;
    while (end < comm->num_tasks && comm->tasks[end].call.kind == sum.kind &&
           comm->tasks[end].call.op_and_type == sum.op_and_type) {
      sum.num_bytes += comm->tasks[end++].call.num_bytes;
    }
    fake_result r = {0};
    host_decide(comm, &sum, 1, flags, &r);
    for (int i = first; i < end; i++) {
      fake_result member = {0};
      host_decide(comm, &comm->tasks[i].call, 1, flags, &member);
      member.algorithm = r.algorithm;
      member.protocol = r.protocol;
      member.faults |= r.faults;
      member.num_tuner_calls = r.num_tuner_calls + 1;
      comm->tasks[i].result = member;
      comm->order[i] = i;
    }
    first = end;
  }
}

// From 2.29 on, calls that symmetric kernels could serve are looked through for them first, and come back in reverse order:
// where all ranks are on NVLink, on buffers that are not registered.
static bool is_looked_through(const fake_comm* comm, const fake_call* c) {
  enum { SUM = 0, AVERAGE = 4, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9, FLOAT8E5M2 = 11 };
  const int release = comm->host->release, op = c->op_and_type / 32, type = c->op_and_type % 32;
  const bool is_on_nvlink = comm->has_shape && comm->spec.num_nodes == 1 && comm->shape.p2p_chunk_bytes == SIMPLE_STEP;
  if (release < 22900 || !is_on_nvlink) return false;
  if (c->kind == NCCL_ALL_GATHER) return true;
  const bool is_float = type == FLOAT16 || type == FLOAT32 || (type >= BFLOAT16 && type <= FLOAT8E5M2);
  const bool adds = op == SUM || (op == AVERAGE && release >= 23000);
  return (c->kind == NCCL_ALL_REDUCE || c->kind == NCCL_REDUCE_SCATTER) && is_float && adds;
}

static void prepare_2_22(fake_comm* comm, int flags) {
  const int n = comm->num_tasks;
  bool done[MAX_CALLS] = {false};
  int used = 0;
  const int num_pipe_ops = (n + comm->spec.num_channels - 1) / comm->spec.num_channels;
  for (int first = 0; first < n; first++) {
    if (done[first]) continue;
    int same[MAX_CALLS], num_same = 0;
    const fake_call* lead = &comm->tasks[first].call;
    const bool largest_first = is_looked_through(comm, lead);
    for (int i = first; i < n; i++) {
      const fake_call* c = &comm->tasks[i].call;
      if (done[i] || c->kind != lead->kind || c->op_and_type != lead->op_and_type) continue;
      done[i] = true;
      int at = num_same++;
      while (at > 0) {
        const uint64_t before = comm->tasks[same[at - 1]].call.num_bytes;
        if (largest_first ? before > c->num_bytes : before <= c->num_bytes) break;
        same[at] = same[at - 1], at--;
      }
      same[at] = i;
    }
    for (int begin = 0; begin < num_same;) {  // within four times of the first they are one: all, from the largest down
      fake_call sum = comm->tasks[same[begin]].call;
      const uint64_t limit = 4 * sum.num_bytes;
      int end = begin + 1;
      while (end < num_same && comm->tasks[same[end]].call.num_bytes < limit) {
        sum.num_bytes += comm->tasks[same[end++]].call.num_bytes;
      }
      fake_result r = {0};
      host_decide(comm, &sum, num_pipe_ops, flags, &r);
      for (int i = begin; i < end; i++) {
        comm->tasks[same[i]].result = r;
        comm->order[used++] = same[i];
      }
      begin = end;
    }
  }
}

API int fake_prepare(fake_comm* comm, const fake_call* calls, int num_calls, int flags) {
  if (num_calls < 1 || num_calls > MAX_CALLS) return -1;
  comm->num_tasks = num_calls;
  const char* wanted = getenv("NCCL_ALLGATHERV_ENABLE");
  comm->is_gather_v = flags & FAKE_GATHER_V && comm->host->release >= 22900 && comm->host->release < 23100 &&
                      !(wanted && strcmp(wanted, "0") == 0);
  for (int i = 0; i < num_calls; i++) comm->tasks[i] = (host_task){.call = calls[i]};
  if (comm->host->release < 22200) prepare_2_21(comm, flags);
  else prepare_2_22(comm, flags);
  uint32_t faults = 0;
  for (int i = 0; i < num_calls; i++) {
    host_task* t = &comm->tasks[i];
    t->is_nvls = t->result.algorithm == NCCL_NVLS || t->result.algorithm == NCCL_NVLS_TREE;
    t->is_collnet = t->result.algorithm == NCCL_COLLNET_DIRECT || t->result.algorithm == NCCL_COLLNET_CHAIN ||
                    (t->result.algorithm == NCCL_NVLS && comm->spec.num_nodes > 1);
    t->result.place = (uint32_t)i;
    faults |= t->result.faults;
  }
  return (int)faults;
}

// -------------------------------------------------------------------------------------------------------------- chunks

static size_t grain_of(int protocol) {
  return protocol == NCCL_LL ? NCCL_GRAIN_LL : protocol == NCCL_LL128 ? NCCL_GRAIN_LL128 : NCCL_GRAIN_SIMPLE;
}

static size_t halve(size_t chunk, size_t floor_bytes, double loops, size_t each, size_t num_bytes) {
  while (chunk > floor_bytes && (double)(num_bytes / (each * chunk)) < loops) chunk /= 2;
  return chunk;
}

static size_t nvls_chunk(const fake_comm* comm, int channels, size_t num_bytes) {
  size_t chunk = NVLS_CHUNK_BYTES;
  const size_t at_once = (size_t)channels * (comm->spec.num_ranks / comm->spec.num_nodes);
  const bool is_slow = comm->has_shape && comm->spec.num_nodes > 1 &&
                       comm->shape.bandwidth[NCCL_ALL_REDUCE][NCCL_NVLS][NCCL_SIMPLE] < 150;
  if (is_slow) chunk = 32768;
  if (num_bytes < 64 * at_once * chunk && chunk > 65536) chunk = 65536;
  if (num_bytes < 8 * at_once * chunk && chunk > 32768) chunk = 32768;
  if (num_bytes < 2 * at_once * chunk && chunk > 16384) chunk = 16384;
  return chunk;
}

static size_t nvls_tree_chunk(const fake_comm* comm, int channels, size_t num_bytes) {
  const size_t at_once = (size_t)channels * (comm->spec.num_ranks / comm->spec.num_nodes);
  size_t chunk = comm->spec.num_nodes >= 4 ? 65536 : NVLS_CHUNK_BYTES;
  if (comm->has_shape) chunk = comm->shape.nvls_tree_chunk_bytes;
  if (num_bytes < 32 * at_once * chunk && chunk > 262144) chunk = 262144;
  if (num_bytes < 16 * at_once * chunk && chunk > 131072) chunk = 131072;
  if (num_bytes < 4 * at_once * chunk && chunk > 65536) chunk = 65536;
  if (num_bytes < at_once * chunk && chunk > 32768) chunk = 32768;
  return chunk;
}

static size_t tree_ll128_chunk(const fake_comm* comm, size_t most, int channels, size_t num_bytes) {
  const float per_node = (float)comm->spec.num_ranks / (float)comm->spec.num_nodes;
  const float steps = 1 + (float)(63 - __builtin_clzll(comm->spec.num_nodes)) + 0.1F * per_node;
  const size_t chunk = halve(most, 131072, steps * 64 / per_node, (size_t)channels, num_bytes);
  return halve(chunk, 32768, steps * 16 / per_node, (size_t)channels, num_bytes);
}

static size_t default_chunk(const fake_comm* comm, const host_task* t, int channels, size_t num_bytes, size_t* most) {
  const int a = t->result.algorithm, p = t->result.protocol, kind = t->call.kind;
  const bool is_long = kind != NCCL_BROADCAST && kind != NCCL_REDUCE;
  size_t chunk = p == NCCL_LL ? 32 << 10 : p == NCCL_LL128 ? 576000 : SIMPLE_STEP;
  if (p == NCCL_SIMPLE && a == NCCL_RING && is_long) chunk = 4 * SIMPLE_STEP;
  *most = chunk;
  const size_t each = (size_t)channels;
  const size_t heads = comm->spec.num_ranks / comm->spec.num_nodes;
  switch (a) {
    case NCCL_TREE: return p == NCCL_LL128 ? tree_ll128_chunk(comm, chunk, channels, num_bytes) : chunk;
    case NCCL_COLLNET_DIRECT:
      chunk = halve(chunk, 131072, 64, each * heads, num_bytes);
      return halve(chunk, 32768, 8, each * heads, num_bytes);
    case NCCL_COLLNET_CHAIN:
      chunk = halve(256 << 10, 131072, 64, each, num_bytes);
      return halve(chunk, 32768, 8, each, num_bytes);
    case NCCL_NVLS: return nvls_chunk(comm, channels, num_bytes);
    case NCCL_NVLS_TREE: return nvls_tree_chunk(comm, channels, num_bytes);
    case NCCL_PAT:
      while (chunk > 65536 && chunk * each * (kind == NCCL_ALL_GATHER ? 32 : 16) > num_bytes) chunk /= 2;
      return chunk;
    default:
      return chunk;
  }
}

static uint64_t cut(fake_comm* comm, host_task* t, int channels, size_t num_bytes) {
  size_t most;
  uint64_t chunk = default_chunk(comm, t, channels, num_bytes, &most);
  if (comm->host->version >= 6) {
    t->result.num_chunk_calls++;
    if (fake_raw_chunk_size(comm, t->call.kind, num_bytes, t->result.algorithm, t->result.protocol, channels, &chunk)) {
      t->result.faults |= FAKE_FAULT_TUNER_ERROR;
    }
  }
  if (chunk > most) chunk = most;
  chunk -= chunk % grain_of(t->result.protocol);
  if (chunk == 0) t->result.faults |= FAKE_FAULT_CHUNK_ZERO;
  if (t->is_nvls && chunk > NVLS_CHUNK_BYTES) t->result.faults |= FAKE_FAULT_NVLS_OVERRUN;
  return chunk;
}

// -------------------------------------------------------------------------------------------------------------- launch

// Traffic of a byte of `part_bytes`. LL sends flags with its data, which counts four times from 2.26 on.
static uint64_t traffic_per_byte(const fake_comm* comm, const host_task* t) {
  const uint64_t flags = t->result.protocol == NCCL_LL && comm->host->release >= 22600 ? 4 : 1;
  switch (t->call.kind) {
    case NCCL_ALL_REDUCE: return 2 * flags;
    case NCCL_ALL_GATHER:
    case NCCL_REDUCE_SCATTER: return comm->spec.num_ranks * flags;
    default: return flags;
  }
}

// Bytes of one rank's part: NCCL's `count` times the element size.
static uint64_t part_bytes(const fake_comm* comm, const host_task* t) {
  bool gathers = t->call.kind == NCCL_ALL_GATHER || t->call.kind == NCCL_REDUCE_SCATTER;
  return gathers ? ceil_div(t->call.num_bytes, comm->spec.num_ranks) : t->call.num_bytes;
}

static uint64_t least_traffic(int release) { return release >= 22900 ? 32 << 10 : release >= 22300 ? 16 << 10 : 512; }

typedef struct {
  int channel;
  uint64_t current;
  uint64_t per_channel;
  int most;
} spread;

// The parts of a task in cells, on the first channel, each middle one and the last.
typedef struct {
  uint64_t low, each, high;
  int middle;
} cell_parts;

static cell_parts cells_of(spread* s, uint64_t cells, uint64_t cell_traffic, bool rounds_down) {
  cell_parts p = {.each = ceil_div(s->per_channel, cell_traffic)};
  if (p.each > cells) p.each = cells;
  if (p.each == 0) p.each = 1;
  const uint64_t left = s->per_channel > s->current ? s->per_channel - s->current : 0;
  p.low = rounds_down ? left / cell_traffic : ceil_div(left, cell_traffic);
  if (s->channel + 1 == s->most || p.low > cells) p.low = cells;
  p.middle = (int)((cells - p.low) / p.each);
  p.high = (cells - p.low) % p.each;
  if (s->most < s->channel + (p.low != 0) + p.middle + (p.high != 0)) {  // more than there are
    p.middle = s->most - s->channel - 2 > 0 ? s->most - s->channel - 2 : 0;
    p.each = (cells - p.low) / (uint64_t)(p.middle + 1);
    p.high = p.each + (cells - p.low) % (uint64_t)(p.middle + 1);
  }
  if (p.high == 0 && p.middle) p.high = p.each, p.middle--;
  if (p.low == 0) {  // the first channel is full: the next one is the first
    s->channel++;
    if (p.middle == 0) p.low = p.high, p.high = 0;
    else p.low = p.each, p.middle--;
  }
  return p;
}

// Spreads one task over channels, low, middle and high, as scheduleCollTasksToPlan does with its cells.
static void spread_task(fake_comm* comm, host_task* t, spread* s) {
  const int release = comm->host->release;
  const uint64_t bytes = part_bytes(comm, t), element = t->call.element_bytes ? (uint64_t)t->call.element_bytes : 4;
  const uint64_t traffic = traffic_per_byte(comm, t);
  const uint64_t whole = release < 22300 ? 16 : ceil_div(ceil_div(least_traffic(release), traffic), 16) * 16;
  const uint64_t cells = ceil_div(bytes, whole), cell_traffic = whole * traffic, cell = whole / element * element;
  const cell_parts p = cells_of(s, cells, cell_traffic, release < 22300);
  const uint64_t scale = bytes ? ceil_div(t->call.num_bytes, bytes) : 1;
  const uint64_t parts[3] = {p.low, p.middle ? p.each : 0, p.high};
  const int channels = (p.low != 0) + p.middle + (p.high != 0), last = p.high ? 2 : 0;
  t->result.channel = s->channel;
  t->result.num_channels = channels;
  if (s->channel + channels > s->most) t->result.faults |= FAKE_FAULT_CHANNELS;
  static const int asked[3] = {0, 2, 1};  // NCCL asks for low, high, then middle
  for (int k = 0; k < 3; k++) {
    const int i = asked[k];
    uint64_t n = parts[i] * cell;
    if (i == last && n) n -= cells * cell > bytes ? cells * cell - bytes : 0;
    t->result.channel_bytes[i] = n * scale;
    if (n) t->result.chunk_bytes[i] = cut(comm, t, 1, n * scale);
  }
  if (p.high) s->channel += channels - 1, s->current = p.high * cell * traffic;
  else if (p.middle) s->channel += channels, s->current = 0;
  else s->current += p.low * cell * traffic;
  if (s->current >= s->per_channel && s->channel + 1 != s->most) s->channel++, s->current = 0;
  if (s->channel >= s->most) s->channel = s->most - 1;
}

// 2.18: as many channels as were decided; the chunk as the kernel gets it, before LL's and LL128's flags are taken off.
static void spread_task_2_18(fake_comm* comm, host_task* t) {
  fake_result* r = &t->result;
  const size_t channels = (size_t)r->max_channels, depth = (size_t)(comm->spec.num_ranks / comm->spec.num_nodes - 1) +
                                                          (size_t)(63 - __builtin_clzll(comm->spec.num_nodes));
  r->num_channels = r->max_channels;
  r->channel_bytes[0] = t->call.num_bytes;
  size_t most, chunk = default_chunk(comm, t, r->max_channels, t->call.num_bytes, &most);
  if (r->protocol == NCCL_LL) chunk = 65536;
  if (r->protocol == NCCL_LL128) {
    chunk = r->algorithm == NCCL_TREE ? tree_ll128_chunk(comm, 614400, r->max_channels, t->call.num_bytes) : 614400;
  }
  if (r->protocol == NCCL_SIMPLE && r->algorithm == NCCL_TREE) {
    chunk = halve(chunk, 131072, (double)depth * 8, channels, t->call.num_bytes);
    chunk = halve(chunk, 65536, (double)depth * 4, channels, t->call.num_bytes);
    chunk = halve(chunk, 32768, (double)depth, channels, t->call.num_bytes);
  }
  r->chunk_bytes[0] = chunk;
}

// 2.21: tasks share the channels by bytes; what a tuner gave channels to is cut by counts.
static void spread_task_2_21(fake_comm* comm, host_task* t, spread* s) {
  const uint64_t warps = (uint64_t)t->result.num_threads / 32, bytes = part_bytes(comm, t);
  const uint64_t align = t->result.protocol == NCCL_SIMPLE ? 4096 : t->result.protocol == NCCL_LL128 ? 480 * warps : 256 * warps;
  int channels = t->result.max_channels < s->most ? t->result.max_channels : s->most;
  const bool is_tuned = t->result.tuner_channels != 0;
  uint64_t each = is_tuned && channels ? ceil_div(bytes, (uint64_t)channels) : s->per_channel;
  each = ceil_div(each ? each : 1, align) * align;
  channels = (int)ceil_div(bytes, each);
  t->result.num_channels = channels > 0 ? channels : 1;
  t->result.channel_bytes[0] = t->call.num_bytes;
  t->result.chunk_bytes[0] = cut(comm, t, is_tuned ? t->result.num_channels : t->result.max_channels, t->call.num_bytes);
}

static uint64_t task_traffic(const fake_comm* comm, const host_task* t) {
  const int release = comm->host->release;
  if (release < 22200) return part_bytes(comm, t);
  const uint64_t own = part_bytes(comm, t) * traffic_per_byte(comm, t), least = least_traffic(release);
  return own > least || release < 22300 ? own : least;
}

static uint64_t traffic_per_channel(int release, uint64_t traffic, int channels) {
  const uint64_t each = traffic / (uint64_t)channels, least = least_traffic(release);
  if (release < 22200) return ceil_div(ceil_div(traffic, (uint64_t)channels), 16) * 16;
  if (release >= 22900) return ceil_div(each, 16) * 16;
  return each > least ? each : least;
}

static void launch_kind(fake_comm* comm, bool is_collnet, bool is_nvls, uint32_t* num_placed) {
  const int release = comm->host->release, nvls = comm->spec.nvls_channels, all = comm->spec.num_channels;
  spread s = {.most = !is_nvls ? all : is_collnet && release >= 22900 && all < nvls ? all : nvls};
  uint64_t traffic = 0;
  int channels = 0;
  for (int i = 0; i < comm->num_tasks; i++) {
    const host_task* t = &comm->tasks[i];
    if (t->is_collnet != is_collnet || t->is_nvls != is_nvls) continue;
    traffic += task_traffic(comm, t);
    channels += t->result.max_channels;
    if (channels > s.most) channels = s.most;
  }
  if (channels > 0) s.per_channel = traffic_per_channel(release, traffic, channels);
  for (int i = 0; i < comm->num_tasks; i++) {
    host_task* t = &comm->tasks[comm->order[i]];
    if (t->is_collnet != is_collnet || t->is_nvls != is_nvls) continue;
    t->result.place = (*num_placed)++;
    if (t->result.faults) continue;
    if (is_collnet) {
      t->result.num_channels = t->result.max_channels;
      if (t->result.max_channels > comm->spec.num_channels) t->result.faults |= FAKE_FAULT_CHANNELS;
      t->result.channel_bytes[0] = t->call.num_bytes;
      t->result.chunk_bytes[0] = cut(comm, t, t->result.max_channels, t->call.num_bytes);
    } else if (release < 21900) {
      spread_task_2_18(comm, t);
    } else if (release < 22200) {
      spread_task_2_21(comm, t, &s);
    } else {
      spread_task(comm, t, &s);
    }
  }
}

// AllGatherV: every broadcast is cut into as many parts as were decided, and part n goes to channel n, there or not.
static void launch_gather_v(fake_comm* comm) {
  for (int i = 0; i < comm->num_tasks; i++) {
    fake_result* r = &comm->tasks[i].result;
    r->num_channels = r->max_channels;
    if (r->max_channels > comm->spec.num_channels) r->faults |= FAKE_FAULT_CHANNELS;
  }
}

API int fake_launch(fake_comm* comm) {
  if (comm->is_gather_v) launch_gather_v(comm);
  uint32_t num_placed = 0;
  for (int kind = 0; kind < 4 && !comm->is_gather_v; kind++) launch_kind(comm, kind & 2, kind & 1, &num_placed);
  uint32_t faults = 0;
  for (int i = 0; i < comm->num_tasks; i++) faults |= comm->tasks[i].result.faults;
  return (int)faults;
}

API void fake_results(const fake_comm* comm, fake_result* results) {
  for (int i = 0; i < comm->num_tasks; i++) results[i] = comm->tasks[i].result;
}

typedef struct {
  fake_comm* comm;
  const fake_call* calls;
  int num_calls;
  int flags;
} job;

static void* prepare_on_helper(void* argument) {
  job* j = argument;
  fake_prepare(j->comm, j->calls, j->num_calls, j->flags);
  return NULL;
}

static void* launch_on_helper(void* argument) {
  fake_launch(((job*)argument)->comm);
  return NULL;
}

static void run_on_helper(void* (*work)(void*), job* j) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, work, j)) abort();
  pthread_join(thread, NULL);
}

API int fake_group(fake_comm* comm, const fake_call* calls, int num_calls, int flags, fake_result* results) {
  if (num_calls < 1 || num_calls > MAX_CALLS) return -1;
  job j = {comm, calls, num_calls, flags};
  if (flags & FAKE_HELPERS) run_on_helper(prepare_on_helper, &j);
  else prepare_on_helper(&j);
  if (!(flags & FAKE_SIMULATE)) {
    if (flags & FAKE_HELPERS) run_on_helper(launch_on_helper, &j);
    else launch_on_helper(&j);
  }
  if (results) fake_results(comm, results);
  uint32_t faults = 0;
  for (int i = 0; i < num_calls; i++) faults |= comm->tasks[i].result.faults;
  return (int)faults;
}
