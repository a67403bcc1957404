// The runtime interface: devices, errors, versions.
#include <stdio.h>
#include <string.h>

#include "runtime.h"

static _Thread_local int device, current = -1;
static _Thread_local cudaError_t last_error;

cudaError_t runtime_result(CUresult result) {
  if (result && result != cudaErrorNotReady) last_error = result;
  return result;
}

cudaError_t runtime_enter(void) {
  CUcontext context;
  if (current == device) return cudaSuccess;
  CUresult result = cuInit(0);
  if (!result) result = cuDevicePrimaryCtxRetain(&context, device);
  if (!result) result = cuCtxSetCurrent(context);
  if (!result) current = device;
  return runtime_result(result);
}

// The driver's current context counts where a caller has set it.
void runtime_follow_device(void) {
  CUdevice now;
  if (!cuCtxGetDevice(&now)) device = current = now;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  CUresult result = cuInit(0);
  *count = 0;
  return runtime_result(result ? result : cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaSetDevice(int wanted) {
  int count;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error) return error;
  if (wanted < 0 || wanted >= count) return runtime_result(cudaErrorInvalidDevice);
  device = wanted;
  current = -1;
  return runtime_enter();
}

EXPORT cudaError_t cudaInitDevice(int wanted, unsigned device_flags, unsigned flags) { return cudaSetDevice(wanted); }

EXPORT cudaError_t cudaGetDevice(int *out) {
  runtime_follow_device();
  *out = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceFlags(unsigned *flags) {
  *flags = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
  cudaError_t error = runtime_enter();
  return error ? error : runtime_result(cuCtxSynchronize());
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int of) {
  CUresult result = cuInit(0);
  return runtime_result(result ? result : cuDeviceGetAttribute(value, attribute, of));
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int of) {
  return runtime_result(cuDeviceGetPCIBusId(text, room, of));
}

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int *out, const char *text) {
  return runtime_result(cuDeviceGetByPCIBusId(out, text));
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int of, int peer) {
  return runtime_result(cuDeviceCanAccessPeer(can, of, peer));
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int of, int peer) {
  return runtime_result(cuDeviceGetP2PAttribute(value, attribute, of, peer));
}

EXPORT cudaError_t cudaDeviceSetLimit(int limit, size_t value) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetLimit(size_t *value, int limit) {
  *value = 1024;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return runtime_result(cuCtxGetStreamPriorityRange(least, greatest));
}

EXPORT cudaError_t cudaDeviceSetCacheConfig(int config) { return cudaSuccess; }

static int attribute(int number, int of) {
  int value = 0;
  cuDeviceGetAttribute(&value, number, of);
  return value;
}

static void fill_limits(cudaDeviceProp *p, int of) {
  p->shared_bytes_per_block = (size_t)attribute(8, of);
  p->registers_per_block = p->registers_per_sm = attribute(12, of);
  p->warp_size = attribute(10, of);
  p->max_pitch = (size_t)attribute(11, of);
  p->max_threads_per_block = attribute(1, of);
  for (int i = 0; i < 3; i++) p->max_threads_dim[i] = attribute(2 + i, of), p->max_grid[i] = attribute(5 + i, of);
  p->constant_bytes = (size_t)attribute(9, of);
  p->texture_alignment = (size_t)attribute(14, of);
  p->texture_pitch_alignment = (size_t)attribute(51, of);
  p->max_threads_per_sm = attribute(39, of);
  p->shared_bytes_per_sm = (size_t)attribute(81, of);
  p->shared_bytes_opt_in = (size_t)attribute(97, of);
  p->max_blocks_per_sm = attribute(106, of);
  p->reserved_shared_bytes = (size_t)attribute(111, of);
  p->surface_alignment = 512;
}

EXPORT cudaError_t IF_12(cudaGetDeviceProperties_v2) IF_13(cudaGetDeviceProperties)(cudaDeviceProp *p, int of) {
  CUresult result = cuInit(0);
  memset(p, 0, sizeof *p);
  if (!result) result = cuDeviceGetName(p->name, sizeof p->name, of);
  if (result) return runtime_result(result);
  cuDeviceGetUuid_v2(&p->uuid, of);
  cuDeviceTotalMem_v2(&p->total_bytes, of);
  fill_limits(p, of);
  p->major = attribute(75, of), p->minor = attribute(76, of);
  p->num_sms = attribute(16, of);
  IF_12(p->clock_khz = attribute(13, of); p->memory_clock_khz = attribute(36, of); p->device_overlap = 1;)
  p->memory_bus_width = attribute(37, of);
  p->l2_bytes = attribute(38, of);
  p->pci_bus = attribute(33, of);
  p->async_engines = attribute(40, of);
  p->can_map_host_memory = p->concurrent_kernels = p->ecc = p->unified_addressing = p->stream_priorities = 1;
  p->global_l1 = p->local_l1 = p->managed_memory = p->concurrent_managed_access = p->compute_preemption = 1;
  p->host_pointer_for_registered = p->cooperative_launch = p->host_register = p->memory_pools = 1;
  p->pool_handle_types = 1;
  p->cluster_launch = attribute(120, of);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = IF_12(12090) IF_13(13020);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct {
  cudaError_t error;
  const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {46, "cudaErrorDevicesUnavailable", "the emulated device has been stopped by its coordinator"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {801, "cudaErrorNotSupported", "operation not supported by the emulated device"},
    {803, "cudaErrorSystemDriverMismatch", "the emulated device is refused on this machine"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
};

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) return errors[i].text;
  return "an error of the emulated device";
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) return errors[i].name;
  return "cudaErrorUnknown";
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                                    int *status) {
  int how;
  CUresult result = cuGetProcAddress_v2(name, out, (int)version, flags, &how);
  if (status) *status = result ? 1 : 0;
  return cudaSuccess;  // a missing symbol is told by the status
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, out, IF_12(12090) IF_13(13020), flags, status);
}

EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
