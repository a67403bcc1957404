// Threads that allocate, copy, launch, record graphs and wait on one emulated device, for the sanitizers.
//   stress_device ROUNDS THREADS
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "driver.h"

#define CHECK(call)                                               \
  do {                                                            \
    int result_ = (call);                                         \
    if (result_) {                                                \
      fprintf(stderr, "%s: %d\n", #call, result_);                \
      exit(1);                                                    \
    }                                                             \
  } while (0)

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,
                        void **extra);

static int num_rounds;

static void count(void *argument) { __atomic_add_fetch((int *)argument, 1, __ATOMIC_RELAXED); }

static void run_graph(CUstream stream, CUdeviceptr at, CUfunction kernel) {
  CUstream side;
  CUevent fork, join;
  CUgraph graph;
  CUgraphExec exec;
  CHECK(cuStreamCreateWithPriority(&side, 1, -1));
  CHECK(cuEventCreate(&fork, 2));
  CHECK(cuEventCreate(&join, 2));
  CHECK(cuStreamBeginCapture_v2(stream, 1));
  CHECK(cuMemsetD8Async(at, 3, 100, stream));
  CHECK(cuEventRecord(fork, stream));
  CHECK(cuStreamWaitEvent(side, fork, 0));
  CHECK(cuLaunchKernel(kernel, 4, 1, 1, 128, 1, 1, 0, side, NULL, NULL));
  CHECK(cuEventRecord(join, side));
  CHECK(cuStreamWaitEvent(stream, join, 0));
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CHECK(cuGraphDestroy(graph));
  for (int i = 0; i < 3; i++) CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuEventDestroy_v2(fork));
  CHECK(cuEventDestroy_v2(join));
  CHECK(cuStreamDestroy_v2(side));
}

static void run_round(CUstream stream, CUfunction kernel, unsigned *seed) {
  static char zeros[100];
  size_t bytes = 1 + (size_t)rand_r(seed) % 3000000;
  CUdeviceptr at;
  CUevent from, to;
  char text[100], back[100];
  int num_called = 0;
  float ms;
  snprintf(text, sizeof text, "%u", *seed);
  memset(text + strlen(text), 0, sizeof text - strlen(text));
  CHECK(cuMemAlloc_v2(&at, bytes + 200));
  CHECK(cuEventCreate(&from, 0));
  CHECK(cuEventCreate(&to, 0));
  CHECK(cuEventRecord(from, stream));
  CHECK(cuMemcpy((CUdeviceptr)back, at + bytes, sizeof back));
  if (memcmp(back, zeros, sizeof back)) exit(2);  // new memory is zero
  CHECK(cuMemcpyAsync(at + bytes, (CUdeviceptr)text, sizeof text, stream));
  for (int i = 0; i < 20; i++) CHECK(cuLaunchKernel(kernel, 4, 1, 1, 128, 1, 1, 0, stream, NULL, NULL));
  for (int i = 0; i < 5; i++) CHECK(cuLaunchHostFunc(stream, count, &num_called));
  CHECK(cuEventRecord(to, stream));
  CHECK(cuEventSynchronize(to));
  if (num_called != 5) exit(3);
  CHECK(cuEventElapsedTime_v2(&ms, from, to));
  if (ms < 0.2f) exit(4);  // twenty kernels of 10 us
  CHECK(cuMemcpyAsync((CUdeviceptr)back, at + bytes, sizeof back, stream));
  CHECK(cuStreamSynchronize(stream));
  if (memcmp(back, text, sizeof back)) exit(5);
  if (*seed % 8 == 0) run_graph(stream, at, kernel);
  CHECK(cuMemFree_v2(at));
  CHECK(cuEventDestroy_v2(from));
  CHECK(cuEventDestroy_v2(to));
}

static void *work(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument * 7919u;
  CUcontext context;
  CUstream stream;
  CUfunction kernel;
  CHECK(cuDevicePrimaryCtxRetain(&context, (int)seed % 2));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuStreamCreateWithPriority(&stream, seed % 3 != 0, 0));
  CHECK(cuModuleGetFunction(&kernel, NULL, "stress"));
  for (int i = 0; i < num_rounds; i++) run_round(stream, kernel, &seed);
  CHECK(cuStreamDestroy_v2(stream));
  return NULL;
}

int main(int num_arguments, char **arguments) {
  pthread_t threads[64];
  num_rounds = num_arguments > 1 ? atoi(arguments[1]) : 100;
  int num_threads = num_arguments > 2 ? atoi(arguments[2]) : 4;
  if (num_threads > 64) return 64;
  CHECK(cuInit(0));
  for (int i = 0; i < num_threads; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1)));
  for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
  printf("%d threads, %d rounds\n", num_threads, num_rounds);
  return 0;
}
