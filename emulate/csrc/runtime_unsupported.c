// Functions that programs link to and the emulated device does not do: each says so once, by name, and fails.
#include <stdio.h>

#include "runtime.h"

#define UNSUPPORTED(name)                                                              \
  EXPORT cudaError_t name(void) {                                                      \
    static _Atomic int is_said;                                                        \
    if (!is_said++) fprintf(stderr, "lagom emulate: " #name " is not emulated\n");     \
    return runtime_result(cudaErrorNotSupported);                                      \
  }

UNSUPPORTED(cudaGraphAddNode)
UNSUPPORTED(cudaGraphAddKernelNode)
UNSUPPORTED(cudaGraphAddHostNode)
UNSUPPORTED(cudaGraphAddMemcpyNode)
UNSUPPORTED(cudaGraphAddEventRecordNode)
UNSUPPORTED(cudaGraphAddEventWaitNode)
UNSUPPORTED(cudaGraphAddDependencies)
UNSUPPORTED(cudaGraphAddDependencies_v2)
UNSUPPORTED(cudaGraphConditionalHandleCreate)
UNSUPPORTED(cudaGraphDebugDotPrint)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaGraphKernelNodeSetAttribute)
UNSUPPORTED(cudaGraphExecUpdate)
UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies_v2)
UNSUPPORTED(cudaLibraryGetKernelCount)
UNSUPPORTED(cudaLibraryGetManaged)
UNSUPPORTED(cudaLibraryGetUnifiedFunction)
UNSUPPORTED(cudaLibraryLoadFromFile)
UNSUPPORTED(cudaArrayGetInfo)
UNSUPPORTED(cudaMallocArray)
UNSUPPORTED(cudaCreateTextureObject)
UNSUPPORTED(cudaDestroyTextureObject)
UNSUPPORTED(cudaDeviceReset)
