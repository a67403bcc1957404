// cuBLAS: handles and the products that frameworks use.
#include <stdlib.h>
#include <string.h>

#include "blas.h"

typedef struct {
  void *stream;
  int math_mode, pointer_mode, atomics_mode, sm_count;
} handle;

EXPORT cublasStatus_t cublasCreate_v2(handle **out) {
  *out = calloc(1, sizeof **out);
  return *out ? CUBLAS_SUCCESS : CUBLAS_ALLOC_FAILED;
}

EXPORT cublasStatus_t cublasDestroy_v2(handle *h) {
  free(h);
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetVersion_v2(handle *h, int *version) {
  *version = RUNTIME_MAJOR >= 13 ? 130200 : 120901;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetProperty(int property, int *value) {
  *value = property == 0 ? RUNTIME_MAJOR : property == 1 ? (RUNTIME_MAJOR >= 13 ? 2 : 9) : 0;
  return CUBLAS_SUCCESS;
}

EXPORT const char *cublasGetStatusString(cublasStatus_t status) {
  return status ? "an error of the emulated cuBLAS" : "success";
}

EXPORT const char *cublasGetStatusName(cublasStatus_t status) {
  return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS";
}

EXPORT cublasStatus_t cublasSetStream_v2(handle *h, void *stream) {
  h->stream = stream;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetStream_v2(handle *h, void **stream) {
  *stream = h->stream;
  return CUBLAS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace_v2(handle *h, void *at, size_t bytes) { return CUBLAS_SUCCESS; }

#define MODE(get, set, field)                     \
  EXPORT cublasStatus_t get(handle *h, int *out) { \
    *out = h->field;                              \
    return CUBLAS_SUCCESS;                        \
  }                                               \
  EXPORT cublasStatus_t set(handle *h, int mode) { \
    h->field = mode;                              \
    return CUBLAS_SUCCESS;                        \
  }
MODE(cublasGetMathMode, cublasSetMathMode, math_mode)
MODE(cublasGetPointerMode_v2, cublasSetPointerMode_v2, pointer_mode)
MODE(cublasGetAtomicsMode, cublasSetAtomicsMode, atomics_mode)
MODE(cublasGetSmCountTarget, cublasSetSmCountTarget, sm_count)

static int is_tf32(const handle *h, int compute) {
  return compute == CUBLAS_COMPUTE_32F_FAST_TF32 || (h->math_mode & 15) == 3;
}

#define GEMM(letter, type)                                                                                              \
  EXPORT cublasStatus_t cublas##letter##gemm_v2(handle *h, int ta, int tb, int m, int n, int k) {                       \
    return blas_product(h->stream, m, n, k, 1, type, type, is_tf32(h, 0));                                                    \
  }                                                                                                                     \
  EXPORT cublasStatus_t cublas##letter##gemmStridedBatched(                                                             \
      handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, long long stride_a,    \
      const void *b, int ldb, long long stride_b, const void *beta, void *c, int ldc, long long stride_c, int batch) {  \
    return blas_product(h->stream, m, n, k, batch, type, type, is_tf32(h, 0));                                                \
  }                                                                                                                     \
  EXPORT cublasStatus_t cublas##letter##gemmBatched(handle *h, int ta, int tb, int m, int n, int k, const void *alpha,  \
                                                    const void *a, int lda, const void *b, int ldb, const void *beta,   \
                                                    void *c, int ldc, int batch) {                                      \
    return blas_product(h->stream, m, n, k, batch, type, type, is_tf32(h, 0));                                                \
  }
#define GEMV(letter, type)                                                                          \
  EXPORT cublasStatus_t cublas##letter##gemv_v2(handle *h, int trans, int m, int n) {               \
    return blas_product(h->stream, trans ? n : m, 1, trans ? m : n, 1, type, type, is_tf32(h, 0));        \
  }
GEMM(S, CUDA_R_32F)
GEMM(D, CUDA_R_64F)
GEMM(C, CUDA_C_32F)
GEMM(Z, CUDA_C_64F)
GEMM(H, CUDA_R_16F)
GEMV(S, CUDA_R_32F)
GEMV(D, CUDA_R_64F)
GEMV(C, CUDA_C_32F)
GEMV(Z, CUDA_C_64F)

EXPORT cublasStatus_t cublasSgemmEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                                    int a_type) {
  return blas_product(h->stream, m, n, k, 1, a_type, a_type, is_tf32(h, 0));
}

EXPORT cublasStatus_t cublasGemmEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                                   int a_type, int lda, const void *b, int b_type, int ldb, const void *beta, void *c,
                                   int c_type, int ldc, int compute, int algorithm) {
  return blas_product(h->stream, m, n, k, 1, a_type, c_type, is_tf32(h, compute));
}

EXPORT cublasStatus_t cublasGemmStridedBatchedEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha,
                                                 const void *a, int a_type, int lda, long long stride_a, const void *b,
                                                 int b_type, int ldb, long long stride_b, const void *beta, void *c,
                                                 int c_type, int ldc, long long stride_c, int batch, int compute,
                                                 int algorithm) {
  return blas_product(h->stream, m, n, k, batch, a_type, c_type, is_tf32(h, compute));
}

EXPORT cublasStatus_t cublasGemmBatchedEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                                          int a_type, int lda, const void *b, int b_type, int ldb, const void *beta,
                                          void *c, int c_type, int ldc, int batch, int compute, int algorithm) {
  return blas_product(h->stream, m, n, k, batch, a_type, c_type, is_tf32(h, compute));
}

// Dot products are one row times one column; the result, on the host in pointer mode 0, is zero.
#define DOT(name, type, bytes)                                                                                       \
  EXPORT cublasStatus_t name(handle *h, int n, const void *x, int inc_x, const void *y, int inc_y, void *result) {    \
    if (!h->pointer_mode) memset(result, 0, bytes);                                                                  \
    return blas_product(h->stream, 1, 1, n, 1, type, type, 0);                                                             \
  }
DOT(cublasSdot_v2, CUDA_R_32F, 4)
DOT(cublasDdot_v2, CUDA_R_64F, 8)
DOT(cublasCdotu_v2, CUDA_C_32F, 8)
DOT(cublasCdotc_v2, CUDA_C_32F, 8)
DOT(cublasZdotu_v2, CUDA_C_64F, 16)
DOT(cublasZdotc_v2, CUDA_C_64F, 16)

EXPORT cublasStatus_t cublasDotEx(handle *h, int n, const void *x, int x_type, int inc_x, const void *y, int y_type,
                                  int inc_y, void *result, int result_type, int compute) {
  if (!h->pointer_mode) memset(result, 0, 2);
  return blas_product(h->stream, 1, 1, n, 1, x_type, result_type, 0);
}
