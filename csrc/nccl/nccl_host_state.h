// What the files of the NCCL host share: the state of a process and of a communicator.
#ifndef LAGOM_NCCL_HOST_STATE_H
#define LAGOM_NCCL_HOST_STATE_H
#include <stdbool.h>

#include "nccl_tuner_abi.h"
#include "nccl_host.h"

#define API __attribute__((visibility("default")))

enum { MAX_CALLS = 512 };

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
} host_task;

struct fake_comm {
  fake_host* host;
  fake_comm_spec spec;
  bool has_shape;
  nccl_shape shape;
  void* context;
  bool has_costs;
  float costs[21];
  bool denied[5][7][3];  // by kind, algorithm and protocol: NCCL_ALGO, NCCL_PROTO
  bool is_gather_v;  // the group being launched
  int num_tasks;
  int order[MAX_CALLS];
  host_task tasks[MAX_CALLS];
};

// Asks the tuner and chooses, as NCCL does for one call or for an aggregate of several.
void host_decide(fake_comm* comm, const fake_call* call, int num_pipe_ops, int flags, fake_result* r);
void* host_open_library(const char* name, const char* prefix);  // as NCCL finds a plug-in
void host_be_quiet(bool is_quiet);  // log lines are dropped

static inline uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
#endif
