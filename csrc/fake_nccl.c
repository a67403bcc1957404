// The fake NCCL host. It follows, per release, what NCCL does around a tuner: where it looks for one, what it asks and
// when, how it picks from the cost table, how it spreads a collective over channels and cuts it into chunks.
//
// Facts from NCCL's enqueue.cc and plugin/tuner.cc at v2.21.5 to v2.30.7; for 2.31 on from the project's NCCL notes.
// Times, buffer sizes and thread counts are NCCL's defaults; the cost model is a caricature (latency + bytes / bandwidth).
#define _GNU_SOURCE
#include "fake_nccl.h"

#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "nccl_tuner_abi.h"

#define API __attribute__((visibility("default")))

enum { MAX_CALLS = 512, NUM_CANARIES = 8, NVLS_CHUNK_BYTES = 128 << 10, SIMPLE_STEP = 512 << 10 };
static const float CANARY = 12345.5F;

struct fake_host {
  int release;
  int version;
  void* library;
  const void* tuner;
};

typedef struct {
  fake_call call;
  fake_result result;
  bool is_collnet;
  bool is_nvls;
  int aggregate;  // index of the first task of its aggregate
} task;

struct fake_comm {
  fake_host* host;
  fake_comm_spec spec;
  void* context;
  bool has_costs;
  float costs[21];
  int num_tasks;
  int order[MAX_CALLS];
  task tasks[MAX_CALLS];
};

// ---------------------------------------------------------------------------------------------------------------- log

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 16];
static size_t log_used;
static bool is_quiet;

__attribute__((format(printf, 5, 6))) static void take_line(int level, unsigned long subsystems, const char* file,
                                                            int line, const char* format, ...) {
  (void)subsystems, (void)file, (void)line;
  if (is_quiet) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&log_lock);
  int n = snprintf(log_text + log_used, sizeof(log_text) - log_used, "%s %s\n", level == 2 ? "WARN" : "INFO", text);
  if (n > 0 && log_used + (size_t)n < sizeof(log_text)) log_used += (size_t)n;
  pthread_mutex_unlock(&log_lock);
}

API size_t fake_take_log(char* text, size_t size) {
  pthread_mutex_lock(&log_lock);
  size_t n = log_used < size - 1 ? log_used : size - 1;
  memcpy(text, log_text, n);
  text[n] = 0;
  log_used = 0;
  pthread_mutex_unlock(&log_lock);
  return n;
}

// ------------------------------------------------------------------------------------------------------ finding a tuner

static int newest_version(int release) {
  if (release >= 23206) return 7;
  if (release >= 23003) return 6;
  if (release >= 22800) return 5;
  if (release >= 22400) return 4;
  return release >= 22200 ? 3 : 2;
}

