// cuBLASLt: descriptors, layouts, one algorithm for everything, and the product.
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "blas.h"

typedef struct {
  int type, batch;
  uint64_t rows, columns;
} layout;

typedef struct {
  int compute, trans_a, trans_b;
} description;

typedef struct {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  cublasStatus_t state;
  float waves;
  int reserved[4];
} heuristic;

EXPORT cublasStatus_t cublasLtCreate(void **out) {
  *out = malloc(1);
  return *out ? CUBLAS_SUCCESS : CUBLAS_ALLOC_FAILED;
}

EXPORT cublasStatus_t cublasLtDestroy(void *handle) {
  free(handle);
  return CUBLAS_SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) { return RUNTIME_MAJOR >= 13 ? 130200 : 120901; }

EXPORT size_t cublasLtGetCudartVersion(void) { return RUNTIME_MAJOR >= 13 ? 13020 : 12090; }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(description **out, int compute, int scale_type) {
  *out = calloc(1, sizeof **out);
  if (!*out) return CUBLAS_ALLOC_FAILED;
  (*out)->compute = compute;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(description *d) {
  free(d);
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(description *d, int attribute, const void *value, size_t bytes) {
  int number = 0;
  if (bytes >= sizeof number) memcpy(&number, value, sizeof number);
  if (attribute == 3) d->trans_a = number;
  if (attribute == 4) d->trans_b = number;
  return CUBLAS_SUCCESS;  // scales, epilogues and the like change no shape
}

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(layout **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  *out = malloc(sizeof **out);
  if (!*out) return CUBLAS_ALLOC_FAILED;
  **out = (layout){type, 1, rows, columns};
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(layout *l) {
  free(l);
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(layout *l, int attribute, const void *value, size_t bytes) {
  if (attribute == 5 && bytes == sizeof l->batch) memcpy(&l->batch, value, bytes);
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(void **out) { return cublasLtCreate(out); }

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(void *preference) { return cublasLtDestroy(preference); }

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                                           size_t bytes) {
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(void *handle, description *d, layout *a, layout *b, layout *c,
                                                     layout *result, void *preference, int wanted, heuristic *found,
                                                     int *num_found) {
  *num_found = wanted > 0;
  if (wanted > 0) memset(found, 0, sizeof *found), found->waves = 1;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(void *handle, description *d, layout *a, layout *b, layout *c, layout *result,
                                              const uint64_t *algorithm, heuristic *found) {
  memset(found, 0, sizeof *found);
  found->waves = 1;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id,
                                             uint64_t *algorithm) {
  memset(algorithm, 0, 64);
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(uint64_t *algorithm, int attribute, const void *value,
                                                           size_t bytes) {
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algorithm, int attribute, void *value,
                                                           size_t bytes, size_t *written) {
  if (value) memset(value, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(void *handle, description *d, const void *alpha, const void *a, layout *a_layout,
                                     const void *b, layout *b_layout, const void *beta, const void *c, layout *c_layout,
                                     void *result, layout *result_layout, const uint64_t *algorithm, void *workspace,
                                     size_t workspace_bytes, void *stream) {
  uint64_t depth = d->trans_a ? a_layout->rows : a_layout->columns;
  int is_tf32 = d->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  return blas_product(stream, (int64_t)result_layout->rows, (int64_t)result_layout->columns, (int64_t)depth,
                      result_layout->batch, a_layout->type, result_layout->type, is_tf32);
}
