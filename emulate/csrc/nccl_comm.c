// Communicators: made from a unique id or from others, ended, asked.
#define _GNU_SOURCE
#include "nccl_comm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "device.h"
#include "driver.h"

#define API __attribute__((visibility("default")))

CUresult cuCtxGetCurrent(CUcontext *context);

static const char ID_MAGIC[8] = "lagomid";
static _Thread_local char last_error[512];

ncclResult_t comm_fail(ncclComm_t comm, ncclResult_t result, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  if (comm) {
    snprintf(comm->error, sizeof(comm->error), "%s", last_error);
    atomic_store(&comm->state, (int)result);
  }
  log_line(NCCL_WARN, 0, comm ? comm->device : 0, "%s", last_error);
  return result;
}

ncclResult_t comm_refuse(ncclComm_t comm, const char* text) {
  char line[512];
  snprintf(line, sizeof(line), "--symmetric: %s", text);
  lagom_emulated_gpu.refuse(line);
  return comm_fail(comm, ncclInvalidUsage, "%s", line);
}

bool comm_has_process(ncclComm_t comm, int rank) {
  const members* m = &comm->members;
  return m->hosts[rank] == m->hosts[comm->rank] || m->num_present == comm->num_ranks;
}

static uint64_t hash_of(const void* bytes, size_t num_bytes, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (size_t i = 0; i < num_bytes; i++) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3u;
  hash ^= hash >> 31;
  return hash * 0x9e3779b97f4a7c15u;
}

static shared_key derived_key(const shared_key* from, uint64_t number, uint64_t what) {
  const uint64_t mixed[2] = {number, what};
  const uint64_t first = hash_of(from, sizeof(*from), hash_of(mixed, sizeof(mixed), 1));
  const uint64_t second = hash_of(from, sizeof(*from), first ^ hash_of(mixed, sizeof(mixed), 2));
  shared_key key;
  memcpy(key.bytes, &first, 8);
  memcpy(key.bytes + 8, &second, 8);
  return key;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return comm_fail(NULL, ncclInvalidArgument, "ncclGetUniqueId: no place for the id");
  memset(id, 0, sizeof(*id));
  memcpy(id->internal, ID_MAGIC, sizeof(ID_MAGIC));
  if (getrandom(id->internal + 8, 16, 0) != 16) return comm_fail(NULL, ncclSystemError, "no random numbers");
  return ncclSuccess;
}

static int current_device(void) {
  CUdevice device = 0;
  return cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : 0;
}

static bool covers(const ncclConfig_t* config, size_t offset, size_t bytes) { return config && config->size >= offset + bytes; }

// A configuration's limits of channels, as parseCommConfig reads them (init.cc, NCCL 2.21 to 2.30): a least without a most
// is refused, too, because what is not said is the smallest number.
static ncclResult_t check_limits(const ncclConfig_t* config) {
  const bool is_new = covers(config, offsetof(ncclConfig_t, maxCTAs), 4);
  const int least = is_new ? config->minCTAs : NCCL_CONFIG_UNDEF_INT, most = is_new ? config->maxCTAs : NCCL_CONFIG_UNDEF_INT;
  const bool has_nvls = covers(config, offsetof(ncclConfig_t, nvlsCTAs), 4) && config->nvlsCTAs != NCCL_CONFIG_UNDEF_INT;
  if (has_nvls && config->nvlsCTAs <= 0) return comm_fail(NULL, ncclInvalidArgument, "Invalid config nvlsCTAs attribute value %d", config->nvlsCTAs);
  const bool is_sound = (least == NCCL_CONFIG_UNDEF_INT || least > 0) && (most == NCCL_CONFIG_UNDEF_INT || most > 0) && least <= most;
  return is_sound ? ncclSuccess : comm_fail(NULL, ncclInvalidArgument, "Invalid config min/max channels attribute value %d/%d", least, most);
}