static void* open_library(const char* name, const char* prefix) {
  char path[4096];
  if (!name || !*name) {
    snprintf(path, sizeof(path), "%s.so", prefix);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  void* library = dlopen(strcmp(name, "STATIC_PLUGIN") ? name : NULL, RTLD_NOW | RTLD_LOCAL);
  if (library || strchr(name, '/')) return library;
  snprintf(path, sizeof(path), "%s-%s.so", prefix, name);
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

API fake_host* fake_open(int release) {
  fake_host* host = calloc(1, sizeof(*host));
  host->release = release;
  const char* name = getenv("NCCL_TUNER_PLUGIN");
  if (name && !strcasecmp(name, "none")) return host;
  host->library = open_library(name, "libnccl-tuner");
  if (!host->library) host->library = open_library(getenv("NCCL_NET_PLUGIN"), "libnccl-net");
  if (!host->library) return host;
  for (int version = newest_version(release); version >= 2 && !host->tuner; version--) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", version);
    host->tuner = dlsym(host->library, symbol);
    if (host->tuner) host->version = version;
  }
  return host;
}

API void fake_close(fake_host* host) {
  if (!host) return;
  if (host->library) dlclose(host->library);
  free(host);
}

API int fake_tuner_version(const fake_host* host) { return host->version; }
API const char* fake_tuner_name(const fake_host* host) {
  return host->tuner ? ((const nccl_tuner_v2*)host->tuner)->name : "";
}

// ------------------------------------------------------------------------------------------------------- communicators

API fake_comm* fake_comm_init(fake_host* host, const fake_comm_spec* spec) {
  fake_comm* comm = calloc(1, sizeof(*comm));
  comm->host = host;
  comm->spec = *spec;
  if (!host->tuner) return comm;
  nccl_nvlink_domains domains = {1, (int)spec->num_ranks, (int)spec->num_ranks};
  nccl_constants_v7 constants;  // as large as the largest
  memset(&constants, 0, sizeof(constants));
  nccl_result result;
  if (host->version <= 4) {
    result = ((const nccl_tuner_v2*)host->tuner)->init(spec->num_ranks, spec->num_nodes, take_line, &comm->context);
  } else if (host->version == 7) {
    result = ((const nccl_tuner_v7*)host->tuner)
                 ->init(&comm->context, spec->comm_id, spec->num_ranks, spec->num_nodes, take_line, &domains, &constants);
  } else {
    result = ((const nccl_tuner_v5*)host->tuner)
                 ->init(&comm->context, spec->comm_id, spec->num_ranks, spec->num_nodes, take_line, &domains,
                        (nccl_constants_v5*)(void*)&constants);
  }
  if (result != NCCL_SUCCESS) {
    free(comm);
    return NULL;
  }
  return comm;
}

API void fake_comm_finalize(fake_comm* comm) {
  if (!comm) return;
  const void* tuner = comm->host->tuner;
  switch (comm->host->version) {
    case 0: break;
    case 2: ((const nccl_tuner_v2*)tuner)->destroy(comm->context); break;
    case 3: ((const nccl_tuner_v3*)tuner)->destroy(comm->context); break;
    case 4: ((const nccl_tuner_v4*)tuner)->destroy(comm->context); break;
    default: ((const nccl_tuner_v5*)tuner)->finalize(comm->context);
  }
  free(comm);
}

API void fake_set_costs(fake_comm* comm, const float* costs_us) {
  comm->has_costs = costs_us != NULL;
  if (costs_us) memcpy(comm->costs, costs_us, sizeof(comm->costs));
}

// ---------------------------------------------------------------------------------------------------------- cost table

static int num_algorithms(const fake_comm* comm) { return comm->host->release < 22300 ? 6 : 7; }

static bool is_available(const fake_comm* comm, int kind, int a, int p) {
  const fake_comm_spec* s = &comm->spec;
  const bool one_node = s->num_nodes == 1;
  const bool gathers = kind == NCCL_ALL_GATHER || kind == NCCL_REDUCE_SCATTER;
  if (p == NCCL_LL128 && !s->has_ll128) return false;
  if (a != NCCL_RING && a != NCCL_TREE && p != NCCL_SIMPLE) return false;
  switch (a) {
    case NCCL_RING: return true;
    case NCCL_TREE: return kind == NCCL_ALL_REDUCE;
    case NCCL_COLLNET_DIRECT: return s->has_collnet && !one_node && (kind == NCCL_ALL_REDUCE || gathers);
    case NCCL_COLLNET_CHAIN: return s->has_collnet && !one_node && kind == NCCL_ALL_REDUCE;
    case NCCL_NVLS:
      return s->nvls_channels && (kind == NCCL_ALL_REDUCE || gathers) && (one_node || s->has_collnet);
    case NCCL_NVLS_TREE: return s->nvls_channels && !one_node && kind == NCCL_ALL_REDUCE;
    default: return gathers && !one_node;  // PAT
  }
}

static void fill_costs(const fake_comm* comm, const fake_call* call, int num_pipe_ops, float* costs) {
  static const float latency_us[7] = {20, 12, 40, 38, 35, 45, 16};
  static const float bandwidth[7] = {0.8F, 1, 1.1F, 0.9F, 1.3F, 1.2F, 0.75F};  // of the bus
  static const float protocol_latency[3] = {0.5F, 1, 1.6F};
  static const float protocol_bandwidth[3] = {0.25F, 0.92F, 1};
  const float bus = 20e3F * (float)comm->spec.num_channels;  // bytes per us
  for (int a = 0; a < num_algorithms(comm); a++) {
    for (int p = 0; p < 3; p++) {
      float* cost = &costs[a * 3 + p];
      if (comm->has_costs) *cost = comm->costs[a * 3 + p];
      else if (!is_available(comm, call->kind, a, p)) *cost = -1;
      else {
        *cost = latency_us[a] * protocol_latency[p] * (float)num_pipe_ops +
                (float)call->num_bytes / (bus * bandwidth[a] * protocol_bandwidth[p]);
      }
    }
  }
}

API int fake_raw_coll_info(fake_comm* comm, int kind, uint64_t num_bytes, int num_pipe_ops, float* costs,
                           int algorithms, int protocols, int registered, int* num_channels) {
  float** table = (float**)(void*)costs;
  switch (comm->host->version) {
    case 0: return NCCL_SUCCESS;
    case 3:
      return ((const nccl_tuner_v3*)comm->host->tuner)
          ->get_coll_info(comm->context, kind, num_bytes, num_pipe_ops, table, algorithms, protocols, num_channels);
    case 2: {
      int a = -1, p = -1;
      int nvls = comm->spec.nvls_channels > 0, collnet = comm->spec.has_collnet;
      int result = ((const nccl_tuner_v2*)comm->host->tuner)
                       ->get_coll_info(comm->context, kind, num_bytes, collnet, nvls, num_pipe_ops, &a, &p, num_channels);
      if (a >= 0 && p >= 0) costs[a * 3 + p] = 0;  // 2.21 takes it as it is, on offer or not
      return result;
    }
    default:
      return ((const nccl_tuner_v4*)comm->host->tuner)
          ->get_coll_info(comm->context, kind, num_bytes, num_pipe_ops, table, algorithms, protocols, registered,
                          num_channels);
  }
}

API int fake_raw_chunk_size(fake_comm* comm, int kind, uint64_t num_bytes, int algorithm, int protocol, int num_channels,
                            uint64_t* chunk_bytes) {
  if (comm->host->version < 6) return NCCL_SUCCESS;
  const nccl_tuner_v6* t = comm->host->tuner;
  size_t chunk = *chunk_bytes;
  int result = t->get_chunk_size ? t->get_chunk_size(comm->context, kind, num_bytes, algorithm, protocol, num_channels, &chunk) : 0;
  *chunk_bytes = chunk;
  return result;
}

// ------------------------------------------------------------------------------------------------------- one decision

static int pick(const fake_comm* comm, const float* before, const float* after, fake_result* r) {
  const bool is_new = comm->host->release >= 23100;
  float best = is_new ? INFINITY : FLT_MAX;
  int chosen = -1;
  for (int i = 0; i < num_algorithms(comm) * 3; i++) {
    if (is_new) {  // what was available is known; no test for >= 0; ties go to the last
      if (before[i] != -1.0F && after[i] <= best) chosen = i, best = after[i];
    } else if (after[i] != -1.0F && after[i] >= 0 && after[i] < best) {
      chosen = i, best = after[i];
    }
  }
  if (chosen < 0) {
    r->faults |= FAKE_FAULT_NO_CHOICE;
    return -1;
  }
  if (before[chosen] < 0) r->faults |= FAKE_FAULT_UNAVAILABLE;
  r->algorithm = chosen / 3;
  r->protocol = chosen % 3;
  r->predicted_us = before[chosen];
  return 0;
}

static int default_channels(const fake_comm* comm, const fake_result* r, uint64_t num_bytes) {
  static const int threads[3] = {512, 640, 512};
  static const int threshold[3] = {8, 8, 64};
  if (r->algorithm == NCCL_NVLS || r->algorithm == NCCL_NVLS_TREE) {
    int nvls = comm->spec.nvls_channels, all = comm->spec.num_channels;
    return comm->spec.num_nodes > 1 && r->algorithm == NCCL_NVLS && all < nvls ? all : nvls;
  }
  uint64_t each = (uint64_t)threads[r->protocol] * (uint64_t)threshold[r->protocol];
  if (r->algorithm == NCCL_RING && r->protocol == NCCL_LL) each *= comm->spec.num_ranks;
  int nc = comm->spec.num_channels;
  while (nc >= 2 && num_bytes < (uint64_t)nc * each) nc--;
  return nc;
}

static void ask(fake_comm* comm, const fake_call* call, int num_pipe_ops, bool is_blank, int flags, fake_result* r) {
  float table[21 + NUM_CANARIES];
  int channels = 0;
  const int count = num_algorithms(comm) * 3;
  for (int i = 0; i < 21 + NUM_CANARIES; i++) table[i] = i < count ? -1 : CANARY;
  if (!is_blank) fill_costs(comm, call, num_pipe_ops, table);
  memcpy(r->cost_before, table, sizeof(r->cost_before));
  r->num_tuner_calls++;
  if (fake_raw_coll_info(comm, call->kind, call->num_bytes, num_pipe_ops, table, num_algorithms(comm), 3,
                         flags & FAKE_REGISTERED ? 1 : 0, &channels)) {
    r->faults |= FAKE_FAULT_TUNER_ERROR;
  }
  for (int i = count; i < 21 + NUM_CANARIES; i++) {
    if (table[i] != CANARY) r->faults |= FAKE_FAULT_OUT_OF_BOUNDS;
  }
  memcpy(r->cost_after, table, sizeof(r->cost_after));
  r->tuner_channels = channels;
}

static void decide(fake_comm* comm, const fake_call* call, int num_pipe_ops, int flags, fake_result* r) {
  const int release = comm->host->release;
  if (flags & FAKE_SYMMETRIC && release >= 23100) ask(comm, call, 0, true, flags, r);
  if (flags & FAKE_SYMMETRIC && release >= 22700) ask(comm, call, 1, false, flags, r);
  ask(comm, call, num_pipe_ops, false, flags, r);
  if (pick(comm, r->cost_before, r->cost_after, r)) return;
  int nc = default_channels(comm, r, call->num_bytes);
  if (release >= 23100) {
    if (r->tuner_channels > 0 && r->tuner_channels < nc) nc = r->tuner_channels;
  } else if (r->tuner_channels) {
    nc = r->tuner_channels;
  }
  if (nc < 0) r->faults |= FAKE_FAULT_CHANNELS;
  r->max_channels = nc;
}

// --------------------------------------------------------------------------------------------------------- preparation

static void prepare_2_21(fake_comm* comm, int flags) {
  for (int first = 0; first < comm->num_tasks;) {  // neighbours of one kind, operator and type
    task* t = &comm->tasks[first];
    fake_call sum = t->call;
    int end = first + 1;
    while (end < comm->num_tasks && comm->tasks[end].call.kind == sum.kind &&
           comm->tasks[end].call.op_and_type == sum.op_and_type) {
      sum.num_bytes += comm->tasks[end++].call.num_bytes;
    }
    fake_result r = {0};
    decide(comm, &sum, 1, flags, &r);
    for (int i = first; i < end; i++) {
      fake_result member = {0};
      decide(comm, &comm->tasks[i].call, 1, flags, &member);
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

static void prepare_2_22(fake_comm* comm, int flags) {
  const int n = comm->num_tasks;
  bool done[MAX_CALLS] = {false};
  int used = 0;
  const int num_pipe_ops = (n + comm->spec.num_channels - 1) / comm->spec.num_channels;
  for (int first = 0; first < n; first++) {
    if (done[first]) continue;
    int same[MAX_CALLS], num_same = 0;
    const fake_call* lead = &comm->tasks[first].call;
    for (int i = first; i < n; i++) {
      const fake_call* c = &comm->tasks[i].call;
      if (done[i] || c->kind != lead->kind || c->op_and_type != lead->op_and_type) continue;
      done[i] = true;
      int at = num_same++;
      while (at > 0 && comm->tasks[same[at - 1]].call.num_bytes > c->num_bytes) same[at] = same[at - 1], at--;
      same[at] = i;
    }
    for (int begin = 0; begin < num_same;) {  // smallest first; within four times of the smallest they are one
      fake_call sum = comm->tasks[same[begin]].call;
      const uint64_t limit = 4 * sum.num_bytes;
      int end = begin + 1;
      while (end < num_same && comm->tasks[same[end]].call.num_bytes < limit) {
        sum.num_bytes += comm->tasks[same[end++]].call.num_bytes;
      }
      fake_result r = {0};
      decide(comm, &sum, num_pipe_ops, flags, &r);
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
  for (int i = 0; i < num_calls; i++) comm->tasks[i] = (task){.call = calls[i]};
  if (comm->host->release < 22200) prepare_2_21(comm, flags);
  else prepare_2_22(comm, flags);
  uint32_t faults = 0;
  for (int i = 0; i < num_calls; i++) {
    task* t = &comm->tasks[i];
    t->is_nvls = t->result.algorithm == NCCL_NVLS || t->result.algorithm == NCCL_NVLS_TREE;
    t->is_collnet = t->result.algorithm == NCCL_COLLNET_DIRECT || t->result.algorithm == NCCL_COLLNET_CHAIN ||
                    (t->result.algorithm == NCCL_NVLS && comm->spec.num_nodes > 1);
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

static size_t default_chunk(const fake_comm* comm, const task* t, int channels, size_t num_bytes, size_t* most) {
  const int a = t->result.algorithm, p = t->result.protocol, kind = t->call.kind;
  const bool is_long = kind != NCCL_BROADCAST && kind != NCCL_REDUCE;
  size_t chunk = p == NCCL_LL ? 32 << 10 : p == NCCL_LL128 ? 576000 : SIMPLE_STEP;
  if (p == NCCL_SIMPLE && a == NCCL_RING && is_long) chunk = 4 * SIMPLE_STEP;
  *most = chunk;
  const size_t each = (size_t)channels;
  const size_t heads = comm->spec.num_ranks / comm->spec.num_nodes;
  const double steps = 1 + log2((double)comm->spec.num_nodes) + 0.1 * (double)heads;
  switch (a) {
    case NCCL_TREE:
      if (p != NCCL_LL128) return chunk;
      chunk = halve(chunk, 131072, steps * 64 / (double)heads, each, num_bytes);
      return halve(chunk, 32768, steps * 16 / (double)heads, each, num_bytes);
    case NCCL_COLLNET_DIRECT:
      chunk = halve(chunk, 131072, 64, each * heads, num_bytes);
      return halve(chunk, 32768, 8, each * heads, num_bytes);
    case NCCL_COLLNET_CHAIN:
      chunk = halve(256 << 10, 131072, 64, each, num_bytes);
      return halve(chunk, 32768, 8, each, num_bytes);
    case NCCL_NVLS:
    case NCCL_NVLS_TREE:
      chunk = NVLS_CHUNK_BYTES;
      if (num_bytes < 64 * each * heads * chunk) chunk = 65536;
      if (num_bytes < 8 * each * heads * chunk) chunk = 32768;
      return chunk;
    case NCCL_PAT:
      while (chunk > 65536 && chunk * each * 32 > num_bytes) chunk /= 2;
      return chunk;
    default:
      return chunk;
  }
}

static uint64_t cut(fake_comm* comm, task* t, int channels, size_t num_bytes) {
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

static uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

static uint64_t traffic_per_byte(const fake_comm* comm, const task* t) {
  uint64_t n = t->call.kind == NCCL_ALL_REDUCE                                                   ? 2
               : t->call.kind == NCCL_ALL_GATHER || t->call.kind == NCCL_REDUCE_SCATTER ? comm->spec.num_ranks
                                                                                          : 1;
  return t->result.protocol == NCCL_LL ? 4 * n : n;
}

// Bytes of one rank's part: NCCL's `count` times the element size.
static uint64_t part_bytes(const fake_comm* comm, const task* t) {
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

// Spreads one task over channels, low, middle and high, as scheduleCollTasksToPlan does with its cells.
static void spread_task(fake_comm* comm, task* t, spread* s) {
  const uint64_t traffic = traffic_per_byte(comm, t), bytes = part_bytes(comm, t);
  const uint64_t cell = ceil_div(ceil_div(least_traffic(comm->host->release), traffic), 16) * 16;
  const uint64_t cells = ceil_div(bytes, cell), cell_traffic = cell * traffic;
  uint64_t per = ceil_div(s->per_channel, cell_traffic);
  if (per > cells) per = cells;
  if (per == 0) per = 1;
  uint64_t left = s->per_channel > s->current ? s->per_channel - s->current : 0;
  uint64_t low = s->channel + 1 == s->most ? cells : ceil_div(left, cell_traffic);
  if (low > cells) low = cells;
  int64_t middle = (int64_t)((cells - low) / per);
  uint64_t high = (cells - low) % per;
  int channels = (low != 0) + (int)middle + (high != 0);
  if (s->most < s->channel + channels) {
    middle = s->most - s->channel - 2;
    if (middle < 0) middle = 0;
    per = (cells - low) / (uint64_t)(middle + 1);
    high = per + (cells - low) % (uint64_t)(middle + 1);
  }
  if (high == 0 && middle) high = per, middle--;
  if (low == 0) {
    s->channel++;
    if (middle == 0) low = high, high = 0;
    else low = per, middle--;
  }
  channels = (low != 0) + (int)middle + (high != 0);
  const uint64_t scale = ceil_div(t->call.num_bytes, bytes ? bytes : 1);
  const uint64_t parts[3] = {low, middle ? per : 0, high};
  static const int asked[3] = {0, 2, 1};  // NCCL asks for low, high, then middle
  for (int i = 0; i < 3; i++) {
    uint64_t n = parts[asked[i]] * cell;
    if (n > bytes) n = bytes;
    t->result.channel_bytes[asked[i]] = n * scale;
    if (n) t->result.chunk_bytes[asked[i]] = cut(comm, t, 1, n * scale);
  }
  t->result.num_channels = channels;
  if (s->channel + channels > s->most) t->result.faults |= FAKE_FAULT_CHANNELS;
  s->channel += channels - 1;
  s->current = (high ? high : low) * cell_traffic + (channels == 1 ? s->current : 0);
  if (s->current >= s->per_channel) s->channel++, s->current = 0;
  if (s->channel >= s->most) s->channel = s->most - 1;
}

static void launch_kind(fake_comm* comm, bool is_collnet, bool is_nvls) {
  spread s = {.most = is_nvls && !is_collnet ? comm->spec.nvls_channels : comm->spec.num_channels};
  uint64_t traffic = 0;
  int channels = 0;
  for (int i = 0; i < comm->num_tasks; i++) {
    const task* t = &comm->tasks[i];
    if (t->is_collnet != is_collnet || t->is_nvls != is_nvls) continue;
    uint64_t own = part_bytes(comm, t) * traffic_per_byte(comm, t), least = least_traffic(comm->host->release);
    traffic += own > least ? own : least;
    channels += t->result.max_channels;
    if (channels > s.most) channels = s.most;
  }
  if (channels > 0) s.per_channel = ceil_div(traffic / (uint64_t)channels, 16) * 16;
  for (int i = 0; i < comm->num_tasks; i++) {
    task* t = &comm->tasks[comm->order[i]];
    if (t->is_collnet != is_collnet || t->is_nvls != is_nvls || t->result.faults) continue;
    if (is_collnet) {
      t->result.num_channels = t->result.max_channels;
      if (t->result.max_channels > comm->spec.num_channels) t->result.faults |= FAKE_FAULT_CHANNELS;
      t->result.channel_bytes[0] = t->call.num_bytes;
      t->result.chunk_bytes[0] = cut(comm, t, t->result.max_channels, t->call.num_bytes);
    } else if (comm->host->release < 22200) {
      int n = t->result.max_channels;
      t->result.num_channels = n < s.most ? n : s.most;
    } else {
      spread_task(comm, t, &s);
    }
  }
}

API int fake_launch(fake_comm* comm) {
  for (int kind = 0; kind < 4; kind++) launch_kind(comm, kind & 2, kind & 1);
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

// -------------------------------------------------------------------------------------------------------------- timing

static double clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

#if defined(__x86_64__)
#include <x86intrin.h>
static uint64_t ticks(void) {
  _mm_lfence();
  uint64_t t = __rdtsc();
  _mm_lfence();
  return t;
}
#else
static uint64_t ticks(void) { return (uint64_t)clock_ns(); }
#endif

static double ns_per_tick(void) {
  static double value;
  if (value == 0) {
    double begin = clock_ns(), now = begin;
    uint64_t first = ticks();
    while (now - begin < 5e7) now = clock_ns();
    value = (now - begin) / (double)(ticks() - first);
  }
  return value;
}

static int by_value(const void* a, const void* b) {
  uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
  return (x > y) - (x < y);
}

API double fake_time(fake_comm* const* comms, const uint32_t* which, const uint64_t* sizes, int num_calls, int timing,
                     float* nanoseconds) {
  enum { FLUSH_BYTES = 16 << 20 };
  static volatile uint8_t flush[FLUSH_BYTES];
  is_quiet = true;  // NCCL without NCCL_DEBUG drops a line at once
  uint64_t empty[1001];
  for (int i = 0; i < 1001; i++) {
    uint64_t begin = ticks();
    empty[i] = ticks() - begin;
  }
  qsort(empty, 1001, sizeof(*empty), by_value);
  const double scale = ns_per_tick();
  for (int i = 0; i < num_calls; i++) {
    fake_comm* comm = comms[which[i]];
    for (int k = 0; timing == FAKE_TIME_COLD && k < FLUSH_BYTES; k += 64) flush[k]++;
    float costs[21];
    for (int k = 0; k < 21; k++) costs[k] = k < 6 ? 40.0F + (float)k : -1.0F;
    int channels = 0;
    uint64_t chunk = 2 << 20;
    uint64_t begin = ticks();
    fake_raw_coll_info(comm, NCCL_ALL_REDUCE, sizes[i], 1, costs, 7, 3, 0, &channels);
    uint64_t middle = ticks();
    fake_raw_chunk_size(comm, NCCL_ALL_REDUCE, sizes[i], NCCL_RING, NCCL_SIMPLE, 1, &chunk);
    uint64_t end = ticks();
    uint64_t spent = timing == FAKE_TIME_CHUNK_SIZE ? end - middle : middle - begin;
    nanoseconds[i] = spent > empty[500] ? (float)((double)(spent - empty[500]) * scale) : 0;
  }
  is_quiet = false;
  return (double)empty[500] * scale;
}
