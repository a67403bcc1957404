// Matrix products: told to the coordinator by their shape, not computed. Numbers are cuBLAS's.
#ifndef LAGOM_EMULATED_GPU_BLAS_H
#define LAGOM_EMULATED_GPU_BLAS_H
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef int cublasStatus_t;
enum { CUBLAS_SUCCESS = 0, CUBLAS_ALLOC_FAILED = 3, CUBLAS_INVALID_VALUE = 7, CUBLAS_FAILED = 13, CUBLAS_NOT_SUPPORTED = 15 };
enum { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_C_32F = 4, CUDA_C_64F = 5 };
enum { CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };

// Submits m x n x k, `batch` times, with operands and a result of these cudaDataTypes.
cublasStatus_t blas_product(void *stream, int64_t m, int64_t n, int64_t k, int64_t batch, int type, int result_type,
                            int is_tf32);
#endif
