// The driver interface: modules, kernels, launches, occupancy, and how callers find functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "code.h"
#include "preset.h"

// Modules and libraries are places to find names in: one serves all.
struct CUmod_st {
  int unused;
};
static struct CUmod_st only_module;

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = &only_module;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
  return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }

EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = code_function(name);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *bytes, CUmodule module, const char *name) {
  return code_global(out, bytes, name, 0);
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode) {
  *mode = 2;  // lazy
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUmodule *library, const void *code, int *jit_options, void **jit_values, unsigned num_jit,
                                  int *options, void **values, unsigned count) {
  return cuModuleLoadData(library, code);
}

EXPORT CUresult cuLibraryUnload(CUmodule library) { return CUDA_SUCCESS; }

EXPORT CUresult cuLibraryGetKernel(CUfunction *kernel, CUmodule library, const char *name) {
  return cuModuleGetFunction(kernel, library, name);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUmodule library) { return cuModuleLoadData(module, NULL); }

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *out, size_t *bytes, CUmodule library, const char *name) {
  return code_global(out, bytes, name, 0);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUfunction kernel) {
  *function = kernel;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char **name, CUfunction kernel) {
  *name = kernel->name;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function) { return cuKernelGetName(name, function); }

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function) { return cuModuleLoadData(module, NULL); }

// Numbers of enum CUfunction_attribute. Registers: what leaves room for two blocks of 256 threads; nothing depends on it.
EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
  int capability = (int)(preset_get()->capability_major * 10 + preset_get()->capability_minor);
  switch (attribute) {
    case 0:
      *value = 1024;  // threads per block
      break;
    case 4:
      *value = 64;  // registers
      break;
    case 5:
    case 6:
      *value = capability;  // of its PTX and its binary
      break;
    case 8:
      *value = function->max_dynamic_shared_bytes ? function->max_dynamic_shared_bytes : 48 << 10;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, CUfunction kernel, CUdevice device) {
  return cuFuncGetAttribute(value, attribute, kernel);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  if (attribute == 8) function->max_dynamic_shared_bytes = value;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUfunction kernel, CUdevice device) {
  return cuFuncSetAttribute(kernel, attribute, value);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, int config) { return CUDA_SUCCESS; }

// Blocks that fit on a multiprocessor by threads and shared memory; registers are not known.
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, CUfunction function, int block_threads,
                                                                     size_t shared_bytes, unsigned flags) {
  int by_threads = block_threads > 0 ? 2048 / block_threads : 1;
  int by_shared = shared_bytes ? (int)((228u << 10) / (shared_bytes + 1024)) : 32;
  *count = by_threads < by_shared ? by_threads : by_shared;
  if (*count > 32) *count = 32;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block_threads,
                                                            size_t shared_bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, block_threads, shared_bytes, 0);
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 16;
  return CUDA_SUCCESS;
}

// Arguments in one buffer (`extra`) are not taken apart: such a kernel is timed only.
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  launch how = {config->grid, config->block, config->shared_bytes, arguments};
  return code_launch(function, &how, config->stream, "cuLaunchKernelEx");
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,
                               void **extra) {
  unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
  launch how = {grid, block, shared_bytes, arguments};
  return code_launch(function, &how, stream, "cuLaunchKernel");
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                          CUstream stream, void **arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, arguments, NULL);
}

// A descriptor for the tensor memory accelerator: no kernel of ours reads it.
EXPORT CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *at, const uint64_t *sizes,
                                       const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                       int interleave, int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  return CUDA_SUCCESS;
}

// A base name means the newest form of the function: cuMemAlloc is cuMemAlloc_v2. Where forms differ by the version asked for,
// the table says from which version on.
static const struct {
  const char *name;
  int from_version;
  const char *symbol;
} forms[] = {
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 0, "cuStreamGetCaptureInfo_v2"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 0, "cuGetProcAddress"},
    {"cuEventElapsedTime", 0, "cuEventElapsedTime"},
    {"cuGraphInstantiate", 0, "cuGraphInstantiateWithFlags"},
};

static void *find(const char *name, int version) {
  static void *self;
  char symbol[96];
  Dl_info here;
  if (!self && dladdr((void *)&only_module, &here)) self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!self) return NULL;
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if (!strcmp(forms[i].name, name) && version >= forms[i].from_version) return dlsym(self, forms[i].symbol);
  snprintf(symbol, sizeof symbol, "%s_v2", name);
  void *found = dlsym(self, symbol);
  return found ? found : dlsym(self, name);
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
  *out = strncmp(name, "cu", 2) ? NULL : find(name, version);
  if (status) *status = *out ? 0 : 1;  // 1: no such symbol
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

// The tables behind it belong to NVIDIA's own libraries. We have none, and what needs one does not run here.
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}
