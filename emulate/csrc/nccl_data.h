// Arithmetic of NCCL's element types and operators, exact for integers, rounded once for floats.
#ifndef LAGOM_NCCL_DATA_H
#define LAGOM_NCCL_DATA_H
#include <stddef.h>

#include "nccl_api.h"

typedef struct {
  ncclRedOp_t op;      // a built-in one
  double factor;       // of a PreMulSum: every rank's part is multiplied by it first
  int has_factor;
  int64_t integer;     // the factor of integer types
} reduction;

size_t type_bytes(ncclDataType_t type);
const char* type_name(ncclDataType_t type);  // as in NCCL's kernel names

// out[i] = the reduction over `num_parts` arrays of `count` elements; ranks' own factors are taken as equal.
void reduce_parts(void* out, const void* const* parts, int num_parts, size_t count, ncclDataType_t type, const reduction* how);

double scalar_value(const void* scalar, ncclDataType_t type);
#endif
