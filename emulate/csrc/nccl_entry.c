// NCCL's calls that move data, and the small rest of its interface.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "nccl_comm.h"

#define API __attribute__((visibility("default")))

static ncclResult_t add(task t, const char* name, ncclRedOp_t op) {
  ncclComm_t comm = t.comm;
  if (!comm || !comm->is_initialized || comm->is_aborted) {
    const bool is_starting = comm && !comm->is_blocking && atomic_load(&comm->state) == ncclInProgress;
    return is_starting ? ncclInProgress : comm_fail(comm, ncclInvalidArgument, "%s: the communicator is not usable", name);
  }
  if ((unsigned)t.type >= ncclNumTypes) return comm_fail(comm, ncclInvalidArgument, "%s: type %d", name, (int)t.type);
  if (t.root < 0 || t.root >= comm->num_ranks) return comm_fail(comm, ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", name, t.root, comm->num_ranks);
  t.how.op = op;
  if (op >= ncclNumOps) {
    const uint64_t index = (uint64_t)op - ncclNumOps;
    if (index >= MAX_USER_OPS || !(comm->user_ops_used >> index & 1)) return comm_fail(comm, ncclInvalidArgument, "%s: operator %d is unknown to this communicator", name, (int)op);
    t.how = comm->user_ops[index];
  }
  t.call_handle = profiler_call(&t);
  return group_add_task(&t);
}

// A call's own configuration. Its cluster size and policy choose among kernels of NCCL's own, which are one here.
static ncclResult_t configure(task* t, const ncclCollConfig_t* config, const char* name) {
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_API_MAGIC || config->size < sizeof(*config)) {
    return comm_fail(t->comm, ncclInvalidArgument, "%s: ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER", name);
  }
  const int least = config->minCTAs, most = config->maxCTAs, unset = NCCL_CONFIG_UNDEF_INT;
  const bool is_sound = (least == unset || least > 0) && (most == unset || (most > 0 && least <= most));
  if (!is_sound || (t->comm && most > t->comm->limits.most)) {
    return comm_fail(t->comm, ncclInvalidArgument, "%s: minCTAs/maxCTAs %d/%d", name, least, most);
  }
  if (config->algSelection && *config->algSelection && config->forceAlgSelection) {
    fprintf(stderr, "lagom emulate: %s: algSelection \"%s\" is not there on the emulated NCCL\n", name, config->algSelection);
    return comm_fail(t->comm, ncclInvalidUsage, "%s: algSelection is not there on the emulated NCCL", name);
  }
  t->limits = (channel_limits){least > 0 ? least : 0, most > 0 ? most : 0, config->nvlsCTAs > 0 ? config->nvlsCTAs : 0};
  t->launched = config->launchCompletionEvent;
  return ncclSuccess;
}

// Each collective plain, and with a configuration (2.32).
#define COLLECTIVE(name, parameters, arguments, fields, op)                                                        \
  API ncclResult_t nccl##name##Config(parameters, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) { \
    task t = {fields, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .stream = stream}; \
    const ncclResult_t result = configure(&t, config, #name);                                                      \
    return result ? result : add(t, #name, op);                                                                    \
  }                                                                                                                \
  API ncclResult_t nccl##name(parameters, ncclComm_t comm, cudaStream_t stream) {                                  \
    return nccl##name##Config(arguments, comm, stream, NULL);                                                      \
  }
#define WITH(...) __VA_ARGS__
#define BUFFERS const void *send, void *receive, size_t count, ncclDataType_t type
#define GIVEN send, receive, count, type

COLLECTIVE(AllReduce, WITH(BUFFERS, ncclRedOp_t op), WITH(GIVEN, op), .kind = TASK_ALL_REDUCE, op)
COLLECTIVE(Reduce, WITH(BUFFERS, ncclRedOp_t op, int root), WITH(GIVEN, op, root), WITH(.kind = TASK_REDUCE, .root = root), op)
COLLECTIVE(Broadcast, WITH(BUFFERS, int root), WITH(GIVEN, root), WITH(.kind = TASK_BROADCAST, .root = root), ncclSum)
COLLECTIVE(ReduceScatter, WITH(BUFFERS, ncclRedOp_t op), WITH(GIVEN, op), .kind = TASK_REDUCE_SCATTER, op)
COLLECTIVE(AllGather, WITH(BUFFERS), WITH(GIVEN), .kind = TASK_ALL_GATHER, ncclSum)
COLLECTIVE(AlltoAll, WITH(BUFFERS), WITH(GIVEN), .kind = TASK_ALL_TO_ALL, ncclSum)
COLLECTIVE(Gather, WITH(BUFFERS, int root), WITH(GIVEN, root), WITH(.kind = TASK_GATHER, .root = root), ncclSum)
COLLECTIVE(Scatter, WITH(BUFFERS, int root), WITH(GIVEN, root), WITH(.kind = TASK_SCATTER, .root = root), ncclSum)

API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add((task){.kind = TASK_SEND, .comm = comm, .send = send, .count = count, .type = type, .root = peer, .stream = stream}, "Send", ncclSum);
}

API ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add((task){.kind = TASK_RECEIVE, .comm = comm, .receive = receive, .count = count, .type = type, .root = peer, .stream = stream}, "Recv", ncclSum);
}

// A scalar in device memory is read when the operator is made, not when a collective runs.
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm) {
  (void)residence;
  if (!op || !scalar || !comm || (unsigned)type >= ncclNumTypes) return comm_fail(comm, ncclInvalidArgument, "ncclRedOpCreatePreMulSum: an argument is missing");
  for (unsigned i = 0; i < MAX_USER_OPS; i++) {
    if (comm->user_ops_used >> i & 1) continue;
    comm->user_ops_used |= (uint64_t)1 << i;
    const double factor = scalar_value(scalar, type);
    comm->user_ops[i] = (reduction){.op = ncclSum, .has_factor = 1, .factor = factor, .integer = type < ncclFloat16 ? (int64_t)factor : 0};
    *op = (ncclRedOp_t)(ncclNumOps + i);
    return ncclSuccess;
  }
  return comm_fail(comm, ncclInternalError, "more than %d operators of one communicator", MAX_USER_OPS);
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const uint64_t index = (uint64_t)op - ncclNumOps;
  if (!comm || op < ncclNumOps || index >= MAX_USER_OPS || !(comm->user_ops_used >> index & 1)) {
    return comm_fail(comm, ncclInvalidArgument, "ncclRedOpDestroy : operator %d is not one of this communicator's own", (int)op);
  }
  comm->user_ops_used &= ~((uint64_t)1 << index);
  return ncclSuccess;
}

API ncclResult_t ncclGetVersion(int* version) {
  if (!version) return comm_fail(NULL, ncclInvalidArgument, "ncclGetVersion: no place for it");
  *version = model_release();
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {
      "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers", "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)", "remote process exited or there was a network error", "NCCL operation in progress",
      "NCCL operation timed out"};
  return (unsigned)result < sizeof(texts) / sizeof(*texts) ? texts[result] : "unknown result code";
}

API void ncclResetDebugInit(void) {}

API ncclResult_t ncclMemAlloc(void** at, size_t bytes) {
  CUdeviceptr memory = 0;
  if (!at) return comm_fail(NULL, ncclInvalidArgument, "ncclMemAlloc: no place for the address");
  if (cuMemAlloc_v2(&memory, bytes)) return comm_fail(NULL, ncclUnhandledCudaError, "out of memory: %zu bytes", bytes);
  *at = (void*)memory;
  return ncclSuccess;
}

API ncclResult_t ncclMemFree(void* at) { return at && cuMemFree_v2((CUdeviceptr)at) ? ncclUnhandledCudaError : ncclSuccess; }

// Registered buffers change nothing: no transport of ours copies to or from them directly.
typedef struct {
  void* buffer;
  size_t bytes;
} registration;

static ncclResult_t register_buffer(ncclComm_t comm, void* buffer, size_t bytes, void** handle) {
  if (!comm || !buffer || !handle || !bytes) return comm_fail(comm, ncclInvalidArgument, "a buffer of no bytes cannot be registered");
  registration* r = malloc(sizeof(*r));
  *r = (registration){buffer, bytes};
  *handle = r;
  return ncclSuccess;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t bytes, void** handle) { return register_buffer(comm, buffer, bytes, handle); }

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  if (!comm) return comm_fail(NULL, ncclInvalidArgument, "ncclCommDeregister: no communicator");
  free(handle);
  return ncclSuccess;
}

API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t bytes, ncclWindow_t* window, int flags) {
  (void)flags;
  return register_buffer(comm, buffer, bytes, window);
}

API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) { return ncclCommDeregister(comm, window); }

API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** buffer) {
  if (!comm || !window || !buffer) return comm_fail(comm, ncclInvalidArgument, "ncclWinGetUserPtr: no window");
  *buffer = ((registration*)window)->buffer;
  return ncclSuccess;
}

API ncclResult_t ncclCommMemStats(ncclComm_t comm, int what, uint64_t* value) {
  if (!comm || !value || what < 0 || what > 3) return comm_fail(comm, ncclInvalidArgument, "ncclCommMemStats: statistic %d", what);
  *value = 0;
  return ncclSuccess;
}

// What the emulated NCCL does not have is refused by name.
#define REFUSED(name)                                                                         \
  API ncclResult_t name(void);                                                                \
  API ncclResult_t name(void) {                                                               \
    fprintf(stderr, "lagom emulate: %s is not there on the emulated NCCL\n", #name);          \
    return comm_fail(NULL, ncclInvalidUsage, "%s is not there on the emulated NCCL", #name);  \
  }
REFUSED(ncclCommGetUniqueId)
REFUSED(ncclCommGrow)
REFUSED(ncclCommSuspend)
REFUSED(ncclCommResume)
REFUSED(ncclDevCommCreate)
REFUSED(ncclDevCommDestroy)
REFUSED(ncclGetLsaMultimemDevicePointer)
REFUSED(ncclGetPeerDevicePointer)
REFUSED(ncclPutSignal)
REFUSED(ncclSignal)
REFUSED(ncclWaitSignal)
REFUSED(ncclSetEncryption)
