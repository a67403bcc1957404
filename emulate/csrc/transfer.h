// Copies and fills as operations of a stream.
#ifndef LAGOM_EMULATED_GPU_TRANSFER_H
#define LAGOM_EMULATED_GPU_TRANSFER_H
#include "stream.h"

typedef struct {
  void *to;
  const void *from;
  size_t width_bytes, height, to_pitch, from_pitch;
} rectangle;

CUresult transfer_copy(void *to, const void *from, size_t bytes, CUstream stream, const char *api);
CUresult transfer_copy_rectangle(const rectangle *area, CUstream stream, const char *api);
CUresult transfer_fill(void *to, const void *value, size_t value_bytes, size_t count, size_t num_rows, size_t pitch,
                       CUstream stream);
#endif
