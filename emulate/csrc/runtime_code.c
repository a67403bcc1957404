// The runtime interface: kernels. A host function stands for each; names are registered when a library is loaded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "runtime.h"

typedef struct {
  const void *host;
  const char *name;  // of the device's side; the program's own text
  CUfunction function;
} registered;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static registered *table;  // open addressing by the host's address
static size_t num_registered, num_slots;

static size_t slot_of(const void *host) {
  size_t slot = ((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15ull & (num_slots - 1);
  while (table[slot].host && table[slot].host != host) slot = (slot + 1) & (num_slots - 1);
  return slot;
}

static void grow(void) {
  registered *old = table;
  size_t old_slots = num_slots;
  num_slots = num_slots ? 2 * num_slots : 16384;
  table = calloc(num_slots, sizeof *table);
  if (!table) abort();
  for (size_t i = 0; i < old_slots; i++)
    if (old[i].host) table[slot_of(old[i].host)] = old[i];
  free(old);
}

static registered *add(const void *host, const char *name) {  // needs the lock
  if (2 * num_registered >= num_slots) grow();
  registered *at = &table[slot_of(host)];
  if (!at->host) num_registered++;
  *at = (registered){host, name, NULL};
  return at;
}

static CUfunction function_of(const void *host) {
  pthread_mutex_lock(&lock);
  if (!num_slots) grow();
  registered *at = &table[slot_of(host)];
  if (!at->host) {  // not registered: a kernel handle made by the driver, or a library that we never saw
    Dl_info info;
    at = add(host, dladdr(host, &info) && info.dli_sname ? info.dli_sname : "kernel");
  }
  if (!at->function) cuModuleGetFunction(&at->function, NULL, at->name);
  CUfunction function = at->function;
  pthread_mutex_unlock(&lock);
  return function;
}

EXPORT void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[8];
  return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}

EXPORT void __cudaUnregisterFatBinary(void **handle) {}

EXPORT char __cudaInitModule(void **handle) { return 1; }

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device_side, const char *name, int thread_limit,
                                   void *thread_id, void *block_id, void *block, void *grid, int *warp_size) {
  pthread_mutex_lock(&lock);
  add(host, name);
  pthread_mutex_unlock(&lock);
}

EXPORT void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int is_extern, size_t bytes,
                              int is_constant, int is_global) {}

EXPORT void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name, int is_extern,
                                     size_t bytes, int is_constant, int is_global) {}

static _Thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared_bytes = shared_bytes, pushed.stream = stream;
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared_bytes = pushed.shared_bytes, *(void **)stream = pushed.stream;
  return cudaSuccess;
}

static cudaError_t start(CUfunction function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, CUstream stream,
                         const char *api) {
  cudaError_t error = runtime_enter();
  if (error) return error;
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || block.x * block.y * block.z > 1024)
    return runtime_result(9);  // cudaErrorInvalidConfiguration
  return runtime_result(lagom_emulated_gpu.launch(function, &grid.x, &block.x, (unsigned)shared_bytes, arguments, stream, api));
}

EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                                    CUstream stream) {
  return start(function_of(host), grid, block, arguments, shared_bytes, stream, "cudaLaunchKernel");
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  return start(function_of(host), config->grid, config->block, arguments, config->shared_bytes, config->stream,
               "cudaLaunchKernelExC");
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments,
                                               size_t shared_bytes, CUstream stream) {
  return start(function_of(host), grid, block, arguments, shared_bytes, stream, "cudaLaunchCooperativeKernel");
}

EXPORT cudaError_t __cudaGetKernel(CUfunction *kernel, const void *host) {
  *kernel = function_of(host);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetKernel(CUfunction *kernel, const void *host) { return __cudaGetKernel(kernel, host); }

EXPORT cudaError_t __cudaLaunchKernel(CUfunction kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                                      CUstream stream) {
  return start(kernel, grid, block, arguments, shared_bytes, stream, "cudaLaunchKernel");
}

EXPORT cudaError_t cudaGetFuncBySymbol(CUfunction *function, const void *host) { return __cudaGetKernel(function, host); }

EXPORT cudaError_t cudaFuncSetAttribute(const void *host, int attribute, int value) {
  return runtime_result(cuFuncSetAttribute(function_of(host), attribute, value));
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(CUfunction kernel, int attribute, int value, int device) {
  return runtime_result(cuFuncSetAttribute(kernel, attribute, value));
}

EXPORT cudaError_t cudaFuncSetCacheConfig(const void *host, int config) { return cudaSuccess; }

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *host) {
  CUfunction function = function_of(host);
  memset(out, 0, sizeof *out);
  cuFuncGetAttribute(&out->max_threads, 0, function);
  cuFuncGetAttribute(&out->registers, 4, function);
  cuFuncGetAttribute(&out->ptx_version, 5, function);
  cuFuncGetAttribute(&out->binary_version, 6, function);
  cuFuncGetAttribute(&out->max_dynamic_shared_bytes, 8, function);
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int block_threads,
                                                                          size_t shared_bytes, unsigned flags) {
  return runtime_result(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function_of(host), block_threads,
                                                                             shared_bytes, flags));
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *host, int block_threads,
                                                                 size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, host, block_threads, shared_bytes, 0);
}

// A device variable is known by its host shadow's address.
EXPORT cudaError_t cudaGetSymbolAddress(void **out, const void *host) {
  char name[32];
  cudaError_t error = runtime_enter();
  if (error) return error;
  snprintf(name, sizeof name, "symbol %p", host);
  return runtime_result(cuModuleGetGlobal_v2((CUdeviceptr *)out, NULL, NULL, name));
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *host, const void *from, size_t bytes, size_t offset, int kind) {
  void *at;
  cudaError_t error = cudaGetSymbolAddress(&at, host);
  return error ? error : runtime_result(cuMemcpy((CUdeviceptr)at + offset, (CUdeviceptr)from, bytes));
}

EXPORT cudaError_t cudaMemcpyToSymbolAsync(const void *host, const void *from, size_t bytes, size_t offset, int kind,
                                           CUstream stream) {
  void *at;
  cudaError_t error = cudaGetSymbolAddress(&at, host);
  return error ? error : runtime_result(cuMemcpyAsync((CUdeviceptr)at + offset, (CUdeviceptr)from, bytes, stream));
}

EXPORT cudaError_t cudaLibraryLoadData(CUmodule *library, const void *code, int *jit_options, void **jit_values,
                                       unsigned num_jit, int *options, void **values, unsigned count) {
  return runtime_result(cuModuleLoadData(library, code));
}

EXPORT cudaError_t cudaLibraryUnload(CUmodule library) { return cudaSuccess; }

EXPORT cudaError_t cudaLibraryGetKernel(CUfunction *kernel, CUmodule library, const char *name) {
  return runtime_result(cuLibraryGetKernel(kernel, library, name));
}

EXPORT cudaError_t cudaLibraryGetGlobal(void **out, size_t *bytes, CUmodule library, const char *name) {
  return runtime_result(cuModuleGetGlobal_v2((CUdeviceptr *)out, bytes, library, name));
}
