// One communicator's part of a group: NCCL's decisions, operations for the streams, and exact results.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/nccl_tuner_abi.h"
#include "device.h"
#include "driver.h"
#include "nccl_comm.h"

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);

static const char* const ALGORITHMS[7] = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"};
static const char* const PROTOCOLS[3] = {"ll", "ll128", "simple"};
static const char* const LOGGED_ALGORITHMS[7] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char* const LOGGED_PROTOCOLS[3] = {"LL", "LL128", "SIMPLE"};
static const char* const LOGGED_KINDS[] = {"Broadcast", "Reduce",  "AllGather", "ReduceScatter", "AllReduce",
                                           "AlltoAll",  "Gather", "Scatter",   "Send",          "Recv"};
static const char* const KINDS[] = {"broadcast",  "reduce",     "all_gather", "reduce_scatter", "all_reduce",
                                    "all_to_all", "all_to_all", "all_to_all", "send_recv",      "send_recv"};

static bool is_tuned(const task* t) { return t->kind <= TASK_ALL_REDUCE; }
static bool is_pair(const task* t) { return t->kind >= TASK_SEND; }

// As a tuner counts: the whole tensor.
static uint64_t whole_bytes(const task* t) {
  const uint64_t part = t->count * type_bytes(t->type);
  const bool is_wide = t->kind == TASK_ALL_GATHER || t->kind == TASK_REDUCE_SCATTER ||
                       (t->kind >= TASK_ALL_TO_ALL && t->kind <= TASK_SCATTER);
  return is_wide ? part * (uint64_t)t->comm->num_ranks : part;
}

// The switch sums integers and floats, and takes the largest and smallest of all but 32- and 64-bit floats.
static int limits_of(const task* t) {
  if (t->kind == TASK_ALL_GATHER || t->kind == TASK_BROADCAST) return 0;
  const bool is_scaled = t->how.op == ncclAvg || t->how.has_factor;
  const bool is_wide_float = t->type == ncclFloat32 || t->type == ncclFloat64;
  const bool is_known = t->type >= ncclInt32 && t->type <= ncclBfloat16;
  const bool is_sum = t->how.op == ncclSum, is_extreme = t->how.op == ncclMax || t->how.op == ncclMin;
  const bool by_switch = is_known && !is_scaled && (is_sum || (is_extreme && !is_wide_float));
  return (by_switch ? 0 : FAKE_NOT_NVLS) | (is_scaled ? FAKE_SCALED : 0);
}

// A call's own limits (ncclCollConfig_t), on what was chosen without them: the algorithm that fits fewer channels best is not
// looked for again.
static void bound_channels(task* t) {
  fake_result* r = &t->decided;
  const channel_limits l = t->limits;
  const bool by_switch = r->algorithm == NCCL_NVLS || r->algorithm == NCCL_NVLS_TREE;
  if (by_switch && l.nvls > 0 && r->num_channels > l.nvls) r->num_channels = l.nvls;
  if (l.most > 0 && r->num_channels > l.most) r->num_channels = l.most;
  if (l.least > r->num_channels) r->num_channels = l.least;
}

