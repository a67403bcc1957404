// Contexts: which GPU a thread's calls go to.
#ifndef LAGOM_EMULATED_GPU_CONTEXT_H
#define LAGOM_EMULATED_GPU_CONTEXT_H
#include "abi.h"

struct CUctx_st {
  uint32_t device;
  _Atomic int references;
  unsigned flags;
};

CUcontext context_primary(uint32_t device);
CUcontext context_current(void);
void context_set(CUcontext context);
uint32_t context_device(void);  // ordinal of the current context, 0 without one
#endif
