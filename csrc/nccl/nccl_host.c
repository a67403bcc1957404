// The NCCL host around a tuner, per release: where it looks for one, what it offers and asks, how it picks from the cost
// table. nccl_host_schedule.c spreads what was decided over channels and cuts it into chunks.
//
// Facts from NCCL's enqueue.cc, tuning.cc and plugin/tuner.cc at v2.18.3 to v2.30.7 and the development branch of 2.31.
// Buffer sizes and thread counts are NCCL's defaults. Costs come from the communicator's nccl_shape; a communicator that is
// made from a fake_comm_spec alone, by tests of the plug-in, gets a caricature (latency + bytes / bandwidth).
#define _GNU_SOURCE
#include "nccl_host.h"

#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nccl_host_state.h"

enum { NUM_CANARIES = 8, WARP = 32, MAX_THREADS = 640 };
static const float CANARY = 12345.5F;

// ---------------------------------------------------------------------------------------------------------------- log

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 16];
static size_t log_used;
static bool is_quiet;
static void (*log_sink)(int level, unsigned long subsystems, const char* text);

void host_be_quiet(bool quiet) { is_quiet = quiet; }

API void fake_set_log(void (*log)(int level, unsigned long subsystems, const char* text)) { log_sink = log; }

__attribute__((format(printf, 5, 6))) static void take_line(int level, unsigned long subsystems, const char* file,
                                                            int line, const char* format, ...) {
  (void)file, (void)line;
  if (is_quiet) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (log_sink) {
    log_sink(level, subsystems, text);
    return;
  }
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

void* host_open_library(const char* name, const char* prefix) {
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

static int newest_opened;

// As a tuner may ask the library that calls it; the stand-in libnccl.so.2 has its own.
__attribute__((weak)) API int ncclGetVersion(int* version) {
  *version = newest_opened;
  return NCCL_SUCCESS;
}

API fake_host* fake_open(int release) {
  fake_host* host = calloc(1, sizeof(*host));
  newest_opened = host->release = release;
  if (release < 22100) return host;  // v1, which 2.19 and 2.20 load, is gone from 2.21 on
  const char* name = getenv("NCCL_TUNER_PLUGIN");
  if (name && !strcasecmp(name, "none")) return host;
  host->library = host_open_library(name, "libnccl-tuner");
  if (!host->library) host->library = host_open_library(getenv("NCCL_NET_PLUGIN"), "libnccl-net");
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

// The tuner's init may rewrite the constants; NCCL would then compute its own costs from them, which is not followed here.
static bool init_tuner(fake_comm* comm, const nccl_constants_v7* given) {
  const fake_host* host = comm->host;
  const fake_comm_spec* spec = &comm->spec;
  if (!host->tuner) return true;
  nccl_nvlink_domains domains = {(int)spec->num_nodes, (int)(spec->num_ranks / spec->num_nodes),
                                 (int)((spec->num_ranks + spec->num_nodes - 1) / spec->num_nodes)};
  if (host->version <= 4) {
    const nccl_tuner_v2* tuner = host->tuner;
    return tuner->init(spec->num_ranks, spec->num_nodes, take_line, &comm->context) == NCCL_SUCCESS;
  }
  nccl_constants_v7 newest;
  memset(&newest, 0, sizeof(newest));
  if (given) newest = *given;
  if (host->version >= 7) {
    const nccl_tuner_v7* tuner = host->tuner;
    return tuner->init(&comm->context, spec->comm_id, spec->num_ranks, spec->num_nodes, take_line, &domains, &newest) ==
           NCCL_SUCCESS;
  }
  nccl_constants_v5 constants;
  memcpy(constants.base_latencies, newest.base_latencies, sizeof(constants.base_latencies));
  memcpy(constants.link_latencies, newest.link_latencies, sizeof(constants.link_latencies));
  for (int i = 0; i < 5; i++) memcpy(constants.bandwidths[i], newest.bandwidths[i], sizeof(constants.bandwidths[i]));
  const nccl_tuner_v5* tuner = host->tuner;
  return tuner->init(&comm->context, spec->comm_id, spec->num_ranks, spec->num_nodes, take_line, &domains, &constants) ==
         NCCL_SUCCESS;
}

API fake_comm* fake_comm_init(fake_host* host, const fake_comm_spec* spec) {
  fake_comm* comm = calloc(1, sizeof(*comm));
  comm->host = host;
  comm->spec = *spec;
  if (init_tuner(comm, NULL)) return comm;
  free(comm);
  return NULL;
}

API fake_comm* fake_comm_init_shape(fake_host* host, uint64_t comm_id, const nccl_shape* shape, const void* constants) {
  fake_comm* comm = calloc(1, sizeof(*comm));
  comm->host = host;
  comm->spec = (fake_comm_spec){.comm_id = comm_id,
                                .num_ranks = shape->num_ranks,
                                .num_nodes = shape->num_nodes,
                                .num_channels = (int32_t)shape->num_channels,
                                .nvls_channels = (int32_t)shape->nvls_channels};
  comm->has_shape = true;
  comm->shape = *shape;
  if (init_tuner(comm, constants)) return comm;
  free(comm);
  return NULL;
}

fake_comm* fake_deny(fake_comm* comm, const bool denied[5][7][3]) {
  if (comm) memcpy(comm->denied, denied, sizeof(comm->denied));
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
    default: return gathers && s->num_nodes == s->num_ranks;  // PAT: one GPU per node
  }
}

// NCCL's time, in its own single precision.
static float modelled_us(const fake_comm* comm, const fake_call* call, int num_pipe_ops, int a, int p) {
  enum { BATCHED = 14 };  // collectives of one batch of device work
  const nccl_shape* s = &comm->shape;
  float bandwidth = s->bandwidth[call->kind][a][p], latency = s->latency_us[call->kind][a][p];
  if (bandwidth == 0) return -1;
  if (call->limits & FAKE_NOT_NVLS && (a == NCCL_NVLS || a == NCCL_NVLS_TREE) && call->kind != NCCL_ALL_GATHER) return -1;
  if (call->limits & FAKE_SCALED && a == NCCL_PAT && call->kind == NCCL_REDUCE_SCATTER) return -1;
  const uint64_t units = call->num_bytes >> 6;
  const int octave = units ? 63 - __builtin_clzll(units) : -1;
  const bool corrected = a == NCCL_TREE || (a == NCCL_NVLS_TREE && s->has_nvls_tree_correction);
  if (call->kind == NCCL_ALL_REDUCE && corrected && octave >= 0 && octave < 23) bandwidth *= s->tree_correction[p][octave];
  if (call->kind == NCCL_ALL_REDUCE && a == NCCL_RING && p == NCCL_SIMPLE && s->num_nodes > 1 &&
      call->num_bytes / ((uint64_t)s->num_channels * s->num_ranks) >= 64) {
    latency *= s->plateau;
  }
  const int count = a == NCCL_RING ? num_pipe_ops : (num_pipe_ops + BATCHED - 1) / BATCHED;
  return latency * (float)count + (float)call->num_bytes / (1000 * bandwidth);
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
      if (comm->denied[call->kind][a][p]) *cost = -1;
      else if (comm->has_costs) *cost = comm->costs[a * 3 + p];
      else if (comm->has_shape) *cost = modelled_us(comm, call, num_pipe_ops, a, p);
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

// The tuning model's channels and threads for a size.
static void set_channels_and_threads(const fake_comm* comm, fake_result* r, uint64_t num_bytes, int given_channels) {
  static const uint32_t spec_threads[3] = {512, 640, 512}, spec_threshold[3] = {8, 8, 64};
  const int a = r->algorithm, p = r->protocol;
  uint32_t threads = comm->has_shape ? comm->shape.max_threads[a][p] : spec_threads[p];
  uint64_t each = comm->has_shape ? comm->shape.thread_threshold[a][p] : spec_threshold[p];
  if (!comm->has_shape && a == NCCL_RING && p == NCCL_LL) each *= comm->spec.num_ranks;
  int channels = comm->spec.num_channels;
  r->num_threads = MAX_THREADS;
  if (a == NCCL_NVLS || a == NCCL_NVLS_TREE) {
    const int nvls = comm->spec.nvls_channels;
    r->max_channels = comm->spec.num_nodes > 1 && a == NCCL_NVLS && channels < nvls ? channels : nvls;
    return;
  }
  if (given_channels) channels = given_channels;  // 2.21: the tuner's channels count for the threads
  else while (channels >= 2 && num_bytes < (uint64_t)channels * threads * each) channels--;
  while (num_bytes < (uint64_t)channels * threads * each && threads % 128 == 0) threads /= 2;
  if (p == NCCL_SIMPLE && a == NCCL_RING) threads += WARP;
  if (p == NCCL_SIMPLE && a == NCCL_TREE) threads += 4 * WARP;
  if (threads < 3 * WARP) threads = 3 * WARP;
  if (comm->host->release >= 22200 && (a == NCCL_TREE || a == NCCL_PAT)) threads = MAX_THREADS;
  r->max_channels = channels;
  r->num_threads = (int32_t)threads;
}

static void ask(fake_comm* comm, const fake_call* call, int num_pipe_ops, bool is_blank, int flags, fake_result* r) {
  float table[21 + NUM_CANARIES];
  int channels = 0;
  const int count = num_algorithms(comm) * 3;
  for (int i = 0; i < 21 + NUM_CANARIES; i++) table[i] = i < count ? -1 : CANARY;
  if (!is_blank) fill_costs(comm, call, num_pipe_ops, table);
  for (int i = 0; flags & FAKE_GATHER_V && i < count; i++) {
    const int a = i / 3;
    if (a == NCCL_NVLS || a == NCCL_NVLS_TREE || a == NCCL_COLLNET_DIRECT || a == NCCL_COLLNET_CHAIN) table[i] = -1;
  }
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

void host_decide(fake_comm* comm, const fake_call* call, int num_pipe_ops, int flags, fake_result* r) {
  const int release = comm->host->release;
  if (flags & FAKE_SYMMETRIC && release >= 23100) ask(comm, call, 0, true, flags, r);
  if (flags & FAKE_SYMMETRIC && release >= 22700) ask(comm, call, 1, false, flags, r);
  ask(comm, call, num_pipe_ops, false, flags, r);
  if (pick(comm, r->cost_before, r->cost_after, r)) return;
  const bool is_old = release < 22200;
  set_channels_and_threads(comm, r, call->num_bytes, is_old ? r->tuner_channels : 0);
  if (release >= 23100) {
    if (r->tuner_channels > 0 && r->tuner_channels < r->max_channels) r->max_channels = r->tuner_channels;
  } else if (r->tuner_channels) {
    r->max_channels = r->tuner_channels;
  }
  if (r->max_channels < 0) r->faults |= FAKE_FAULT_CHANNELS;
}
