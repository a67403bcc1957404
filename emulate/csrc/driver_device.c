// The driver interface: devices and contexts.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "context.h"
#include "preset.h"
#include "stream.h"

#define DRIVER_VERSION 13020

static bool is_bad(CUdevice device) { return device < 0 || (uint32_t)device >= preset_num_visible(); }

EXPORT CUresult cuInit(unsigned flags) {
  if (preset_refusal()) return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  if (client_is_forked()) return CUDA_ERROR_NOT_INITIALIZED;
  client_expect_exit();
  return preset_num_visible() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  *count = preset_refusal() ? 0 : (int)preset_num_visible();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (is_bad(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, (size_t)room, "%s", preset_get()->name);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = preset_get()->memory_bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  memcpy(uuid->bytes, "lagom emulated\0\0", 16);
  uuid->bytes[14] = (char)preset_get()->host_index;
  uuid->bytes[15] = (char)preset_physical((uint32_t)device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

EXPORT CUresult cuDeviceGetLuid(char *luid, unsigned *mask, CUdevice device) { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int room, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, (size_t)room, "0000:%02x:00.0", preset_bus(preset_physical((uint32_t)device)));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
  unsigned domain, bus, slot;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t i = 0; i < preset_num_visible(); i++)
    if (preset_bus(preset_physical(i)) == bus) {
      *device = (CUdevice)i;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_DEVICE;
}

// Numbers of enum CUdevice_attribute. Per compute capability: CUDA C++ Programming Guide, table of technical specifications.
static int shared_bytes_of_sm(void) {
  const gpu_preset *gpu = preset_get();
  unsigned capability = gpu->capability_major * 10 + gpu->capability_minor;
  if (capability >= 90) return 228 << 10;
  if (capability == 80 || capability == 87) return 164 << 10;
  return 100 << 10;
}

static int attribute_of(int attribute, uint32_t physical) {
  const gpu_preset *gpu = preset_get();
  bool is_small = gpu->capability_major == 8 && gpu->capability_minor != 0;  // 8.6 and 8.9
  switch (attribute) {
    case 1:  // threads per block, and block dimensions x and y
    case 2:
    case 3:
      return 1024;
    case 4:  // block dimension z
      return 64;
    case 5:   // grid dimension x
    case 11:  // pitch
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case 8:  // shared memory per block
      return 48 << 10;
    case 9:  // constant memory
      return 64 << 10;
    case 10:  // warp
      return 32;
    case 12:  // registers per block, and per multiprocessor
    case 82:
      return 65536;
    case 13:  // kHz
      return (int)(gpu->clock_hz / 1000);
    case 14:  // texture alignment
      return 512;
    case 16:
      return (int)gpu->num_sms;
    case 33:
      return (int)preset_bus(physical);
    case 36:  // memory clock in kHz and bus width in bits: no more than what is printed
      return 2619000;
    case 37:
      return 5120;
    case 38:
      return (int)gpu->l2_bytes;
    case 39:  // threads per multiprocessor
      return is_small ? 1536 : 2048;
    case 40:  // copy engines
      return 3;
    case 51:  // texture pitch alignment
      return 32;
    case 75:
      return (int)gpu->capability_major;
    case 76:
      return (int)gpu->capability_minor;
    case 81:
      return shared_bytes_of_sm();
    case 87:  // single to double precision
      return is_small ? 64 : 2;
    case 97:  // shared memory per block, opted in
      return shared_bytes_of_sm() - 1024;
    case 106:  // blocks per multiprocessor
      return gpu->capability_major >= 9 || !is_small ? 32 : 16;
    case 111:  // reserved shared memory per block
      return 1024;
    case 120:  // cluster launch
      return gpu->capability_major >= 9;
    case 132:  // multicast
      return gpu->link == PRESET_NVSWITCH && gpu->capability_major >= 9;
    case 15:   // overlap of copies
    case 19:   // maps host memory
    case 31:   // concurrent kernels
    case 32:   // ECC
    case 41:   // unified addressing
    case 78:   // stream priorities
    case 79:   // L1 caches
    case 80:
    case 83:   // managed memory
    case 89:   // concurrent managed access
    case 90:   // compute preemption
    case 91:   // registered host pointers as they are
    case 95:   // cooperative launch
    case 92:   // stream memory operations of 32 and 64 bits
    case 93:
    case 94:
    case 99:   // registers host memory
    case 102:  // virtual memory
    case 103:  // as a file descriptor
    case 115:  // memory pools
    case 119:  // handle types of pools: file descriptors
    case 129:  // unified function pointers
      return 1;
    default:
      return 0;
  }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_of(attribute, preset_physical((uint32_t)device));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *major = (int)preset_get()->capability_major, *minor = (int)preset_get()->capability_minor;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  if (is_bad(device) || is_bad(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer;  // over PCIe too, under one root complex
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer) {
  if (is_bad(device) || is_bad(peer) || device == peer) return CUDA_ERROR_INVALID_DEVICE;
  bool has_nvlink = preset_has_nvlink(preset_physical((uint32_t)device), preset_physical((uint32_t)peer));
  // 1 performance rank (0 is best), 2 access, 3 native atomics, 4 array access
  *value = attribute == 1 ? !has_nvlink : attribute == 3 ? has_nvlink : 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *width, int format, unsigned channels, CUdevice device) {
  *width = 1u << 28;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetExecAffinitySupport(int *is_supported, int type, CUdevice device) {
  *is_supported = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_primary((uint32_t)device);
  (*context)->references++;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  context_primary((uint32_t)device)->references--;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  context_primary((uint32_t)device)->flags = flags;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = context_primary((uint32_t)device)->flags;
  *is_active = context_primary((uint32_t)device)->references > 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { return CUDA_ERROR_NOT_SUPPORTED; }

static _Thread_local CUcontext below[16];  // the stack under the current context
static _Thread_local int depth;

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = context_current();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  context_set(context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (depth == 16) return CUDA_ERROR_INVALID_CONTEXT;
  below[depth++] = context_current();
  context_set(context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_current();
  context_set(below[--depth]);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  if (!context_current()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = (CUdevice)context_device();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags) {
  *flags = context_current() ? context_current()->flags : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned flags) {
  if (!context_current()) return CUDA_ERROR_INVALID_CONTEXT;
  context_current()->flags = flags;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
  if (!context) context = context_current();
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *id = context->device + 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
  *version = 3020;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, int limit) {
  *value = 1024;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetCacheConfig(int *config) {
  *config = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(int config) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) { return device_wait(context_device()); }

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
  if (is_bad(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = calloc(1, sizeof **context);
  if (!*context) return CUDA_ERROR_OUT_OF_MEMORY;
  **context = (struct CUctx_st){(uint32_t)device, 1, flags};
  return cuCtxPushCurrent_v2(*context);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
  if (context_current() == context) cuCtxPopCurrent_v2(NULL);
  free(context);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  static _Thread_local char line[64];
  snprintf(line, sizeof line, "error %d of the emulated device", error);
  *text = line;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  static _Thread_local char line[32];
  snprintf(line, sizeof line, "CUDA_ERROR_%d", error);
  *text = line;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuProfilerStart(void) { return CUDA_SUCCESS; }

EXPORT CUresult cuProfilerStop(void) { return CUDA_SUCCESS; }