static ncclResult_t decide(ncclComm_t comm, task** tasks, int num_tasks, bool is_simulated) {
  fake_call* calls = calloc((size_t)num_tasks + 1, sizeof(*calls));
  fake_result* results = calloc((size_t)num_tasks + 1, sizeof(*results));
  int num_calls = 0;
  for (int i = 0; i < num_tasks; i++) {
    const task* t = tasks[i];
    const bool is_bytes = t->kind == TASK_ALL_GATHER || t->kind == TASK_BROADCAST;  // NCCL moves these as bytes
    if (!is_tuned(t)) continue;
    calls[num_calls++] = (fake_call){.num_bytes = whole_bytes(t),
                                     .kind = (int32_t)t->kind,
                                     .op_and_type = is_bytes ? 0 : (int32_t)t->how.op * 32 + (int32_t)t->type,
                                     .limits = limits_of(t),
                                     .element_bytes = is_bytes ? 1 : (int32_t)type_bytes(t->type)};
  }
  int faults = 0;
  if (num_calls) faults = fake_group(comm->decider, calls, num_calls, is_simulated ? FAKE_SIMULATE : 0, results);
  for (int i = 0, k = 0; i < num_tasks; i++) {
    if (!is_tuned(tasks[i])) continue;
    tasks[i]->decided = results[k++];
    bound_channels(tasks[i]);
  }
  free(calls);
  free(results);
  if (!faults) return ncclSuccess;
  if (faults & FAKE_FAULT_NO_CHOICE) {
    const bool is_asked = getenv("NCCL_ALGO") || getenv("NCCL_PROTO");
    return comm_fail(comm, is_asked ? ncclInvalidUsage : ncclInternalError, "No algorithm/protocol available");
  }
  if (faults & FAKE_FAULT_TUNER_ERROR) return comm_fail(comm, ncclInternalError, "the tuner plug-in returned an error");
  return comm_fail(comm, ncclInternalError, "the tuner plug-in asked for what crashes NCCL (faults %#x)", (unsigned)faults);
}

static void log_decision(const task* t) {
  const fake_result* r = &t->decided;
  const int release = model_release();
  const bool is_part = (t->kind == TASK_ALL_GATHER || t->kind == TASK_REDUCE_SCATTER) && release >= 22200;
  const unsigned long long bytes = is_part ? t->count * type_bytes(t->type) : whole_bytes(t);
  if (t->comm->rank || release < 22100) return;
  if (release >= 22400) {
    log_line(NCCL_INFO, NCCL_SUBSYS_TUNING, t->comm->device, "%s: %llu Bytes -> Algo %s proto %s channel{Lo..Hi}={%d..%d}", LOGGED_KINDS[t->kind],
             bytes, LOGGED_ALGORITHMS[r->algorithm], LOGGED_PROTOCOLS[r->protocol], r->channel, r->channel + r->num_channels - 1);
  } else {
    log_line(NCCL_INFO, NCCL_SUBSYS_TUNING, t->comm->device, "%s%s%llu Bytes -> Algo %d proto %d time %f", release >= 22300 ? LOGGED_KINDS[t->kind] : "",
             release >= 22300 ? ": " : "", bytes, r->algorithm, r->protocol, (double)r->predicted_us);
  }
}

// NCCL logs a group in the order in which it launches it.
static void log_decisions(task** tasks, int num_tasks) {
  for (uint32_t place = 0; place < (uint32_t)num_tasks; place++) {
    for (int i = 0; i < num_tasks; i++) {
      if (is_tuned(tasks[i]) && tasks[i]->decided.place == place) log_decision(tasks[i]);
    }
  }
}

// Names that profilers see; they are kept for the life of the process.
static const char* kept_name(const char* name) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static const char* names[256];
  static int num_names;
  const char* found = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_names && !found; i++) {
    if (!strcmp(names[i], name)) found = names[i];
  }
  if (!found && num_names < 256) found = names[num_names++] = strdup(name);
  pthread_mutex_unlock(&lock);
  return found ? found : "ncclDevKernel";
}

static const char* kernel_name(const task* t) {
  char name[128];
  const char* way = t->decided.algorithm == NCCL_TREE ? "TREE_LL" : "RING_LL";  // NCCL specialises no others
  const char* arguments = "(ncclDevKernelArgsStorage<4096ul>)";
  if (!is_tuned(t)) snprintf(name, sizeof(name), "ncclDevKernel_SendRecv%s", arguments);
  else if (t->kind == TASK_ALL_GATHER || t->kind == TASK_BROADCAST) snprintf(name, sizeof(name), "ncclDevKernel_%s_RING_LL%s", LOGGED_KINDS[t->kind], arguments);
  else snprintf(name, sizeof(name), "ncclDevKernel_%s_Sum_%s_%s%s", LOGGED_KINDS[t->kind], type_name(t->type), way, arguments);
  return kept_name(name);
}

