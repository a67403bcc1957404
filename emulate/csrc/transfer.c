#include "transfer.h"

#include <stdio.h>
#include <string.h>

#include "framework.h"
#include "memory.h"

enum { COPY_H2D = 1, COPY_D2H = 2, COPY_D2D = 8, COPY_H2H = 9, COPY_P2P = 10 };  // CUPTI's numbers

static int kind_of(const void *to, const void *from, bool *is_pageable) {
  memory_block to_block = {0}, from_block = {0};
  bool to_device = memory_find(to, &to_block) && to_block.kind != MEMORY_HOST && to_block.kind != MEMORY_REGISTERED;
  bool from_device =
      memory_find(from, &from_block) && from_block.kind != MEMORY_HOST && from_block.kind != MEMORY_REGISTERED;
  *is_pageable = !to_block.kind || !from_block.kind;
  if (to_device && from_device) return to_block.device == from_block.device ? COPY_D2D : COPY_P2P;
  return to_device ? COPY_H2D : from_device ? COPY_D2H : COPY_H2H;
}

static const char *word_of(int kind) {
  return kind == COPY_H2D ? "h2d" : kind == COPY_D2H ? "d2h" : kind == COPY_P2P ? "p2p" : "d2d";
}

CUresult transfer_copy_rectangle(const rectangle *area, CUstream stream, const char *api) {
  char json[64];
  bool is_pageable;
  if (!area->width_bytes || !area->height) return CUDA_SUCCESS;
  operation op = {.kind = OPERATION_COPY, .bytes = area->width_bytes * area->height};
  op.copy_kind = kind_of(area->to, area->from, &is_pageable);
  snprintf(json, sizeof json, "{\"copy\": \"%s\", \"bytes\": %llu}", word_of(op.copy_kind), (unsigned long long)op.bytes);
  op.desc_id = client_describe(json);
  op.effect = (effect){
      .kind = EFFECT_COPY,
      .to = area->to,
      .from = area->from,
      .count = area->width_bytes,
      .element_bytes = 1,
      .num_rows = area->height,
      .to_pitch = area->to_pitch,
      .from_pitch = area->from_pitch,
  };
  uint64_t number;
  if (op.copy_kind == COPY_D2H && op.bytes <= sizeof number && framework_counted(&number)) {
    op.effect = (effect){.kind = EFFECT_FILL, .to = area->to, .count = 1, .num_rows = 1, .element_bytes = (uint8_t)op.bytes};
    memcpy(op.effect.value, &number, op.bytes);  // little-endian
  }
  CUresult result = stream_submit(stream, &op, api, NULL);
  // A copy to memory that is not page-locked returns when it is done.
  bool is_blocking = is_pageable && op.copy_kind == COPY_D2H && !stream_of(stream)->capture;
  return result || !is_blocking ? result : stream_wait(stream);
}

CUresult transfer_copy(void *to, const void *from, size_t bytes, CUstream stream, const char *api) {
  rectangle area = {to, from, bytes, 1, bytes, bytes};
  return transfer_copy_rectangle(&area, stream, api);
}

CUresult transfer_fill(void *to, const void *value, size_t value_bytes, size_t count, size_t num_rows, size_t pitch,
                       CUstream stream) {
  char json[64];
  if (!count || !num_rows) return CUDA_SUCCESS;
  operation op = {.kind = OPERATION_FILL, .bytes = value_bytes * count * num_rows};
  snprintf(json, sizeof json, "{\"memset\": %llu}", (unsigned long long)op.bytes);
  op.desc_id = client_describe(json);
  op.effect = (effect){
      .kind = EFFECT_FILL, .to = to, .count = count, .num_rows = num_rows, .to_pitch = pitch, .element_bytes = (uint8_t)value_bytes};
  memcpy(op.effect.value, value, value_bytes);
  return stream_submit(stream, &op, "cudaMemsetAsync", NULL);
}
