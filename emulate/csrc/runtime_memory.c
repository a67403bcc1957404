// The runtime interface: memory, copies, fills.
#include <string.h>

#include "runtime.h"

#define ENTER()                          \
  do {                                   \
    cudaError_t error = runtime_enter(); \
    if (error) return error;             \
  } while (0)

EXPORT cudaError_t cudaMalloc(void **out, size_t bytes) {
  ENTER();
  *out = NULL;
  return bytes ? runtime_result(cuMemAlloc_v2((CUdeviceptr *)out, bytes)) : cudaSuccess;
}

EXPORT cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
  ENTER();
  return runtime_result(cuMemAllocManaged((CUdeviceptr *)out, bytes, flags));
}

EXPORT cudaError_t cudaFree(void *at) {
  ENTER();
  return runtime_result(cuMemFree_v2((CUdeviceptr)at));
}

EXPORT cudaError_t cudaMallocHost(void **out, size_t bytes) {
  ENTER();
  return runtime_result(cuMemAllocHost_v2(out, bytes));
}

EXPORT cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return cudaMallocHost(out, bytes); }

EXPORT cudaError_t cudaFreeHost(void *at) { return runtime_result(cuMemFreeHost(at)); }

EXPORT cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
  ENTER();
  return runtime_result(cuMemHostRegister_v2(at, bytes, flags));
}

EXPORT cudaError_t cudaHostUnregister(void *at) { return runtime_result(cuMemHostUnregister(at)); }

EXPORT cudaError_t cudaHostGetDevicePointer(void **out, void *at, unsigned flags) {
  *out = at;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetFlags(unsigned *flags, void *at) {
  *flags = 3;  // portable and mapped
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **out, size_t bytes, CUstream stream) { return cudaMalloc(out, bytes); }

EXPORT cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return cudaMalloc(out, bytes);
}

EXPORT cudaError_t cudaFreeAsync(void *at, CUstream stream) {
  return runtime_result(cuMemFreeAsync((CUdeviceptr)at, stream));
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(CUmemoryPool *pool, int device) {
  return runtime_result(cuDeviceGetDefaultMemPool(pool, device));
}

EXPORT cudaError_t cudaDeviceGetMemPool(CUmemoryPool *pool, int device) {
  return runtime_result(cuDeviceGetDefaultMemPool(pool, device));
}

EXPORT cudaError_t cudaDeviceSetMemPool(int device, CUmemoryPool pool) { return cudaSuccess; }

EXPORT cudaError_t cudaMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
  return runtime_result(cuMemPoolCreate(pool, properties));
}

EXPORT cudaError_t cudaMemPoolDestroy(CUmemoryPool pool) { return runtime_result(cuMemPoolDestroy(pool)); }

EXPORT cudaError_t cudaMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) { return cudaSuccess; }

EXPORT cudaError_t cudaMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
  return runtime_result(cuMemPoolGetAttribute(pool, attribute, value));
}

EXPORT cudaError_t cudaMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(CUmemoryPool pool, size_t bytes) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
  *(uint64_t *)value = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) { return cudaSuccess; }

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  ENTER();
  return runtime_result(cuMemGetInfo_v2(free_bytes, total_bytes));
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  ENTER();
  return runtime_result(cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, bytes));
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, CUstream stream) {
  ENTER();
  return runtime_result(cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, stream));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                       CUstream stream) {
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}

EXPORT cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
  return cudaMemcpy(to, from, bytes, 0);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, int kind, CUstream stream) {
  CUDA_MEMCPY2D what = {.src_memory_type = CU_MEMORYTYPE_DEVICE, .dst_memory_type = CU_MEMORYTYPE_DEVICE};
  ENTER();
  // One address space: what kind of memory an address is in, the driver finds out.
  what.src_device = (CUdeviceptr)from, what.src_pitch = from_pitch;
  what.dst_device = (CUdeviceptr)to, what.dst_pitch = to_pitch;
  what.width_bytes = width, what.height = height;
  return runtime_result(cuMemcpy2DAsync_v2(&what, stream));
}

EXPORT cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                size_t height, int kind) {
  cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
  return error ? error : runtime_result(cuStreamSynchronize(NULL));
}

static cudaError_t copy_batch(void *const *to, const void *const *from, const size_t *bytes, size_t count,
                              CUstream stream) {
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < count && !error; i++) error = cudaMemcpyAsync(to[i], from[i], bytes[i], 0, stream);
  return error;
}

EXPORT cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes, size_t count,
                                        void *attributes, size_t *attribute_indices, size_t num_attributes,
                                        IF_12(size_t *failed, ) CUstream stream) {
  return copy_batch(to, from, bytes, count, stream);
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, CUstream stream) {
  ENTER();
  return runtime_result(cuMemsetD8Async((CUdeviceptr)to, (unsigned char)value, bytes, stream));
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

EXPORT cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, CUstream stream) {
  ENTER();
  return runtime_result(cuMemsetD2D8Async((CUdeviceptr)to, pitch, (unsigned char)value, width, height, stream));
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *at) {
  unsigned type;
  unsigned is_managed = 0;
  ENTER();
  memset(out, 0, sizeof *out);
  out->device = -2;
  if (cuPointerGetAttribute(&type, 2, (CUdeviceptr)at)) return cudaSuccess;  // plain host memory: "unregistered"
  cuPointerGetAttribute(&is_managed, 8, (CUdeviceptr)at);
  cuPointerGetAttribute(&out->device, 9, (CUdeviceptr)at);
  out->type = is_managed ? 3 : (int)type;  // 1 host, 2 device, 3 managed
  out->device_pointer = (void *)at;
  out->host_pointer = type == CU_MEMORYTYPE_HOST || is_managed ? (void *)at : NULL;
  return cudaSuccess;
}

EXPORT cudaError_t cudaIpcGetMemHandle(CUipcHandle *handle, void *at) {
  return runtime_result(cuIpcGetMemHandle(handle, (CUdeviceptr)at));
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **out, CUipcHandle handle, unsigned flags) {
  ENTER();
  return runtime_result(cuIpcOpenMemHandle_v2((CUdeviceptr *)out, handle, flags));
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *at) { return runtime_result(cuIpcCloseMemHandle((CUdeviceptr)at)); }

EXPORT cudaError_t cudaIpcGetEventHandle(CUipcHandle *handle, CUevent event) {
  return runtime_result(cuIpcGetEventHandle(handle, event));
}

EXPORT cudaError_t cudaIpcOpenEventHandle(CUevent *event, CUipcHandle handle) {
  return runtime_result(cuIpcOpenEventHandle(event, handle));
}
