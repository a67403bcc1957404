// The driver interface: memory, copies, fills.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "memory.h"
#include "preset.h"
#include "stream.h"
#include "transfer.h"

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  return memory_allocate((void **)out, bytes, MEMORY_DEVICE, context_device());
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc_v2(out, *pitch * height);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags) {
  return memory_allocate((void **)out, bytes, MEMORY_MANAGED, context_device());
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr at) {
  // As CUDA does: what runs may still use it.
  CUresult result = at ? device_wait(context_device()) : CUDA_SUCCESS;
  return result ? result : memory_free((void *)at);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) { return cuMemAlloc_v2(out, bytes); }

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return cuMemAlloc_v2(out, bytes);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) { return memory_free((void *)at); }

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
  return memory_allocate(out, bytes, MEMORY_HOST, context_device());
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { return cuMemAllocHost_v2(out, bytes); }

EXPORT CUresult cuMemFreeHost(void *at) { return memory_free(at); }

EXPORT CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
  return memory_add((memory_block){at, bytes, context_device(), MEMORY_REGISTERED, 0, -1, 0});
}

EXPORT CUresult cuMemHostUnregister(void *at) {
  memory_block removed;
  return memory_remove(at, &removed) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned flags) {
  *out = (CUdeviceptr)at;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *at) {
  *flags = 3;  // portable and mapped
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  *total_bytes = preset_get()->memory_bytes;
  *free_bytes = *total_bytes - memory_used(context_device());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr at) {
  memory_block block;
  if (!memory_find((void *)at, &block)) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = (CUdeviceptr)block.start;
  if (bytes) *bytes = block.bytes;
  return CUDA_SUCCESS;
}

static bool is_host(const memory_block *block) {
  return block->kind == MEMORY_HOST || block->kind == MEMORY_REGISTERED;
}

// Numbers of enum CUpointer_attribute.
static CUresult pointer_attribute(void *out, int attribute, CUdeviceptr at) {
  memory_block block = {0};
  bool is_known = memory_find((void *)at, &block);
  if (!is_known && attribute != 11 && attribute != 12 && attribute != 13) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case 1:
      *(CUcontext *)out = context_primary(block.device);
      break;
    case 2:
      *(unsigned *)out = is_host(&block) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case 3:
    case 4:
      *(CUdeviceptr *)out = at;
      break;
    case 6:  // synchronous memory operations
      *(unsigned *)out = 0;
      break;
    case 7:
      *(unsigned long long *)out = block.id;
      break;
    case 8:
      *(unsigned *)out = block.kind == MEMORY_MANAGED;
      break;
    case 9:
      *(int *)out = (int)block.device;
      break;
    case 10:  // can be shared by a handle of the older kind
      *(unsigned *)out = block.kind == MEMORY_DEVICE;
      break;
    case 11:
      *(void **)out = block.start;
      break;
    case 12:
      *(size_t *)out = block.bytes;
      break;
    case 13:
      *(unsigned *)out = is_known;
      break;
    case 14:
      *(unsigned long long *)out = block.kind == MEMORY_MAPPED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
      break;
    case 15:  // GPUDirect RDMA
      *(unsigned *)out = 0;
      break;
    case 16:
      *(unsigned *)out = 3;
      break;
    case 17:
      *(CUmemoryPool *)out = NULL;
      break;
    case 20:
      *(unsigned long long *)out = block.id;
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr at) {
  return pointer_attribute(out, attribute, at);
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **out, CUdeviceptr at) {
  for (unsigned i = 0; i < count; i++) {
    if (!pointer_attribute(out[i], attributes[i], at)) continue;
    bool is_short = attributes[i] == 2 || attributes[i] == 6 || attributes[i] == 8 || attributes[i] == 9;
    memset(out[i], 0, is_short ? 4 : 8);  // memory that is not ours: zeros, no error
    if (attributes[i] == 9) *(int *)out[i] = -2;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr at) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return transfer_copy((void *)to, (void *)from, bytes, stream, "cudaMemcpyAsync");
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  CUresult result = transfer_copy((void *)to, (void *)from, bytes, NULL, "cudaMemcpy");
  return result ? result : stream_wait(NULL);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  return cuMemcpy(to, (CUdeviceptr)from, bytes);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  return cuMemcpy((CUdeviceptr)to, from, bytes);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return cuMemcpy(to, from, bytes); }

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, (CUdeviceptr)from, bytes, stream);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync((CUdeviceptr)to, from, bytes, stream);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
  return cuMemcpy(to, from, bytes);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                  size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *what, CUstream stream) {
  rectangle area = {.width_bytes = what->width_bytes, .height = what->height};
  char *to = what->dst_memory_type == CU_MEMORYTYPE_HOST ? what->dst_host : (char *)what->dst_device;
  const char *from = what->src_memory_type == CU_MEMORYTYPE_HOST ? what->src_host : (const char *)what->src_device;
  area.to_pitch = what->dst_pitch ? what->dst_pitch : what->width_bytes;
  area.from_pitch = what->src_pitch ? what->src_pitch : what->width_bytes;
  area.to = to + what->dst_y * area.to_pitch + what->dst_x_bytes;
  area.from = from + what->src_y * area.from_pitch + what->src_x_bytes;
  return transfer_copy_rectangle(&area, stream, "cudaMemcpy2DAsync");
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *what) {
  CUresult result = cuMemcpy2DAsync_v2(what, NULL);
  return result ? result : stream_wait(NULL);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *what) { return cuMemcpy2D_v2(what); }

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return transfer_fill((void *)to, &value, 1, count, 1, 0, stream);
}

EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return transfer_fill((void *)to, &value, 2, count, 1, 0, stream);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return transfer_fill((void *)to, &value, 4, count, 1, 0, stream);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return cuMemsetD8Async(to, value, count, NULL);
}

EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  return cuMemsetD16Async(to, value, count, NULL);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  return cuMemsetD32Async(to, value, count, NULL);
}

EXPORT CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                  CUstream stream) {
  return transfer_fill((void *)to, &value, 1, width, height, pitch, stream);
}

EXPORT CUresult cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
  return cuMemsetD2D8Async(to, pitch, value, width, height, NULL);
}

// Memory pools: every allocation of a pool is one of the device, freed at the call.
struct CUmemPoolHandle_st {
  uint32_t device;
};
static struct CUmemPoolHandle_st default_pools[PRESET_MAX_DEVICES];

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
  *pool = calloc(1, sizeof **pool);
  if (!*pool) return CUDA_ERROR_OUT_OF_MEMORY;
  (*pool)->device = (uint32_t)properties->location.id;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  free(pool);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
  if (attribute <= 3)  // switches; what follows are 64-bit counts
    *(int *)value = 0;
  else
    *(uint64_t *)value = attribute == 7 ? memory_used(pool->device) : 0;  // in use now
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  if (device < 0 || (uint32_t)device >= preset_num_visible()) return CUDA_ERROR_INVALID_DEVICE;
  default_pools[device].device = (uint32_t)device;
  *pool = &default_pools[device];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
  return cuDeviceGetDefaultMemPool(pool, device);
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) { return CUDA_SUCCESS; }