static void name_comm(const task* t, char* name, size_t size) {
  const ncclComm_t c = t->comm;
  if (t->kind == TASK_SEND) snprintf(name, size, "%016llx/%d>%d", (unsigned long long)c->hash, c->rank, t->root);
  else if (t->kind == TASK_RECEIVE) snprintf(name, size, "%016llx/%d>%d", (unsigned long long)c->hash, t->root, c->rank);
  else snprintf(name, size, "%016llx", (unsigned long long)c->hash);
}

// A send and its receive are between two ranks, on one host or on two.
static int nodes_of(const task* t) {
  const ncclComm_t c = t->comm;
  if (t->kind < TASK_SEND) return c->num_nodes;
  return 1 + (c->members.hosts[c->rank] != c->members.hosts[t->root]);
}

static uint32_t describe(const task* t, bool is_exact) {
  char comm[64], json[768], way[160] = "\"algorithm\": null, \"protocol\": null";
  const fake_result* r = &t->decided;
  int channels = r->num_channels, threads = r->num_threads;
  unsigned long long chunk = r->chunk_bytes[1] ? r->chunk_bytes[1] : r->chunk_bytes[0] ? r->chunk_bytes[0] : r->chunk_bytes[2];
  name_comm(t, comm, sizeof(comm));
  if (is_tuned(t)) snprintf(way, sizeof(way), "\"algorithm\": \"%s\", \"protocol\": \"%s\"", ALGORITHMS[r->algorithm], PROTOCOLS[r->protocol]);
  snprintf(json, sizeof(json),
           "{\"collective\": {\"comm\": \"%s\", \"kind\": \"%s\", \"bytes\": %llu, \"dtype\": \"%s\", \"num_ranks\": %d, \"rank\": %d, "
           "\"present\": %d, \"nodes\": %d, %s, \"num_channels\": %d, \"num_threads\": %d, \"chunk_bytes\": %llu, \"grid\": %d, \"exact\": %s}, "
           "\"kernel\": \"%s\"}",
           comm, KINDS[t->kind], (unsigned long long)whole_bytes(t), type_name(t->type), is_pair(t) ? 2 : t->comm->num_ranks,
           is_pair(t) ? t->kind == TASK_RECEIVE : t->comm->rank, is_pair(t) ? 1 + comm_has_process(t->comm, t->root) : t->comm->members.num_present, nodes_of(t), way, channels, threads, chunk, channels,
           is_exact ? "true" : "false", kernel_name(t));
  return lagom_emulated_gpu.describe(json);
}

static uint64_t* sequence_of(const task* t) {
  if (t->kind < TASK_SEND) return t->comm->sequence;
  return &t->comm->pair_sequences[t->root + (t->kind == TASK_RECEIVE ? t->comm->num_ranks : 0)];
}

// Of a stream made where one was destroyed, another one than of that.
static uint64_t id_of(void* stream) {
  unsigned long long id = 0;
  cuStreamGetId(stream, &id);
  return id;
}

static uint64_t capture_of(void* stream) {
  int status = 0;
  uint64_t id = 0;
  cuStreamGetCaptureInfo_v3(stream, &status, &id, NULL, NULL, NULL, NULL);
  return id;
}

// A communicator's kernels run one after another on whatever streams they are issued: NCCL has each of them wait for the one before
// (ncclLaunchPrepare, by a stream of the communicator's own). Between graphs, and between them and other calls, that is left out.
static ncclResult_t follow_previous(ncclComm_t comm, void* stream) {
  if (!comm->done) return cuEventCreate(&comm->done, 2) ? comm_fail(comm, ncclUnhandledCudaError, "no event") : ncclSuccess;
  if (comm->last_stream == id_of(stream) || comm->last_capture != capture_of(stream)) return ncclSuccess;
  return cuStreamWaitEvent(stream, comm->done, 0) ? comm_fail(comm, ncclUnhandledCudaError, "a wait for the kernel before failed") : ncclSuccess;
}

static ncclResult_t note_launched(ncclComm_t comm, void* stream, uint64_t op_id) {
  comm->last_stream = id_of(stream), comm->last_capture = capture_of(stream);
  if (!comm->last_capture) {
    comm->done->op_id = op_id, comm->done->capture = NULL;
    return ncclSuccess;
  }
  return cuEventRecord(comm->done, stream) ? comm_fail(comm, ncclUnhandledCudaError, "a kernel's end was not noted") : ncclSuccess;
}

