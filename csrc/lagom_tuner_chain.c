// The tuner that answers where the table has no decision. As NCCL does, the newest version it exports that is not newer
// than the host's is used, and translated.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "lagom_tuner.h"

typedef struct {
  int version;  // 0: none
  const void* tuner;
} chain_link;

static chain_link chain;

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

void start_chain(nccl_logger log, int host_version) {
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

void init_chained(context* c, nccl_logger log, nccl_nvlink_domains* domains, void* constants) {
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

void finalize_chained(context* c) {
  if (!c->is_chained) return;
  switch (chain.version) {
    case 2: ((const nccl_tuner_v2*)chain.tuner)->destroy(c->chained); break;
    case 3: ((const nccl_tuner_v3*)chain.tuner)->destroy(c->chained); break;
    case 4: ((const nccl_tuner_v4*)chain.tuner)->destroy(c->chained); break;
    default: ((const nccl_tuner_v5*)chain.tuner)->finalize(c->chained);
  }
}

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

void ask_chained(context* c, const question* q) {
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

bool ask_chained_chunk(context* c, int kind, size_t num_bytes, int algorithm, int protocol, int num_channels,
                       size_t* chunk_bytes) {
  if (!c->is_chained || chain.version < 6) return false;
  const nccl_tuner_v6* t = chain.tuner;
  if (!t->get_chunk_size) return false;
  t->get_chunk_size(c->chained, kind, num_bytes, algorithm, protocol, num_channels, chunk_bytes);
  return true;
}