static ncclComm_t new_comm(int num_ranks, int rank, const ncclConfig_t* config) {
  ncclComm_t comm = calloc(1, sizeof(*comm));
  comm->num_ranks = num_ranks, comm->rank = rank, comm->device = current_device();
  comm->physical_device = (int)lagom_emulated_gpu.physical_device((uint32_t)comm->device);
  comm->host = (int)lagom_emulated_gpu.preset()->host_index;
  comm->is_blocking = !(covers(config, offsetof(ncclConfig_t, blocking), 4) && config->blocking == 0);
  channel_limits asked = {0, 0, 0};
  if (covers(config, offsetof(ncclConfig_t, minCTAs), 4) && config->minCTAs > 0) asked.least = config->minCTAs;
  if (covers(config, offsetof(ncclConfig_t, maxCTAs), 4) && config->maxCTAs > 0) asked.most = config->maxCTAs;
  if (covers(config, offsetof(ncclConfig_t, nvlsCTAs), 4) && config->nvlsCTAs > 0) asked.nvls = config->nvlsCTAs;
  comm->limits = settings_limits(asked);
  if (covers(config, offsetof(ncclConfig_t, commName), 8) && config->commName) snprintf(comm->name, sizeof(comm->name), "%s", config->commName);
  comm->sequence = calloc(1, sizeof(*comm->sequence));
  comm->pair_sequences = calloc(2 * (size_t)num_ranks, sizeof(*comm->pair_sequences));
  return comm;
}

static void free_comm(ncclComm_t comm) {
  members_free(&comm->members);
  free(comm);
}

// Who the ranks are, and this rank's place among their processes. `group` is NULL where nobody knows them.
static ncclResult_t join(ncclComm_t comm, const emulated_group* group) {
  char text[256];
  ncclResult_t result = ncclSuccess;
  if (!group || comm->num_ranks == 1) members_all(&comm->members, comm->num_ranks, comm->rank);
  else result = members_of_group(&comm->members, comm->num_ranks, comm->rank, group, text, sizeof(text));
  if (result) return comm_refuse(NULL, text);
  if (comm->num_ranks == 1) return ncclSuccess;
  const members* m = &comm->members;
  comm->shared = shared_attach(&comm->key, m->num_present, m->own, comm->physical_device, comm->host, &result);
  return result ? comm_fail(NULL, result, "%s", shared_error()) : ncclSuccess;
}

static ncclResult_t check_devices(ncclComm_t comm) {
  const char* shares = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const shared_member* own = shared_member_of(comm->shared, comm->members.own);
  for (int r = 0; r < comm->members.num_present && !(shares && *shares == '1'); r++) {
    const shared_member* m = shared_member_of(comm->shared, r);
    if (r != comm->members.own && m->host == own->host && m->device == own->device) {
      return comm_fail(comm, ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", comm->rank, r,
                       (unsigned)own->device);
    }
  }
  return ncclSuccess;
}

static ncclResult_t init_job(void* argument) {
  ncclComm_t comm = argument;
  ncclResult_t result = ncclSuccess;
  comm->num_nodes = 1;
  if (comm->num_ranks > 1) {
    result = shared_wait_for_all(comm->shared);
    if (result) return comm_fail(comm, result, "%s", shared_error());
    result = check_devices(comm);
    if (result) return result;
    for (int r = 0; r < comm->num_ranks && comm->members.num_present == comm->num_ranks; r++) {
      comm->members.hosts[r] = shared_member_of(comm->shared, r)->host;
    }
    comm->num_nodes = members_count_hosts(&comm->members, comm->num_ranks);
    bool denied[5][7][3];
    const char* unread = settings_deny(model_release(), denied);
    if (unread) return comm_fail(comm, ncclInvalidUsage, "%s=%s: unknown name or missing kind", unread, getenv(unread));
    comm->decider = model_decider(comm->num_ranks, comm->num_nodes, comm->hash, comm->limits, denied);
    if (!comm->decider) return comm_fail(comm, ncclInternalError, "the tuner plug-in could not be initialized");
  }
  if (comm->num_ranks > 1) profiler_begin(comm);
  comm->is_initialized = true;
  log_line(NCCL_INFO, NCCL_SUBSYS_INIT, comm->device, "ncclCommInitRankConfig comm %p rank %d nranks %d cudaDev %d nNodes %d commId 0x%llx - Init COMPLETE",
           (void*)comm, comm->rank, comm->num_ranks, comm->device, comm->num_nodes, (unsigned long long)comm->hash);
  return ncclSuccess;
}

