// Compares our declarations with NVIDIA's headers, at compile time. Not part of the build: a test compiles it where a CUDA package
// is at hand. Types of the two have one name here and there, so ours are read under other names.
#define CUresult our_CUresult
#define CUdevice our_CUdevice
#define CUdeviceptr our_CUdeviceptr
#define CUmemGenericAllocationHandle our_handle
#define CUcontext our_CUcontext
#define CUstream our_CUstream
#define CUevent our_CUevent
#define CUgraph our_CUgraph
#define CUgraphNode our_CUgraphNode
#define CUgraphExec our_CUgraphExec
#define CUfunction our_CUfunction
#define CUmodule our_CUmodule
#define CUmemoryPool our_CUmemoryPool
#define CUuserObject our_CUuserObject
#define CUhostFn our_CUhostFn
#define CUstreamCallback our_CUstreamCallback
#define CUuuid our_CUuuid
#define CUipcHandle our_CUipcHandle
#define CUmemLocation our_CUmemLocation
#define CUmemAccessDesc our_CUmemAccessDesc
#define CUmemAllocationProp our_CUmemAllocationProp
#define CUmulticastObjectProp our_CUmulticastObjectProp
#define CUmemPoolProps our_CUmemPoolProps
#define CUDA_MEMCPY2D our_CUDA_MEMCPY2D
#define CUlaunchConfig our_CUlaunchConfig
#define cudaError_t our_cudaError_t
#define dim3 our_dim3
#define cudaDeviceProp our_cudaDeviceProp
#define cudaPointerAttributes our_cudaPointerAttributes
#define cudaFuncAttributes our_cudaFuncAttributes
#define cudaLaunchConfig_t our_cudaLaunchConfig_t
#define CUDA_HOST_NODE_PARAMS our_host_node
#define LAGOM_EMULATED_GPU_DRIVER_H  // no prototypes: NVIDIA's are there
#define CUDA_SUCCESS our_0
#define CUDA_ERROR_INVALID_VALUE our_1
#define CUDA_ERROR_OUT_OF_MEMORY our_2
#define CUDA_ERROR_NOT_INITIALIZED our_3
#define CUDA_ERROR_DEVICE_UNAVAILABLE our_46
#define CUDA_ERROR_NO_DEVICE our_100
#define CUDA_ERROR_INVALID_DEVICE our_101
#define CUDA_ERROR_INVALID_CONTEXT our_201
#define CUDA_ERROR_MAP_FAILED our_205
#define CUDA_ERROR_INVALID_HANDLE our_400
#define CUDA_ERROR_NOT_FOUND our_500
#define CUDA_ERROR_NOT_READY our_600
#define CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED our_704
#define CUDA_ERROR_PEER_ACCESS_NOT_ENABLED our_705
#define CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED our_712
#define CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED our_713
#define CUDA_ERROR_NOT_SUPPORTED our_801
#define CUDA_ERROR_SYSTEM_DRIVER_MISMATCH our_803
#define CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED our_900
#define CUDA_ERROR_STREAM_CAPTURE_INVALIDATED our_901
#define CUDA_ERROR_STREAM_CAPTURE_UNMATCHED our_903
#define CUDA_ERROR_STREAM_CAPTURE_UNJOINED our_904
#define CUDA_ERROR_STREAM_CAPTURE_ISOLATION our_905
#define CUDA_ERROR_CAPTURED_EVENT our_907
#define CU_MEMORYTYPE_HOST our_host
#define CU_MEMORYTYPE_DEVICE our_device
#define CU_STREAM_NON_BLOCKING our_non_blocking
#define CU_EVENT_DISABLE_TIMING our_disable_timing
#define CU_STREAM_CAPTURE_STATUS_NONE our_none
#define CU_STREAM_CAPTURE_STATUS_ACTIVE our_active
#define CU_STREAM_CAPTURE_STATUS_INVALIDATED our_invalidated
#define CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR our_descriptor
#define CU_MEM_LOCATION_TYPE_DEVICE our_location
#define cudaSuccess our_success
#define cudaErrorInvalidValue our_invalid_value
#define cudaErrorMemoryAllocation our_memory_allocation
#define cudaErrorNoDevice our_no_device
#define cudaErrorInvalidDevice our_invalid_device
#define cudaErrorNotReady our_not_ready
#define cudaErrorNotSupported our_not_supported
#include "cupti_record.h"
#include "runtime.h"
#undef CUresult
#undef CUdevice
#undef CUdeviceptr
#undef CUmemGenericAllocationHandle
#undef CUcontext
#undef CUstream
#undef CUevent
#undef CUgraph
#undef CUgraphNode
#undef CUgraphExec
#undef CUfunction
#undef CUmodule
#undef CUmemoryPool
#undef CUuserObject
#undef CUhostFn
#undef CUstreamCallback
#undef CUuuid
#undef CUipcHandle
#undef CUmemLocation
#undef CUmemAccessDesc
#undef CUmemAllocationProp
#undef CUmulticastObjectProp
#undef CUmemPoolProps
#undef CUDA_MEMCPY2D
#undef CUlaunchConfig
#undef cudaError_t
#undef dim3
#undef cudaDeviceProp
#undef cudaPointerAttributes
#undef cudaFuncAttributes
#undef cudaLaunchConfig_t
#undef CUDA_HOST_NODE_PARAMS
#undef CUDA_SUCCESS
#undef CUDA_ERROR_INVALID_VALUE
#undef CUDA_ERROR_OUT_OF_MEMORY
#undef CUDA_ERROR_NOT_INITIALIZED
#undef CUDA_ERROR_DEVICE_UNAVAILABLE
#undef CUDA_ERROR_NO_DEVICE
#undef CUDA_ERROR_INVALID_DEVICE
#undef CUDA_ERROR_INVALID_CONTEXT
#undef CUDA_ERROR_MAP_FAILED
#undef CUDA_ERROR_INVALID_HANDLE
#undef CUDA_ERROR_NOT_FOUND
#undef CUDA_ERROR_NOT_READY
#undef CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
#undef CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
#undef CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
#undef CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
#undef CUDA_ERROR_NOT_SUPPORTED
#undef CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
#undef CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
#undef CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
#undef CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
#undef CUDA_ERROR_STREAM_CAPTURE_UNJOINED
#undef CUDA_ERROR_STREAM_CAPTURE_ISOLATION
#undef CUDA_ERROR_CAPTURED_EVENT
#undef CU_MEMORYTYPE_HOST
#undef CU_MEMORYTYPE_DEVICE
#undef CU_STREAM_NON_BLOCKING
#undef CU_EVENT_DISABLE_TIMING
#undef CU_STREAM_CAPTURE_STATUS_NONE
#undef CU_STREAM_CAPTURE_STATUS_ACTIVE
#undef CU_STREAM_CAPTURE_STATUS_INVALIDATED
#undef CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#undef CU_MEM_LOCATION_TYPE_DEVICE
#undef cudaSuccess
#undef cudaErrorInvalidValue
#undef cudaErrorMemoryAllocation
#undef cudaErrorNoDevice
#undef cudaErrorInvalidDevice
#undef cudaErrorNotReady
#undef cudaErrorNotSupported

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>

