// Called from the job's Python through ctypes (emulate/src/lagom_emulate/hook.py).
#include "framework.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "client.h"
#include "code.h"
#include "context.h"
#include "effect.h"
#include "memory.h"
#include "preset.h"

static _Thread_local char fields[FRAMEWORK_MAX_BYTES + 8];
static _Thread_local bool is_described, has_launched;

// `json` is one flat object, NULL ends it. Only the first kernel has the operator's bytes and flops, or they would count
// once per kernel; the others are known as parts of it.
EXPORT void lagom_emulation_describe_next(const char *json) {
  size_t length = json ? strlen(json) : 0;
  is_described = length > 2 && length < FRAMEWORK_MAX_BYTES && json[0] == '{' && json[length - 1] == '}';
  has_launched = false;
  if (is_described) snprintf(fields, sizeof fields, ", %.*s", (int)(length - 2), json + 1);
}

const char *framework_next_fields(void) {
  if (!is_described) return "";
  if (has_launched) return ", \"part\": 1";
  has_launched = true;
  return fields;
}

// A moment on the default stream of the current device, such as the beginning of a step; it takes no time.
EXPORT void lagom_emulation_mark(const char *json) {
  char text[FRAMEWORK_MAX_BYTES + 16];
  if (!json || strlen(json) >= FRAMEWORK_MAX_BYTES) return;
  snprintf(text, sizeof text, "{\"mark\": %s}", json);
  client_op op = {.device = preset_physical(context_device()), .desc_id = client_describe(text)};
  if (op.desc_id) client_submit(&op, 0);
}

// What cannot be emulated: the coordinator ends the job with this line.
EXPORT void lagom_emulation_refuse(const char *text) {
  char json[FRAMEWORK_MAX_BYTES + 16];
  int length = snprintf(json, sizeof json, "{\"refused\": \"%.*s", FRAMEWORK_MAX_BYTES - 1, text ? text : "");
  for (char *at = json + strlen("{\"refused\": \""); *at; at++)
    if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ') *at = '\'';
  memcpy(json + length, "\"}", 3);
  client_op op = {.device = preset_physical(context_device()), .desc_id = client_describe(json)};
  client_submit(&op, 0);
}

// A kernel of a library that is not emulated, which computes nothing. Its grid is for profilers: its price is described.
EXPORT void lagom_emulation_launch(const char *name, void *stream) {
  const unsigned grid[3] = {preset_get()->num_sms, 1, 1}, block[3] = {256, 1, 1};
  launch how = {grid, block, 0, NULL};
  code_launch(code_function(name), &how, stream, "cuLaunchKernel");
}

// Zeros where an operator should have computed something. What lies there may be an earlier tensor's.
EXPORT void lagom_emulation_clear(void *at, size_t bytes) {
  static const unsigned char zero[1];
  effect_settle_range(at, bytes, false);  // or what a collective owes an earlier tensor there came later
  if (!memory_is_hole(at, bytes)) memory_fill(at, zero, 1, bytes);
}

static _Thread_local emulated_group next_group;

// The ranks of the communicator that this thread makes next, in the order of their ranks there; none: it is not known.
EXPORT void lagom_emulation_group(int num_started, int num_ranks, const int *ranks, int own, int peer) {
  free(next_group.ranks);
  next_group = (emulated_group){num_ranks, num_started, own, peer, NULL};
  if (num_ranks <= 0) return;
  next_group.ranks = calloc((size_t)num_ranks, sizeof *ranks);
  if (next_group.ranks) memcpy(next_group.ranks, ranks, (size_t)num_ranks * sizeof *ranks);
}

bool framework_take_group(emulated_group *group) {
  *group = next_group;
  next_group.ranks = NULL;
  return group->ranks != NULL;
}

EXPORT unsigned long long lagom_emulation_host_ns(void) { return client_host_ns(); }

static _Thread_local unsigned long long num_inexact;

void framework_note_inexact(void) { num_inexact++; }

// Kernels that this thread launched and that left their outputs as they were.
EXPORT unsigned long long lagom_emulation_inexact_launches(void) { return num_inexact; }

static _Thread_local struct {
  bool is_known;
  uint64_t number;
} counted;

// Until it is told again: the number that this thread's operator finds where its kernels count, which count nothing here.
EXPORT void lagom_emulation_count(int is_known, unsigned long long number) {
  counted.is_known = is_known;
  counted.number = number;
}

bool framework_counted(uint64_t *number) {
  *number = counted.number;
  return counted.is_known;
}

// Before Python reads or writes a range: brings what a collective owes there, waiting for other ranks if it may. Whether
// nothing is owed any more.
EXPORT int lagom_emulation_settle(const void *at, size_t bytes, int may_wait) {
  return effect_settle_range(at, bytes, may_wait);
}
