// Functions of cuBLAS that PyTorch and cuSOLVER link to and the emulated device does not do: each says so once, and fails.
#include <stdio.h>

#include "blas.h"

#define NAME(name)                                                                   \
  EXPORT cublasStatus_t name(void) {                                                 \
    static _Atomic int is_said;                                                      \
    if (!is_said++) fprintf(stderr, "lagom emulate: " #name " is not emulated\n");   \
    return CUBLAS_NOT_SUPPORTED;                                                     \
  }
NAME(cublasCaxpy_v2) NAME(cublasCcopy_v2) NAME(cublasCdgmm) NAME(cublasCgeam) NAME(cublasCgelsBatched)
NAME(cublasCgeqrfBatched) NAME(cublasCgerc_v2) NAME(cublasCgeru_v2) NAME(cublasCgetrfBatched) NAME(cublasCgetrsBatched)
NAME(cublasChemm_v2) NAME(cublasChemv_v2) NAME(cublasCher2_v2) NAME(cublasCher2k_v2) NAME(cublasCher_v2)
NAME(cublasCherk_v2) NAME(cublasCrot_v2) NAME(cublasCrotg_v2) NAME(cublasCscal_v2) NAME(cublasCsrot_v2)
NAME(cublasCsscal_v2) NAME(cublasCswap_v2) NAME(cublasCsymm_v2) NAME(cublasCsymv_v2) NAME(cublasCsyr2_v2)
NAME(cublasCsyr2k_v2) NAME(cublasCsyr_v2) NAME(cublasCsyrk_v2) NAME(cublasCsyrkx) NAME(cublasCtrmm_v2)
NAME(cublasCtrmv_v2) NAME(cublasCtrsmBatched) NAME(cublasCtrsm_v2) NAME(cublasCtrsv_v2) NAME(cublasDasum_v2)
NAME(cublasDaxpy_v2) NAME(cublasDcopy_v2) NAME(cublasDdgmm) NAME(cublasDgeam) NAME(cublasDgelsBatched)
NAME(cublasDgeqrfBatched) NAME(cublasDger_v2) NAME(cublasDgetrfBatched) NAME(cublasDgetrsBatched) NAME(cublasDnrm2_v2)
NAME(cublasDrot_v2) NAME(cublasDrotg_v2) NAME(cublasDrotm_v2) NAME(cublasDrotmg_v2) NAME(cublasDscal_v2)
NAME(cublasDswap_v2) NAME(cublasDsymm_v2) NAME(cublasDsymv_v2) NAME(cublasDsyr2_v2) NAME(cublasDsyr2k_v2)
NAME(cublasDsyr_v2) NAME(cublasDsyrk_v2) NAME(cublasDsyrkx) NAME(cublasDtrmm_v2) NAME(cublasDtrmv_v2)
NAME(cublasDtrsmBatched) NAME(cublasDtrsm_v2) NAME(cublasDtrsv_v2) NAME(cublasDzasum_v2) NAME(cublasDznrm2_v2)
NAME(cublasGetEmulationSpecialValuesSupport) NAME(cublasGetFixedPointEmulationMantissaBitOffset)
NAME(cublasGetFixedPointEmulationMantissaControl) NAME(cublasGetFixedPointEmulationMaxMantissaBitCount)
NAME(cublasGetMatrixAsync) NAME(cublasGetVectorAsync) NAME(cublasIcamax_v2) NAME(cublasIcamin_v2) NAME(cublasIdamax_v2)
NAME(cublasIdamin_v2) NAME(cublasIsamax_v2) NAME(cublasIsamin_v2) NAME(cublasIzamax_v2) NAME(cublasIzamin_v2)
NAME(cublasSasum_v2) NAME(cublasSaxpy_v2) NAME(cublasScasum_v2) NAME(cublasScnrm2_v2) NAME(cublasScopy_v2)
NAME(cublasSdgmm) NAME(cublasSetEmulationSpecialValuesSupport) NAME(cublasSetEmulationStrategy)
NAME(cublasSetEnvironmentMode) NAME(cublasSetFixedPointEmulationMantissaBitOffset)
NAME(cublasSetFixedPointEmulationMantissaControl) NAME(cublasSetFixedPointEmulationMaxMantissaBitCount)
NAME(cublasSetMatrixAsync) NAME(cublasSetVectorAsync) NAME(cublasSgeam) NAME(cublasSgelsBatched)
NAME(cublasSgeqrfBatched) NAME(cublasSger_v2) NAME(cublasSgetrfBatched) NAME(cublasSgetrsBatched) NAME(cublasSnrm2_v2)
NAME(cublasSrot_v2) NAME(cublasSrotg_v2) NAME(cublasSrotm_v2) NAME(cublasSrotmg_v2) NAME(cublasSscal_v2)
NAME(cublasSswap_v2) NAME(cublasSsymm_v2) NAME(cublasSsymv_v2) NAME(cublasSsyr2_v2) NAME(cublasSsyr2k_v2)
NAME(cublasSsyr_v2) NAME(cublasSsyrk_v2) NAME(cublasSsyrkx) NAME(cublasStrmm_v2) NAME(cublasStrmv_v2)
NAME(cublasStrsmBatched) NAME(cublasStrsm_v2) NAME(cublasStrsv_v2) NAME(cublasZaxpy_v2) NAME(cublasZcopy_v2)
NAME(cublasZdgmm) NAME(cublasZdrot_v2) NAME(cublasZdscal_v2) NAME(cublasZgeam) NAME(cublasZgelsBatched)
NAME(cublasZgeqrfBatched) NAME(cublasZgerc_v2) NAME(cublasZgeru_v2) NAME(cublasZgetrfBatched) NAME(cublasZgetrsBatched)
NAME(cublasZhemm_v2) NAME(cublasZhemv_v2) NAME(cublasZher2_v2) NAME(cublasZher2k_v2) NAME(cublasZher_v2)
NAME(cublasZherk_v2) NAME(cublasZrot_v2) NAME(cublasZrotg_v2) NAME(cublasZscal_v2) NAME(cublasZswap_v2)
NAME(cublasZsymm_v2) NAME(cublasZsymv_v2) NAME(cublasZsyr2_v2) NAME(cublasZsyr2k_v2) NAME(cublasZsyr_v2)
NAME(cublasZsyrk_v2) NAME(cublasZsyrkx) NAME(cublasZtrmm_v2) NAME(cublasZtrmv_v2) NAME(cublasZtrsmBatched)
NAME(cublasZtrsm_v2) NAME(cublasZtrsv_v2)
