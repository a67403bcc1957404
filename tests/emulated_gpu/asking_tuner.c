// A tuner that asks for what the test set: algorithm, protocol (-1: any), channels and chunk, where the host offers them.
#include <stddef.h>

#include "nccl/nccl_tuner_abi.h"

__attribute__((visibility("default"))) int asked_algorithm = -1, asked_protocol = -1, asked_channels;
__attribute__((visibility("default"))) size_t asked_chunk;

static nccl_result start_old(size_t ranks, size_t nodes, nccl_logger log, void** context) {
  (void)ranks, (void)nodes, (void)log;
  *context = NULL;
  return NCCL_SUCCESS;
}

static nccl_result start(void** context, uint64_t id, size_t ranks, size_t nodes, nccl_logger log, nccl_nvlink_domains* domains,
                         nccl_constants_v5* constants) {
  (void)id, (void)domains, (void)constants;
  return start_old(ranks, nodes, log, context);
}

static nccl_result stop(void* context) {
  (void)context;
  return NCCL_SUCCESS;
}

static nccl_result ask_v2(void* context, int kind, size_t bytes, int collnet, int nvls, int pipe_ops, int* algorithm, int* protocol,
                          int* channels) {
  (void)context, (void)kind, (void)bytes, (void)collnet, (void)nvls, (void)pipe_ops;
  if (asked_algorithm >= 0 && asked_protocol >= 0) *algorithm = asked_algorithm, *protocol = asked_protocol;
  *channels = asked_channels;
  return NCCL_SUCCESS;
}

static nccl_result ask(void* context, int kind, size_t bytes, int pipe_ops, float** table, int algorithms, int protocols, int registered,
                       int* channels) {
  (void)context, (void)kind, (void)bytes, (void)pipe_ops, (void)algorithms, (void)registered;
  float* costs = (float*)(void*)table;
  for (int i = 0; i < algorithms * protocols; i++) {
    const int is_other = (asked_algorithm >= 0 && i / protocols != asked_algorithm) || (asked_protocol >= 0 && i % protocols != asked_protocol);
    if (costs[i] >= 0 && is_other) costs[i] = 1e30F;
  }
  *channels = asked_channels;
  return NCCL_SUCCESS;
}

static nccl_result cut(void* context, int kind, size_t bytes, int algorithm, int protocol, int channels, size_t* chunk) {
  (void)context, (void)kind, (void)bytes, (void)algorithm, (void)protocol, (void)channels;
  if (asked_chunk) *chunk = asked_chunk;
  return NCCL_SUCCESS;
}

#define EXPORT __attribute__((visibility("default")))
EXPORT const nccl_tuner_v2 ncclTunerPlugin_v2 = {"asking", start_old, ask_v2, stop};
EXPORT const nccl_tuner_v4 ncclTunerPlugin_v4 = {"asking", start_old, ask, stop};
EXPORT const nccl_tuner_v5 ncclTunerPlugin_v5 = {"asking", start, ask, stop};
EXPORT const nccl_tuner_v6 ncclTunerPlugin_v6 = {"asking", start, ask, stop, cut};