static ncclResult_t submit(task* t, bool is_exact) {
  const ncclResult_t ready = follow_previous(t->comm, t->stream);
  if (ready) return ready;
  if (t->launched && cuEventRecord(t->launched, t->stream)) return comm_fail(t->comm, ncclUnhandledCudaError, "launchCompletionEvent was not recorded");
  const uint32_t desc_id = describe(t, is_exact);
  const emulated_shape shape = {(unsigned)t->decided.num_channels, (unsigned)t->decided.num_threads};  // a block a channel
  uint64_t op_id = 0;
  if (lagom_emulated_gpu.submit(t->stream, desc_id, kernel_name(t), &shape, sequence_of(t), &op_id)) {
    return comm_fail(t->comm, ncclUnhandledCudaError, "the emulated device refused %s", LOGGED_KINDS[t->kind]);
  }
  profiler_launched(t, op_id);
  return note_launched(t->comm, t->stream, op_id);
}

// A communicator of one copies, if anything.
static ncclResult_t run_alone(task* t) {
  if (t->kind == TASK_SEND || t->send == t->receive || !t->count) return ncclSuccess;
  const size_t bytes = t->count * type_bytes(t->type);
  const CUresult result = cuMemcpyDtoDAsync_v2((CUdeviceptr)t->receive, (CUdeviceptr)t->send, bytes, t->stream);
  return result ? comm_fail(t->comm, ncclUnhandledCudaError, "a copy failed (%d)", result) : ncclSuccess;
}

// Pairs in an order that is the same on all ranks, so that no two ranks wait for each other; collectives stay in front.
static int by_pair(const void* a, const void* b) {
  const task *x = *(task* const*)a, *y = *(task* const*)b;
  const int x_from = x->kind == TASK_SEND ? x->comm->rank : x->root, y_from = y->kind == TASK_SEND ? y->comm->rank : y->root;
  const int x_to = x->kind == TASK_SEND ? x->root : x->comm->rank, y_to = y->kind == TASK_SEND ? y->root : y->comm->rank;
  if ((x->kind >= TASK_SEND) != (y->kind >= TASK_SEND)) return x->kind >= TASK_SEND ? 1 : -1;
  if (x->kind < TASK_SEND || (x_from == y_from && x_to == y_to)) return x < y ? -1 : x > y;
  return x_from != y_from ? x_from - y_from : x_to - y_to;
}

enum { MAX_SIDE_STREAMS = 2 * MAX_PAIRED_RANKS + 1 };

// Streams of our own, on which the pairs of a group run at once, as in NCCL's one kernel. Made at first use, for one device.
typedef struct {
  int device, num_streams;
  CUstream streams[MAX_SIDE_STREAMS];
  CUevent fork, join;
} side_streams;

static pthread_mutex_t sides_lock = PTHREAD_MUTEX_INITIALIZER;
static side_streams sides[16];

static side_streams* sides_of(int device, int num_streams) {  // needs the lock
  side_streams* s = &sides[device % 16];
  if (!s->fork && (cuEventCreate(&s->fork, 2) || cuEventCreate(&s->join, 2))) return NULL;
  while (s->num_streams < num_streams) {
    if (cuStreamCreateWithPriority(&s->streams[s->num_streams], 1, 0)) return NULL;
    s->num_streams++;
  }
  return s;
}

static uint64_t launch_cost_ns(void) {
  const char* text = getenv("LAGOM_EMULATION_LAUNCH_NS");
  return text && *text ? strtoull(text, NULL, 10) : 5000;
}

static uint64_t submit_beside(const side_streams* s, int at, const task* t, uint32_t desc_id, uint64_t after_op, uint64_t cost_ns) {
  const client_op op = {.device = (uint32_t)t->comm->physical_device,
                        .stream = s->streams[at]->number,
                        .desc_id = desc_id,
                        .after_op = after_op,
                        .instance = desc_id ? ++*sequence_of(t) : 0};
  return lagom_emulated_gpu.submit_op(&op, cost_ns);
}

