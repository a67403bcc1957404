#include "blas.h"

#include <inttypes.h>
#include <stdio.h>

#include "device.h"

static const struct {
  int type;
  const char *dtype, *kernel;
} types[] = {
    {CUDA_R_32F, "float32", "emulated_gemm_float32"},
    {CUDA_R_64F, "float64", "emulated_gemm_float64"},
    {CUDA_R_16F, "float16", "emulated_gemm_float16"},
    {3, "int8", "emulated_gemm_int8"},
    {CUDA_C_32F, "complex64", "emulated_gemm_complex64"},
    {CUDA_C_64F, "complex128", "emulated_gemm_complex128"},
    {14, "bfloat16", "emulated_gemm_bfloat16"},
    {28, "float8_e4m3fn", "emulated_gemm_float8_e4m3fn"},
    {29, "float8_e5m2", "emulated_gemm_float8_e5m2"},
    {33, "float4_e2m1fn", "emulated_gemm_float4_e2m1fn"},
};
#define NUM_TYPES (sizeof types / sizeof *types)

// NUM_TYPES where the type is none that is known.
static size_t find(int type) {
  size_t i = 0;
  while (i < NUM_TYPES && types[i].type != type) i++;
  return i;
}

cublasStatus_t blas_product(void *stream, int64_t m, int64_t n, int64_t k, int64_t batch, int type, int result_type,
                            int is_tf32) {
  char json[256], result[32] = "";
  size_t i = find(type), r = find(result_type);
  if (m <= 0 || n <= 0 || batch <= 0) return CUBLAS_SUCCESS;
  if (i == NUM_TYPES) return CUBLAS_NOT_SUPPORTED;
  if (r != i && r != NUM_TYPES) snprintf(result, sizeof result, ", \"result\": \"%s\"", types[r].dtype);
  int is_tensor_float = type == CUDA_R_32F && is_tf32;
  snprintf(json, sizeof json,
           "{\"gemm\": {\"m\": %" PRId64 ", \"n\": %" PRId64 ", \"k\": %" PRId64 ", \"batch\": %" PRId64 ", \"dtype\": \"%s\"%s}}",
           m, n, k, batch, is_tensor_float ? "tfloat32" : types[i].dtype, result);
  const char *kernel = is_tensor_float ? "emulated_gemm_tfloat32" : types[i].kernel;
  uint32_t desc_id = lagom_emulated_gpu.describe(json);
  return lagom_emulated_gpu.submit(stream, desc_id, kernel, NULL, NULL, NULL) ? CUBLAS_FAILED : CUBLAS_SUCCESS;
}