// Takes the rank's place at once, so that ranks of one thread do not wait for each other.
static ncclResult_t begin(ncclComm_t comm, const shared_key* key, ncclComm_t* out) {
  emulated_group group = {.ranks = NULL};
  const bool is_symmetric = members_are_symmetric();
  if (is_symmetric) lagom_emulated_gpu.take_group(&group);
  comm->key = *key;
  comm->hash = hash_of(key, sizeof(*key), 3);
  const ncclResult_t result = join(comm, is_symmetric ? &group : NULL);
  free(group.ranks);
  if (result) {
    free_comm(comm);
    return result;
  }
  *out = comm;
  return group_run_job(init_job, comm, comm);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (!out || num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return comm_fail(NULL, ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, num_ranks);
  }
  if (config && config->magic != NCCL_API_MAGIC) return comm_fail(NULL, ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  if (memcmp(id.internal, ID_MAGIC, sizeof(ID_MAGIC))) return comm_fail(NULL, ncclInvalidArgument, "the unique id is not from ncclGetUniqueId of the emulated NCCL");
  if (check_limits(config)) return ncclInvalidArgument;
  shared_key key;
  memcpy(key.bytes, id.internal + 8, sizeof(key));
  return begin(new_comm(num_ranks, rank, config), &key, out);
}

API ncclResult_t ncclCommInitRank(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, num_ranks, id, rank, NULL);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int num_ranks, int rank, int num_ids, ncclUniqueId* ids, ncclConfig_t* config) {
  if (!ids || num_ids < 1) return comm_fail(NULL, ncclInvalidArgument, "no unique id");
  return ncclCommInitRankConfig(out, num_ranks, ids[0], rank, config);
}

API ncclResult_t ncclGroupStart(void);
API ncclResult_t ncclGroupEnd(void);

API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int num_devices, const int* devices) {
  ncclUniqueId id;
  CUcontext context, before = NULL;
  ncclResult_t result = comms && num_devices > 0 ? ncclGetUniqueId(&id) : ncclInvalidArgument;
  if (result) return comm_fail(NULL, result, "ncclCommInitAll: no communicators asked for");
  cuCtxGetCurrent(&before);
  ncclGroupStart();
  for (int r = 0; r < num_devices && !result; r++) {
    if (cuDevicePrimaryCtxRetain(&context, devices ? devices[r] : r) || cuCtxSetCurrent(context)) result = ncclUnhandledCudaError;
    else result = ncclCommInitRank(&comms[r], num_devices, id, r);
  }
  const ncclResult_t ended = ncclGroupEnd();
  cuCtxSetCurrent(before);
  return result ? result : ended;
}

typedef struct {
  ncclComm_t parent;
  int color, key;
  ncclComm_t* out;
  ncclConfig_t config;
  bool has_config;
  emulated_group group;
} split_request;

static bool has_absent(ncclComm_t comm) { return comm->members.num_present < comm->num_ranks; }

static ncclResult_t split_job(void* argument) {
  split_request q = *(split_request*)argument;
  free(argument);
  const int n = q.parent->members.num_present;
  int note[NOTE_BYTES / 4] = {q.color, q.key}, *all = calloc((size_t)n, NOTE_BYTES);
  ncclResult_t result = ncclSuccess;
  int rank = 0, num_ranks = 0;
  if (n > 1) result = shared_gather_notes(q.parent->shared, note, all);
  else memcpy(all, note, NOTE_BYTES);
  if (has_absent(q.parent) && q.group.ranks) rank = q.group.own, num_ranks = q.group.num_ranks;
  for (int r = 0; r < n && !result && !has_absent(q.parent); r++) {
    const int color = all[(size_t)r * NOTE_BYTES / 4], key = all[(size_t)r * NOTE_BYTES / 4 + 1];
    if (color != q.color) continue;
    num_ranks++;
    rank += key < q.key || (key == q.key && r < q.parent->rank);
  }
  free(all);
  const uint64_t number = ++q.parent->num_children;
  *q.out = NULL;
  if (result || q.color == NCCL_SPLIT_NOCOLOR) free(q.group.ranks);
  if (result) return comm_fail(q.parent, result, "%s", shared_error());
  if (q.color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  if (!num_ranks) return comm_refuse(q.parent, "a split of a communicator that torch.distributed did not ask for");
  const shared_key key = derived_key(&q.parent->key, number, (uint64_t)(uint32_t)q.color);
  ncclComm_t comm = new_comm(num_ranks, rank, q.has_config ? &q.config : NULL);
  if (!q.has_config) comm->limits = q.parent->limits;
  comm->device = q.parent->device, comm->physical_device = q.parent->physical_device;
  comm->is_blocking = true;  // the parent waits here in any case
  comm->key = key, comm->hash = hash_of(&key, sizeof(key), 3);
  result = join(comm, has_absent(q.parent) ? &q.group : NULL);
  free(q.group.ranks);
  if (result) free_comm(comm);
  else result = init_job(comm);
  char why[sizeof(last_error)];
  memcpy(why, last_error, sizeof(why));
  if (result) return comm_fail(q.parent, result, "%s", why);
  *q.out = comm;
  return ncclSuccess;
}

static bool is_usable(ncclComm_t comm) { return comm && comm->is_initialized && !comm->is_aborted; }

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  if (!is_usable(comm) || !out || (color < 0 && color != NCCL_SPLIT_NOCOLOR)) return comm_fail(comm, ncclInvalidArgument, "ncclCommSplit: color %d", color);
  if (check_limits(config)) return ncclInvalidArgument;
  split_request* q = calloc(1, sizeof(*q));
  *q = (split_request){.parent = comm, .color = color, .key = key, .out = out, .has_config = config != NULL};
  if (config) memcpy(&q->config, config, config->size < sizeof(q->config) ? config->size : sizeof(q->config));
  if (members_are_symmetric()) lagom_emulated_gpu.take_group(&q->group);
  return group_run_job(split_job, q, NULL);
}

API ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int num_excluded, ncclComm_t* out, ncclConfig_t* config, int flags) {
  if (members_are_symmetric()) return comm_refuse(comm, "a communicator cannot lose ranks (ncclCommShrink)");
  if (!comm || !out || num_excluded < 0 || num_excluded >= comm->num_ranks || (num_excluded && !excluded)) {
    return comm_fail(comm, ncclInvalidArgument, "ncclCommShrink: %d of %d ranks excluded", num_excluded, comm ? comm->num_ranks : 0);
  }
  int rank = comm->rank;
  for (int i = 0; i < num_excluded; i++) {
    if (excluded[i] == comm->rank) return comm_fail(comm, ncclInvalidArgument, "ncclCommShrink: rank %d excludes itself", rank);
    if (excluded[i] < comm->rank) rank--;
  }
  if (flags & 1 && comm->shared) shared_abort(comm->shared);
  const shared_key key = derived_key(&comm->key, ++comm->num_children, hash_of(excluded, (size_t)num_excluded * sizeof(*excluded), 4));
  return begin(new_comm(comm->num_ranks - num_excluded, rank, config), &key, out);
}

static void end(ncclComm_t comm) {
  if (comm->has_initializer) pthread_join(comm->initializer, NULL);
  comm->has_initializer = false;
  pending_finish(comm);
  profiler_end(comm);
  if (comm->decider) fake_comm_finalize(comm->decider);
  comm->decider = NULL;
  if (comm->shared) shared_detach(comm->shared);
  comm->shared = NULL;
  if (comm->done) cuEventDestroy_v2(comm->done);
  if (comm->num_not_computed) {
    log_line(NCCL_INFO, NCCL_SUBSYS_INIT, comm->device, "comm %p: %llu operations computed exactly, %llu larger ones not computed", (void*)comm,
             (unsigned long long)comm->num_exact, (unsigned long long)comm->num_not_computed);
  }
  free_comm(comm);  // its sequences stay: graphs may hold them
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!comm || comm->is_finalized) return comm_fail(comm, ncclInvalidArgument, "ncclCommFinalize: no communicator, or finalized before");
  comm->is_finalized = true;
  pending_finish(comm);
  return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm) end(comm);
  return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  comm->is_aborted = true;
  if (comm->shared) shared_abort(comm->shared);
  pending_finish(comm);
  // Another thread of this process may still be waking from a wait: what it reads stays mapped.
  if (comm->has_initializer) pthread_join(comm->initializer, NULL);
  comm->has_initializer = false;
  atomic_store(&comm->state, (int)ncclSystemError);
  if (comm->decider) fake_comm_finalize(comm->decider);
  comm->decider = NULL;
  return ncclSuccess;
}

API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (!comm || flags) return comm_fail(comm, ncclInvalidArgument, "ncclCommRevoke: flags %d", flags);
  if (comm->shared) shared_abort(comm->shared);
  pending_finish(comm);
  return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm || !error) return comm_fail(comm, ncclInvalidArgument, "ncclCommGetAsyncError: no communicator");
  *error = (ncclResult_t)atomic_load(&comm->state);
  return ncclSuccess;
}

API const char* ncclGetLastError(ncclComm_t comm) { return comm && *comm->error ? comm->error : last_error; }

API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (!comm || !count) return comm_fail(NULL, ncclInvalidArgument, "ncclCommCount: no communicator");
  *count = comm->num_ranks;
  return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (!comm || !device) return comm_fail(NULL, ncclInvalidArgument, "ncclCommCuDevice: no communicator");
  *device = comm->device;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (!comm || !rank) return comm_fail(NULL, ncclInvalidArgument, "ncclCommUserRank: no communicator");
  *rank = comm->rank;
  return ncclSuccess;
}
