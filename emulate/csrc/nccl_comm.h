// A communicator of the stand-in for NCCL, and what its files share.
#ifndef LAGOM_NCCL_COMM_H
#define LAGOM_NCCL_COMM_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "nccl_api.h"
#include "nccl_data.h"
#include "nccl/nccl_host.h"
#include "nccl_members.h"
#include "nccl_shared.h"

enum { MAX_USER_OPS = 64, NCCL_INFO = 3, NCCL_WARN = 2, NCCL_SUBSYS_INIT = 1, NCCL_SUBSYS_COLL = 2, NCCL_SUBSYS_TUNING = 64 };

typedef struct {
  int least, most, nvls;  // of channels, as a configuration has them (minCTAs, maxCTAs, nvlsCTAs); 0: not said
} channel_limits;

struct ncclComm {
  shared_key key;
  shared* shared;  // NULL for a communicator of one
  uint64_t hash;
  members members;
  int rank, num_ranks, num_nodes, device, physical_device, host;
  bool is_blocking, is_initialized, is_finalized;
  _Atomic bool is_aborted;
  _Atomic int state;  // ncclResult_t
  char error[512], name[64];
  channel_limits limits;
  fake_comm* decider;
  struct profiled* profiled;  // nccl_profiler.c; NULL: no profiler plug-in
  uint64_t* sequence;        // operations of all ranks; outlives the communicator, as graphs do
  uint64_t* pair_sequences;  // to each rank, then from each rank
  struct CUevent_st* done;   // of its newest kernel; nccl_run.c
  uint64_t last_stream;      // the id of what that was issued on
  uint64_t last_capture;     // the graph that it was recorded into, 0 if none
  uint64_t num_children;
  uint64_t num_exact, num_not_computed;
  reduction user_ops[MAX_USER_OPS];
  uint64_t user_ops_used;
  pthread_t initializer;
  bool has_initializer;
};

enum task_kind {  // the five of the tuning model have its numbers
  TASK_BROADCAST,
  TASK_REDUCE,
  TASK_ALL_GATHER,
  TASK_REDUCE_SCATTER,
  TASK_ALL_REDUCE,
  TASK_ALL_TO_ALL,
  TASK_GATHER,
  TASK_SCATTER,
  TASK_SEND,
  TASK_RECEIVE,
};

typedef struct {
  enum task_kind kind;
  ncclComm_t comm;
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t type;
  reduction how;
  int root;  // or the peer
  void* stream;
  channel_limits limits;  // of this call alone
  void* launched;         // an event of the caller's, recorded where the kernel is launched; may be NULL
  fake_result decided;
  uint64_t given;  // number of the part in the exchange
  void* call_handle;  // the profiler plug-in's
} task;

// nccl_group.c
ncclResult_t group_add_task(const task* t);
typedef ncclResult_t (*group_job)(void* argument);
ncclResult_t group_run_job(group_job job, void* argument, ncclComm_t comm);  // now, or at the end of the group

// nccl_run.c: issues one communicator's tasks of a group.
ncclResult_t run_tasks(ncclComm_t comm, task** tasks, int num_tasks, bool is_simulated, float* predicted_us);

// nccl_pending.c
ncclResult_t pending_add(const task* t);     // gives the part of an exact operation; its result comes when it is needed
void pending_finish(ncclComm_t comm);        // brings all results of a communicator

// nccl_exchange.c
bool exchange_is_exact(const task* t);
ncclResult_t exchange_give(task* t);
ncclResult_t exchange_settle(task* t);
bool exchange_is_ready(const task* t);  // settling would not wait
const void* exchange_input(const task* t, size_t* num_bytes);
const void* exchange_output(const task* t, size_t* num_bytes);

// nccl_log.c
void log_line(int level, unsigned long subsystem, int device, const char* format, ...) __attribute__((format(printf, 4, 5)));
void log_tuner_line(int level, unsigned long subsystems, const char* text);

// nccl_model.c
int model_release(void);
fake_comm* model_decider(int num_ranks, int num_nodes, uint64_t comm_id, channel_limits limits, const bool denied[5][7][3]);

// nccl_settings.c. `settings_deny` returns the name of the variable that cannot be read, or NULL.
const char* settings_deny(int release, bool denied[5][7][3]);
channel_limits settings_limits(channel_limits asked);  // with the environment's, which come first
void settings_bound(channel_limits limits, uint32_t* channels, uint32_t* nvls_channels);

// nccl_profiler.c
void profiler_begin(ncclComm_t comm);
void* profiler_call(const task* t);  // the plug-in's handle of an API call
void profiler_launched(const task* t, uint64_t op_id);
void profiler_end(ncclComm_t comm);

// What symmetric ranks cannot have: an error here, and the line with which the coordinator ends the job.
ncclResult_t comm_refuse(ncclComm_t comm, const char* text);

bool comm_has_process(ncclComm_t comm, int rank);  // false: another stands for it

ncclResult_t comm_fail(ncclComm_t comm, ncclResult_t result, const char* format, ...) __attribute__((format(printf, 3, 4)));
#endif
