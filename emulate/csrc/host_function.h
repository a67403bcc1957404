// Host callbacks of streams. A thread of ours runs them when their place in the stream is reached, and so does whoever waits
// for the stream, since a wait returns only after the callbacks before it.
#ifndef LAGOM_EMULATED_GPU_HOST_FUNCTION_H
#define LAGOM_EMULATED_GPU_HOST_FUNCTION_H
#include "abi.h"

void host_function_add(uint64_t op_id, uint32_t device, uint32_t stream, CUhostFn function, void *argument);

// Runs, or waits for, the callbacks of this stream up to op_id, which has ended.
void host_function_finish(uint64_t op_id, uint32_t device, uint32_t stream);
#endif
