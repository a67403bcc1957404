// Code that was loaded or registered: kernels are known by name and are timed, not run.
#ifndef LAGOM_EMULATED_GPU_CODE_H
#define LAGOM_EMULATED_GPU_CODE_H
#include "stream.h"

struct CUfunc_st {
  char *name;
  int max_dynamic_shared_bytes;
  CUfunction next;
};

typedef struct {
  const unsigned *grid, *block;
  unsigned shared_bytes;
  void *const *arguments;
} launch;

CUfunction code_function(const char *name);  // one per name
CUresult code_global(CUdeviceptr *out, size_t *bytes, const char *name, size_t wanted_bytes);
CUresult code_launch(CUfunction function, const launch *how, CUstream stream, const char *api);
#endif