static ncclResult_t submit_one_by_one(task** pairs, int num_pairs) {
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < num_pairs && !result; i++) result = submit(pairs[i], exchange_is_exact(pairs[i]));
  return result;
}

// Sends and receives of one group begin together after the user's stream, which goes on after the last of them.
static ncclResult_t submit_pairs(ncclComm_t comm, task** pairs, int num_pairs) {
  int is_capturing = 0;
  cuStreamIsCapturing(pairs[0]->stream, &is_capturing);
  if (num_pairs < 2 || is_capturing) return submit_one_by_one(pairs, num_pairs);
  const ncclResult_t ready = follow_previous(comm, pairs[0]->stream);
  if (ready) return ready;
  const int width = num_pairs < MAX_SIDE_STREAMS ? num_pairs : MAX_SIDE_STREAMS - 1;  // more take turns
  uint64_t last = 0;
  pthread_mutex_lock(&sides_lock);
  side_streams* s = sides_of(comm->device, width + 1);
  CUresult result = s ? cuEventRecord(s->fork, pairs[0]->stream) : CUDA_ERROR_OUT_OF_MEMORY;
  for (int i = 0; i < num_pairs && !result; i++) {
    const task* t = pairs[i];
    submit_beside(s, i % width, t, 0, s->fork->op_id, 0);
    const uint64_t op = submit_beside(s, i % width, t, describe(t, exchange_is_exact(t)), 0, i ? 0 : launch_cost_ns());
    last = submit_beside(s, width, t, 0, op, 0);
  }
  if (!result) {
    s->join->op_id = last, s->join->stream = s->streams[width]->number, s->join->device = s->fork->device;
    result = last ? cuStreamWaitEvent(pairs[0]->stream, s->join, 0) : CUDA_ERROR_OUT_OF_MEMORY;
  }
  pthread_mutex_unlock(&sides_lock);
  if (!result) note_launched(comm, pairs[0]->stream, last);
  return result ? comm_fail(comm, ncclUnhandledCudaError, "the emulated device refused sends and receives") : ncclSuccess;
}

// A send and a receive to oneself are one copy.
static ncclResult_t copy_own(task** tasks, int num_tasks, int rank) {
  task* sends[MAX_PAIRED_RANKS];
  int num_sends = 0, used = 0;
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < num_tasks; i++) {
    if (tasks[i]->kind == TASK_SEND && tasks[i]->root == rank && num_sends < MAX_PAIRED_RANKS) sends[num_sends++] = tasks[i];
  }
  for (int i = 0; i < num_tasks && !result; i++) {
    if (tasks[i]->kind != TASK_RECEIVE || tasks[i]->root != rank || used == num_sends) continue;
    tasks[i]->send = sends[used++]->send;
    result = run_alone(tasks[i]);
  }
  return result;
}

// The task of the same group that a rank's stand-in has in the place of this one with an absent peer; NULL: there is none, or there
// are several, of which nobody says which.
static const task* with_stand_in(const task* t, enum task_kind kind, task** tasks, int num_tasks) {
  const members* m = &t->comm->members;
  const task* found = NULL;
  for (int i = 0; i < num_tasks; i++) {
    const task* other = tasks[i];
    if (other->kind != kind || m->places[other->root] != m->places[t->root] || !comm_has_process(t->comm, other->root)) continue;
    if (found) return NULL;
    found = other;
  }
  return found;
}

// All send to all and receive from all of a host's ranks, once each: an exchange in which absent ranks have stand-ins. Anything else,
// such as a pipeline, would need what only the absent rank can send.
static bool can_stand_in(task* t, task** tasks, int num_tasks) {
  if (t->kind == TASK_SCATTER) return false;
  const task* sent = with_stand_in(t, TASK_SEND, tasks, num_tasks);
  const task* received = with_stand_in(t, TASK_RECEIVE, tasks, num_tasks);
  if (!sent || !received) return false;
  if (t->kind == TASK_RECEIVE && (received->count != t->count || received->type != t->type)) return false;
  if (t->kind == TASK_RECEIVE && received->root == t->comm->rank) t->send = sent->send;
  return true;
}

