// What a framework says of the kernels that it launches next: taken into their descriptions, never parsed here.
#ifndef LAGOM_EMULATED_GPU_FRAMEWORK_H
#define LAGOM_EMULATED_GPU_FRAMEWORK_H

#define FRAMEWORK_MAX_BYTES 512

// Fields for the description of the kernel that this thread launches now, each with a comma in front; may be empty.
const char *framework_next_fields(void);

// A kernel was launched that computes nothing.
void framework_note_inexact(void);
#endif
