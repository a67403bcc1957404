// Groups: what is called between ncclGroupStart and the last ncclGroupEnd of a thread is issued together.
#include <stdlib.h>
#include <string.h>

#include "nccl_comm.h"

#define API __attribute__((visibility("default")))

typedef struct {
  group_job run;
  void* argument;
  ncclComm_t comm;
  ncclResult_t result;
  pthread_t thread;
  bool has_thread;
} job;

static _Thread_local int depth;
static _Thread_local task* tasks;
static _Thread_local int num_tasks, cap_tasks;
static _Thread_local job* jobs;
static _Thread_local int num_jobs, cap_jobs;
static _Thread_local ncclResult_t first_error;

static void* run_job(void* argument) {
  job* j = argument;
  j->result = j->run(j->argument);
  return NULL;
}

static void* run_in_background(void* argument) {
  job j = *(job*)argument;
  free(argument);
  const ncclResult_t result = j.run(j.argument);
  atomic_store(&j.comm->state, (int)result);
  return NULL;
}

static ncclResult_t start_in_background(group_job run, void* argument, ncclComm_t comm) {
  job* j = calloc(1, sizeof(*j));
  *j = (job){.run = run, .argument = argument, .comm = comm};
  atomic_store(&comm->state, (int)ncclInProgress);
  if (pthread_create(&comm->initializer, NULL, run_in_background, j)) {
    free(j);
    return ncclSystemError;
  }
  comm->has_initializer = true;
  return ncclInProgress;
}

ncclResult_t group_run_job(group_job run, void* argument, ncclComm_t comm) {
  if (comm && !comm->is_blocking) return start_in_background(run, argument, comm);
  if (!depth) return run(argument);
  if (num_jobs == cap_jobs) {
    cap_jobs = cap_jobs ? 2 * cap_jobs : 16;
    jobs = realloc(jobs, (size_t)cap_jobs * sizeof(*jobs));
  }
  jobs[num_jobs++] = (job){.run = run, .argument = argument, .comm = comm};
  return ncclSuccess;
}

// All at once, since each may wait for the others.
static ncclResult_t finish_jobs(void) {
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < num_jobs; i++) {
    jobs[i].has_thread = num_jobs > 1 && !pthread_create(&jobs[i].thread, NULL, run_job, &jobs[i]);
    if (!jobs[i].has_thread) run_job(&jobs[i]);
  }
  for (int i = 0; i < num_jobs; i++) {
    if (jobs[i].has_thread) pthread_join(jobs[i].thread, NULL);
    if (jobs[i].result && !result) result = jobs[i].result;
  }
  num_jobs = 0;
  return result;
}

// One communicator after the other, in the order of their first calls.
static ncclResult_t issue(bool is_simulated, float* predicted_us) {
  task** own = calloc((size_t)num_tasks + 1, sizeof(*own));
  bool* done = calloc((size_t)num_tasks + 1, sizeof(*done));
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < num_tasks && !result; i++) {
    int n = 0;
    for (int k = i; k < num_tasks && !done[i]; k++) {
      if (tasks[k].comm == tasks[i].comm) own[n++] = &tasks[k];
    }
    for (int k = 0; k < n; k++) done[own[k] - tasks] = true;
    if (n) result = run_tasks(tasks[i].comm, own, n, is_simulated, predicted_us);
  }
  free(own);
  free(done);
  return result;
}

static ncclResult_t finish(bool is_simulated, float* predicted_us) {
  ncclResult_t result = first_error;
  if (!result) result = finish_jobs();
  if (!result && num_tasks) result = issue(is_simulated, predicted_us);
  num_tasks = num_jobs = 0;
  first_error = ncclSuccess;
  return result;
}

ncclResult_t group_add_task(const task* t) {
  if (num_tasks == cap_tasks) {
    cap_tasks = cap_tasks ? 2 * cap_tasks : 64;
    tasks = realloc(tasks, (size_t)cap_tasks * sizeof(*tasks));
  }
  tasks[num_tasks++] = *t;
  return depth ? ncclSuccess : finish(false, NULL);
}

API ncclResult_t ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
  if (!depth) {
    comm_fail(NULL, ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    return ncclInvalidUsage;
  }
  return --depth ? ncclSuccess : finish(false, NULL);
}

API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (!depth || (info && info->magic != 0x74685283)) return comm_fail(NULL, ncclInvalidUsage, "ncclGroupSimulateEnd: not in a group call");
  if (--depth) return ncclSuccess;
  float predicted_us = 0;
  const ncclResult_t result = finish(true, &predicted_us);
  if (info) info->estimatedTime = predicted_us;
  return result;
}
