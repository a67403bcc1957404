#include "context.h"

#include "preset.h"

#define CONTEXT(i) {.device = i}
static struct CUctx_st primary[PRESET_MAX_DEVICES] = {
    CONTEXT(0), CONTEXT(1), CONTEXT(2),  CONTEXT(3),  CONTEXT(4),  CONTEXT(5),  CONTEXT(6),  CONTEXT(7),
    CONTEXT(8), CONTEXT(9), CONTEXT(10), CONTEXT(11), CONTEXT(12), CONTEXT(13), CONTEXT(14), CONTEXT(15),
};
static _Thread_local CUcontext current;

CUcontext context_primary(uint32_t device) { return &primary[device]; }

CUcontext context_current(void) { return current; }

void context_set(CUcontext context) { current = context; }

uint32_t context_device(void) { return current ? current->device : 0; }
