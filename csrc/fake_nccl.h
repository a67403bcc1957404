// A stand-in for NCCL that drives a tuner plug-in as the releases 2.21 to 2.32.6 do, without a GPU.
#ifndef LAGOM_FAKE_NCCL_H
#define LAGOM_FAKE_NCCL_H

#include <stddef.h>
#include <stdint.h>

typedef struct fake_host fake_host;  // one process's NCCL: which tuner it found
typedef struct fake_comm fake_comm;

typedef struct {
  uint64_t comm_id;
  uint64_t num_ranks;
  uint64_t num_nodes;
  int32_t num_channels;
  int32_t nvls_channels;  // 0: no NVLS
  int32_t has_collnet;
  int32_t has_ll128;
} fake_comm_spec;

typedef struct {
  uint64_t num_bytes;   // as the tuner sees them
  int32_t kind;
  int32_t op_and_type;  // calls are aggregated with equal ones only
} fake_call;

enum fake_flag {
  FAKE_SIMULATE = 1,    // ncclGroupSimulateEnd: ask, do not launch
  FAKE_SYMMETRIC = 2,   // NVLink symmetric memory: the extra queries of 2.27 on and of 2.31 on
  FAKE_REGISTERED = 4,  // user buffers are registered
  FAKE_HELPERS = 8,     // prepare and launch on two threads of their own, as for non-blocking communicators
};

// What would have gone wrong in NCCL.
enum fake_fault {
  FAKE_FAULT_NO_CHOICE = 1,         // "no algorithm/protocol available": the collective fails
  FAKE_FAULT_UNAVAILABLE = 2,       // an algorithm that is not connected: crash
  FAKE_FAULT_CHANNELS = 4,          // negative or beyond the communicator's: crash
  FAKE_FAULT_CHUNK_ZERO = 8,        // division by zero
  FAKE_FAULT_NVLS_OVERRUN = 16,     // chunk beyond the NVLS buffer step
  FAKE_FAULT_OUT_OF_BOUNDS = 32,    // the tuner wrote beside the cost table
  FAKE_FAULT_TUNER_ERROR = 64,      // the tuner returned an error: the collective fails
};

typedef struct {
  int32_t algorithm;
  int32_t protocol;
  int32_t max_channels;    // decided
  int32_t num_channels;    // used: the grid
  uint64_t chunk_bytes[3]; // low, middle, high channels; 0 where there is none
  uint64_t channel_bytes[3];
  int32_t tuner_channels;  // as the tuner left it, 0: untouched
  int32_t num_tuner_calls; // getCollInfo, for this call or its aggregate
  int32_t num_chunk_calls;
  uint32_t faults;
  float predicted_us;      // NCCL's own cost of what was chosen
  float cost_before[21];
  float cost_after[21];
  uint32_t reserved;
} fake_result;

fake_host* fake_open(int release);  // 22105, 22203, 22403, 22807, 23003, 23102, 23206
void fake_close(fake_host* host);
int fake_tuner_version(const fake_host* host);  // 0: none found
const char* fake_tuner_name(const fake_host* host);
size_t fake_take_log(char* text, size_t size);  // log lines of this process since the last call

fake_comm* fake_comm_init(fake_host* host, const fake_comm_spec* spec);
void fake_comm_finalize(fake_comm* comm);
void fake_set_costs(fake_comm* comm, const float* costs_us);  // 21 fixed costs, -1 unavailable; NULL: the model's

int fake_prepare(fake_comm* comm, const fake_call* calls, int num_calls, int flags);
int fake_launch(fake_comm* comm);
int fake_group(fake_comm* comm, const fake_call* calls, int num_calls, int flags, fake_result* results);
void fake_results(const fake_comm* comm, fake_result* results);

// Raw calls, for timing and for what NCCL itself would never do.
int fake_raw_coll_info(fake_comm* comm, int kind, uint64_t num_bytes, int num_pipe_ops, float* costs, int num_algorithms,
                       int num_protocols, int registered, int* num_channels);
int fake_raw_chunk_size(fake_comm* comm, int kind, uint64_t num_bytes, int algorithm, int protocol, int num_channels,
                        uint64_t* chunk_bytes);

enum fake_timing {
  FAKE_TIME_COLL_INFO = 0,
  FAKE_TIME_CHUNK_SIZE = 1,
  FAKE_TIME_COLD = 2,  // getCollInfo after the caches were flushed with 16 MiB of other data
};

// Times single decisions, a getCollInfo and a getChunkSize each. Writes the nanoseconds of one of the two, less the cost
// of reading the clock, and returns that cost.
double fake_time(fake_comm* const* comms, const uint32_t* which, const uint64_t* sizes, int num_calls, int timing,
                 float* nanoseconds);

#endif