#define SAME(a, b) _Static_assert((a) == (b), #a)
#define SAME_SIZE(ours, theirs) SAME(sizeof(ours), sizeof(theirs))
#define SAME_PLACE(ours, field, theirs, name) SAME(offsetof(ours, field), offsetof(theirs, name))

SAME_SIZE(our_CUipcHandle, CUipcMemHandle);
SAME_SIZE(our_CUmemAllocationProp, CUmemAllocationProp);
SAME_PLACE(our_CUmemAllocationProp, location, CUmemAllocationProp, location);
SAME_SIZE(our_CUmulticastObjectProp, CUmulticastObjectProp);
SAME_SIZE(our_CUmemPoolProps, CUmemPoolProps);
SAME_PLACE(our_CUmemPoolProps, location, CUmemPoolProps, location);
SAME_SIZE(our_CUDA_MEMCPY2D, CUDA_MEMCPY2D);
SAME_PLACE(our_CUDA_MEMCPY2D, dst_device, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(our_CUDA_MEMCPY2D, height, CUDA_MEMCPY2D, Height);
SAME_SIZE(our_CUlaunchConfig, CUlaunchConfig);
SAME_PLACE(our_CUlaunchConfig, stream, CUlaunchConfig, hStream);
SAME(our_46, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(our_803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(our_713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(our_903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
SAME(our_904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
SAME(our_905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
SAME(our_907, CUDA_ERROR_CAPTURED_EVENT);

SAME_SIZE(our_cudaDeviceProp, struct cudaDeviceProp);
SAME_PLACE(our_cudaDeviceProp, num_sms, struct cudaDeviceProp, multiProcessorCount);
SAME_PLACE(our_cudaDeviceProp, concurrent_kernels, struct cudaDeviceProp, concurrentKernels);
SAME_PLACE(our_cudaDeviceProp, l2_bytes, struct cudaDeviceProp, l2CacheSize);
SAME_PLACE(our_cudaDeviceProp, shared_bytes_opt_in, struct cudaDeviceProp, sharedMemPerBlockOptin);
SAME_PLACE(our_cudaDeviceProp, max_blocks_per_sm, struct cudaDeviceProp, maxBlocksPerMultiProcessor);
SAME_PLACE(our_cudaDeviceProp, cluster_launch, struct cudaDeviceProp, clusterLaunch);
SAME_SIZE(our_cudaPointerAttributes, struct cudaPointerAttributes);
SAME_PLACE(our_cudaPointerAttributes, host_pointer, struct cudaPointerAttributes, hostPointer);
SAME_SIZE(our_cudaFuncAttributes, struct cudaFuncAttributes);
SAME_PLACE(our_cudaFuncAttributes, max_dynamic_shared_bytes, struct cudaFuncAttributes, maxDynamicSharedSizeBytes);
SAME_SIZE(our_cudaLaunchConfig_t, cudaLaunchConfig_t);
SAME_PLACE(our_cudaLaunchConfig_t, stream, cudaLaunchConfig_t, stream);

#if RUNTIME_MAJOR >= 13 && CUPTI_API_VERSION < 130200  // CUDA 13.0: its record is the beginning of the later one
typedef CUpti_ActivityKernel10 their_kernel;
_Static_assert(sizeof(kernel_record) >= sizeof(their_kernel), "kernel_record");
#elif RUNTIME_MAJOR >= 13
typedef CUpti_ActivityKernel11 their_kernel;
SAME_SIZE(kernel_record, their_kernel);
#else
typedef CUpti_ActivityKernel9 their_kernel;
SAME_SIZE(kernel_record, their_kernel);
#endif
SAME_PLACE(kernel_record, dynamic_shared, their_kernel, dynamicSharedMemory);
SAME_PLACE(kernel_record, correlation, their_kernel, correlationId);
SAME_PLACE(kernel_record, name, their_kernel, name);
SAME_PLACE(kernel_record, graph, their_kernel, graphId);
SAME_SIZE(memcpy_record, CUpti_ActivityMemcpy6);
SAME_PLACE(memcpy_record, correlation, CUpti_ActivityMemcpy6, correlationId);
SAME_PLACE(memcpy_record, graph, CUpti_ActivityMemcpy6, graphId);
SAME_SIZE(peer_record, CUpti_ActivityMemcpyPtoP4);
SAME_PLACE(peer_record, correlation, CUpti_ActivityMemcpyPtoP4, correlationId);
SAME_SIZE(memset_record, CUpti_ActivityMemset4);
SAME_PLACE(memset_record, graph, CUpti_ActivityMemset4, graphId);
SAME_SIZE(api_record, CUpti_ActivityAPI);
SAME_PLACE(api_record, correlation, CUpti_ActivityAPI, correlationId);
SAME_SIZE(external_record, CUpti_ActivityExternalCorrelation);
SAME_PLACE(external_record, correlation, CUpti_ActivityExternalCorrelation, correlationId);
SAME_SIZE(sync_record, CUpti_ActivitySynchronization2);
SAME_PLACE(sync_record, event, CUpti_ActivitySynchronization2, cudaEventId);
SAME_SIZE(cuda_event_record, CUpti_ActivityCudaEvent2);
SAME_PLACE(cuda_event_record, at, CUpti_ActivityCudaEvent2, deviceTimestamp);
SAME(KIND_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
SAME(KIND_EXTERNAL, CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
SAME(KIND_SYNCHRONIZATION, CUPTI_ACTIVITY_KIND_SYNCHRONIZATION);
SAME(KIND_CUDA_EVENT, CUPTI_ACTIVITY_KIND_CUDA_EVENT);
SAME(KIND_MEMCPY_PEER, CUPTI_ACTIVITY_KIND_MEMCPY2);
