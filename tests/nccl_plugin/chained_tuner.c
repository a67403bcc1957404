// A tuner for the tests to chain to: says 3 channels, and chunk 4096 where the version has one; counts its calls.
#include "nccl/nccl_tuner_abi.h"

#define API __attribute__((visibility("default")))

static int num_calls, last_version;
static uint64_t last_comm_id;
static double last_constant;
API int chained_calls(void) { return num_calls; }
API int chained_version(void) { return last_version; }
API uint64_t chained_comm_id(void) { return last_comm_id; }
API double chained_constant(void) { return last_constant; }

#define ERROR_OR_SUCCESS (num_bytes == 4096 ? NCCL_INTERNAL_ERROR : NCCL_SUCCESS)

static nccl_result old_init(size_t num_ranks, size_t num_nodes, nccl_logger log, void** context) {
  (void)num_ranks, (void)num_nodes, (void)log;
  *context = &num_calls;
  return num_ranks == 3 ? NCCL_INTERNAL_ERROR : NCCL_SUCCESS;
}

static nccl_result init(void** context, uint64_t comm_id, size_t num_ranks, size_t num_nodes, nccl_logger log,
                        nccl_nvlink_domains* domains, nccl_constants_v5* constants) {
  last_comm_id = comm_id;
  if (domains && constants) {
    last_constant = constants->bandwidths[4][NCCL_NUM_GPU_GENERATIONS_V5 - 1][NCCL_NUM_SCALES - 1];
    constants->bandwidths[4][NCCL_NUM_GPU_GENERATIONS_V5 - 1][NCCL_NUM_SCALES - 1] = 77;
  }
  return old_init(num_ranks, num_nodes, log, context);
}

static nccl_result finish(void* context) { return context == &num_calls ? NCCL_SUCCESS : NCCL_INTERNAL_ERROR; }

static nccl_result ask_v2(void* context, int kind, size_t num_bytes, int collnet, int nvls, int num_pipe_ops,
                          int* algorithm, int* protocol, int* num_channels) {
  (void)kind, (void)collnet, (void)nvls, (void)num_pipe_ops;
  if (context != &num_calls) return NCCL_INTERNAL_ERROR;
  num_calls++, last_version = 2;
  *algorithm = NCCL_RING, *protocol = NCCL_LL, *num_channels = 3;
  return ERROR_OR_SUCCESS;
}

static nccl_result ask(int version, void* context, size_t num_bytes, float** costs, int np, int* num_channels) {
  if (context != &num_calls) return NCCL_INTERNAL_ERROR;
  num_calls++, last_version = version;
  ((float*)(void*)costs)[NCCL_RING * np + NCCL_LL] = 0;
  *num_channels = 3;
  return ERROR_OR_SUCCESS;
}

static nccl_result ask_v3(void* context, int kind, size_t num_bytes, int ops, float** costs, int na, int np, int* nc) {
  (void)kind, (void)ops, (void)na;
  return ask(3, context, num_bytes, costs, np, nc);
}

static nccl_result ask_v5(void* context, int kind, size_t num_bytes, int ops, float** costs, int na, int np, int registered,
                          int* nc) {
  (void)kind, (void)ops, (void)na, (void)registered;
  return ask(5, context, num_bytes, costs, np, nc);
}

static nccl_result chunk(void* context, int kind, size_t num_bytes, int algorithm, int protocol, int num_channels,
                         size_t* chunk_bytes) {
  (void)kind, (void)num_bytes, (void)algorithm, (void)protocol, (void)num_channels;
  if (context != &num_calls) return NCCL_INTERNAL_ERROR;
  *chunk_bytes = 4096;
  return NCCL_SUCCESS;
}

#if CHAINED_VERSION == 2
API const nccl_tuner_v2 ncclTunerPlugin_v2 = {"chained", old_init, ask_v2, finish};
#elif CHAINED_VERSION == 3
API const nccl_tuner_v3 ncclTunerPlugin_v3 = {"chained", old_init, ask_v3, finish};
#elif CHAINED_VERSION == 5
API const nccl_tuner_v5 ncclTunerPlugin_v5 = {"chained", init, ask_v5, finish};
#else
API const nccl_tuner_v6 ncclTunerPlugin_v6 = {"chained", init, ask_v5, finish, chunk};
#endif
// what a version leaves unused
void* const chained_unused[] = {(void*)&init, (void*)&ask_v2, (void*)&ask_v3, (void*)&ask_v5, (void*)&chunk};
