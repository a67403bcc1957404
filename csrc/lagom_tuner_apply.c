// Writing a decision where NCCL takes it: algorithm and protocol into the costs, channels next to them.
#define _GNU_SOURCE
#include "lagom_tuner.h"

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

bool apply_v2(const context* c, uint64_t word, const question* q) {
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

bool apply(const context* c, uint64_t word, const question* q) {
  return q->cost ? apply_to_costs(c, word, q) : apply_v2(c, word, q);
}
