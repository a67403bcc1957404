// What the profiler plug-in is told of a call and the tuner plug-in is not: whether a CUDA graph captures it.
//
// From profiler interface 5 on (NCCL 2.28) NCCL tells of each call in the thread that makes it, before it asks the tuner
// about it in that thread. Where it asks in another one (non-blocking communicators), or tells nothing, nothing is known.
#ifndef LAGOM_CAPTURE_H
#define LAGOM_CAPTURE_H

enum lagom_call { LAGOM_CALL_UNKNOWN, LAGOM_CALL_OUTSIDE, LAGOM_CALL_CAPTURED };

// Of the calling thread. Kept without thread-local storage: a first access may allocate, within a call of NCCL, and the
// fixed space of threads is so small that the plug-in could not be loaded. A thread whose place another one has taken
// since knows nothing.
void lagom_note_call(enum lagom_call call);
enum lagom_call lagom_noted_call(void);

#endif
