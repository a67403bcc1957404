// What a framework says of the kernels that it launches next: taken into their descriptions, never parsed here.
#ifndef LAGOM_EMULATED_GPU_FRAMEWORK_H
#define LAGOM_EMULATED_GPU_FRAMEWORK_H

#include <stdbool.h>
#include <stdint.h>

#include "device.h"

#define FRAMEWORK_MAX_BYTES 512

// Fields for the description of the kernel that this thread launches now, each with a comma in front; may be empty.
const char *framework_next_fields(void);

// The group that this thread's framework makes a communicator for, once; false if it has named none.
bool framework_take_group(emulated_group *group);

// One line for the coordinator, which ends the job with it.
void lagom_emulation_refuse(const char *text);

// What an operator of this thread is about to read from its GPU to know how much it makes; false if it is not known.
bool framework_counted(uint64_t *number);

// A kernel was launched that computes nothing.
void framework_note_inexact(void);
#endif