static ncclResult_t check_peers(ncclComm_t comm, task** tasks, int num_tasks) {
  char text[160];
  for (int i = 0; i < num_tasks; i++) {
    task* t = tasks[i];
    if ((!is_pair(t) && t->kind != TASK_SCATTER) || comm_has_process(comm, t->root) || can_stand_in(t, tasks, num_tasks)) continue;
    snprintf(text, sizeof(text), "%s: rank %d of a communicator of %d is on host %d, which is not started", LOGGED_KINDS[t->kind], t->root,
             comm->num_ranks, comm->members.hosts[t->root]);
    return comm_refuse(comm, text);
  }
  return ncclSuccess;
}

// Sends first; receives from absent ranks look at the messages that the others take.
static ncclResult_t give_parts(ncclComm_t comm, task** tasks, int num_tasks) {
  ncclResult_t result = ncclSuccess;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < num_tasks && !result; i++) {
      const task* t = tasks[i];
      const int own_round = t->kind != TASK_RECEIVE ? 0 : comm_has_process(comm, t->root) ? 2 : 1;
      if (own_round == round && exchange_is_exact(t)) result = pending_add(t);
    }
  }
  return result;
}

// The one that stands for an absent root of a broadcast gives what it gives as a root itself in the same group, which is how PyTorch
// gathers tensors of a list; without such a call, what it has.
static void give_for_absent_roots(ncclComm_t comm, task** tasks, int num_tasks) {
  for (int i = 0; i < num_tasks; i++) {
    task* t = tasks[i];
    if (t->kind != TASK_BROADCAST || comm_has_process(comm, t->root) || comm->members.places[t->root] != comm->members.own) continue;
    const task* own = NULL;
    for (int k = 0; k < num_tasks && !own; k++) {
      if (tasks[k]->kind == TASK_BROADCAST && tasks[k]->root == comm->rank && tasks[k]->count == t->count && tasks[k]->type == t->type) own = tasks[k];
    }
    t->send = own ? own->send : t->receive;
  }
}

ncclResult_t run_tasks(ncclComm_t comm, task** tasks, int num_tasks, bool is_simulated, float* predicted_us) {
  if (comm->num_ranks == 1) {
    ncclResult_t result = is_simulated ? ncclSuccess : copy_own(tasks, num_tasks, 0);
    for (int i = 0; i < num_tasks && !result && !is_simulated; i++) {
      if (tasks[i]->kind < TASK_SEND) result = run_alone(tasks[i]);
    }
    return result;
  }
  ncclResult_t result = check_peers(comm, tasks, num_tasks);
  if (!result) result = decide(comm, tasks, num_tasks, is_simulated);
  if (result) return result;
  for (int i = 0; i < num_tasks; i++) {
    if (predicted_us && is_tuned(tasks[i])) *predicted_us += tasks[i]->decided.predicted_us;
  }
  if (is_simulated) return ncclSuccess;
  give_for_absent_roots(comm, tasks, num_tasks);
  log_decisions(tasks, num_tasks);
  task** order = calloc((size_t)num_tasks + 1, sizeof(*order));
  int num_order = 0, num_collectives = 0;
  for (int i = 0; i < num_tasks; i++) {
    const task* t = tasks[i];
    if (!t->count || (t->kind >= TASK_SEND && t->root == comm->rank)) continue;
    if (exchange_is_exact(t)) comm->num_exact++;
    else comm->num_not_computed++;
    num_collectives += t->kind < TASK_SEND;
    order[num_order++] = tasks[i];
  }
  // Parts are given before the operation is issued: what has ended was given by all.
  result = give_parts(comm, order, num_order);
  qsort(order, (size_t)num_order, sizeof(*order), by_pair);
  for (int i = 0; i < num_collectives && !result; i++) result = submit(order[i], exchange_is_exact(order[i]));
  if (!result && num_order > num_collectives) result = submit_pairs(comm, order + num_collectives, num_order - num_collectives);
  free(order);
  return result ? result : copy_own(tasks, num_tasks, comm->rank);
}
