// A process's connection to the coordinator, its operations' times, and its host's virtual clock.
// One per process. Without LAGOM_EMULATION_SOCKET operations take toy times, computed here, so that the device can be tested alone.
#ifndef LAGOM_EMULATED_GPU_CLIENT_H
#define LAGOM_EMULATED_GPU_CLIENT_H
#include <stdbool.h>
#include <stdint.h>

#define CLIENT_TOY_NS 10000u      // an operation's time without a coordinator
#define CLIENT_QUERY_COST_NS 1000u  // what an event call or a query costs the host
// A thread that does nothing but poll spends this share more of what it has polled for with each query that is answered "not yet". What it would do
// between two queries (sleep) takes no virtual time, and a round trip of real time for each microsecond would take minutes.
#define CLIENT_POLL_SHARE 64u
#define CLIENT_MAX_DEVICES 16

enum client_result { CLIENT_DONE = 0, CLIENT_PENDING = 1, CLIENT_FAILED = -1 };

typedef struct {
  uint32_t device, stream, desc_id;
  int32_t priority;
  uint64_t after_op;  // the operation that must have ended, 0 for none
  uint64_t instance;  // collectives: the sequence number in their communicator
} client_op;

// The number of this JSON text; the coordinator is told of each text once. 0 if the text is longer than a record may be.
uint32_t client_describe(const char *json);

// Sends one operation, issued at the host's clock, which then moves by cost_ns. Returns its op_id, 0 when the job is refused.
uint64_t client_submit(const client_op *op, uint64_t cost_ns);

// Blocks until the operation has ended and moves the host's clock to its end. op_id 0 has ended.
enum client_result client_wait(uint64_t op_id);

// The same for our own helper threads: the program's host neither waits nor moves.
enum client_result client_wait_in_background(uint64_t op_id);

// Whether the operation has ended at the host's clock, which a thread that polls moves on (CLIENT_POLL_SHARE). Threads that never submitted leave the clock alone.
enum client_result client_query(uint64_t op_id);

// Start and end of an operation that is known to have ended; false otherwise.
bool client_times(uint64_t op_id, uint64_t *start_ns, uint64_t *end_ns);

// From here on the process says that it has finished when it ends, after what registers later: libraries that were first used
// once CUDA was initialised (PyTorch's singletons) still find the device when they are unloaded.
void client_expect_exit(void);

uint64_t client_host_ns(void);
void client_advance(uint64_t cost_ns);
uint64_t client_launch_ns(void);  // LAGOM_EMULATION_LAUNCH_NS
bool client_is_forked(void);      // a forked child has no device, as with CUDA itself
#endif
