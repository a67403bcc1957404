#define _GNU_SOURCE
#include "code.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "framework.h"
#include "memory.h"

#define NUM_SLOTS 4096u
// A variable whose size the image would tell: room for what kernels of PyTorch and Triton declare.
#define GLOBAL_BYTES (64u << 10)

typedef struct global {
  char *name;
  CUdeviceptr at;
  size_t bytes;
  struct global *next;
} global;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUfunction functions[NUM_SLOTS];
static global *globals;

static uint32_t slot_of(const char *name) {
  uint32_t hash = 2166136261u;
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 16777619u;
  return hash % NUM_SLOTS;
}

CUfunction code_function(const char *name) {
  uint32_t slot = slot_of(name);
  pthread_mutex_lock(&lock);
  CUfunction at = functions[slot];
  while (at && strcmp(at->name, name)) at = at->next;
  if (!at && (at = calloc(1, sizeof *at))) {
    at->name = strdup(name);
    at->next = functions[slot];
    functions[slot] = at;
  }
  pthread_mutex_unlock(&lock);
  return at;
}

CUresult code_global(CUdeviceptr *out, size_t *bytes, const char *name, size_t wanted_bytes) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  global *at = globals;
  while (at && strcmp(at->name, name)) at = at->next;
  if (!at) {
    void *memory;
    size_t size = wanted_bytes ? wanted_bytes : GLOBAL_BYTES;
    result = memory_allocate(&memory, size, MEMORY_DEVICE, context_device());
    if (!result && (at = malloc(sizeof *at))) {
      *at = (global){strdup(name), (CUdeviceptr)memory, size, globals};
      globals = at;
    }
  }
  pthread_mutex_unlock(&lock);
  if (!at) return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
  if (out) *out = at->at;
  if (bytes) *bytes = at->bytes;
  return CUDA_SUCCESS;
}

static void append_quoted(char *into, size_t room, const char *name) {
  size_t at = strlen(into);
  for (; *name && at + 8 < room; name++) {
    if (*name == '"' || *name == '\\') into[at++] = '\\';
    if ((unsigned char)*name >= 32) into[at++] = *name;
  }
  into[at] = 0;
}

static uint32_t describe(const char *name, const launch *how, int64_t num_elements, bool is_exact) {
  char json[1200 + FRAMEWORK_MAX_BYTES] = "{\"kernel\": \"", rest[320 + FRAMEWORK_MAX_BYTES], elements[24] = "null";
  append_quoted(json, 800, name);
  if (num_elements >= 0) snprintf(elements, sizeof elements, "%" PRId64, num_elements);
  snprintf(rest, sizeof rest,
           "\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared_bytes\": %u, \"num_elements\": %s%s%s}", how->grid[0],
           how->grid[1], how->grid[2], how->block[0], how->block[1], how->block[2], how->shared_bytes, elements,
           is_exact ? ", \"is_exact\": true" : "", framework_next_fields());
  strcat(json, rest);
  return client_describe(json);
}

CUresult code_launch(CUfunction function, const launch *how, CUstream stream, const char *api) {
  operation op = {.kind = OPERATION_KERNEL, .name = function->name, .shared_bytes = how->shared_bytes};
  int64_t num_elements;
  bool is_exact = effect_of_kernel(function->name, how->arguments, &op.effect, &num_elements);
  if (!is_exact) framework_note_inexact();
  memcpy(op.grid, how->grid, sizeof op.grid);
  memcpy(op.block, how->block, sizeof op.block);
  op.desc_id = describe(function->name, how, num_elements, is_exact);
  return stream_submit(stream, &op, api, NULL);
}
