// What NCCL's host code does around a tuner plug-in, by release, 2.18 to 2.32.6: it looks for one, fills the cost table,
// asks, chooses, and cuts a collective into channels and chunks. The stand-in libnccl.so.2 and the plug-in's tests use it.
#ifndef LAGOM_NCCL_HOST_H
#define LAGOM_NCCL_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_host fake_host;  // one process's NCCL: which tuner it found
typedef struct fake_comm fake_comm;

// What NCCL's graph search and tuning model found for a communicator's ranks. Written by
// emulate/src/lagom_emulate/nccl_tables.py from the model in Python; all numbers that depend on the machine come from there.
typedef struct {
  uint32_t num_ranks, num_nodes;
  uint32_t num_channels;   // compute channels
  uint32_t nvls_channels;  // 0: no NVLS
  uint32_t compute_capability;
  uint32_t p2p_channels, p2p_channels_per_peer, p2p_chunk_bytes;
  uint32_t least_traffic_bytes;  // per channel of a launch
  uint32_t nvls_tree_chunk_bytes;
  float plateau;                 // Simple rings over nodes: their latency's factor for large all-reduces
  uint32_t has_nvls_tree_correction;
  uint32_t max_threads[7][3];       // by algorithm and protocol
  uint32_t thread_threshold[7][3];  // bytes per thread below which channels, then threads, are given up
  float latency_us[5][7][3];        // by kind, algorithm and protocol
  float bandwidth[5][7][3];         // GB/s of the whole tensor; 0: not offered
  float tree_correction[3][24];     // by protocol and power of two from 64 B; 1 from the entry before the last on
} nccl_shape;
_Static_assert(sizeof(nccl_shape) == 12 * 4 + 42 * 4 + 210 * 4 + 72 * 4, "the layout that tables.py writes");

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
  int32_t limits;         // of fake_limit
  int32_t element_bytes;  // 0: 4
} fake_call;

enum fake_limit {
  FAKE_NOT_NVLS = 1,  // the switch cannot reduce this operator and type
  FAKE_SCALED = 2,    // an average or a sum of scaled parts: not for PAT
};

enum fake_flag {
  FAKE_SIMULATE = 1,    // ncclGroupSimulateEnd: ask, do not launch
  FAKE_SYMMETRIC = 2,   // NVLink symmetric memory: the extra queries of 2.27 on and of 2.31 on
  FAKE_REGISTERED = 4,  // user buffers are registered
  FAKE_HELPERS = 8,     // prepare and launch on two threads of their own, as for non-blocking communicators
  FAKE_GATHER_V = 16,   // grouped broadcasts of several roots: 2.29 and 2.30 ask as for an all-gather of the largest
};

// What would have gone wrong in NCCL.
enum fake_fault {
  FAKE_FAULT_NO_CHOICE = 1,         // "no algorithm/protocol available": the collective fails
  FAKE_FAULT_UNAVAILABLE = 2,       // an algorithm that is not connected: crash
  FAKE_FAULT_CHANNELS = 4,          // negative or beyond the communicator's: crash
  FAKE_FAULT_CHUNK_ZERO = 8,        // division by zero
  FAKE_FAULT_NVLS_OVERRUN = 16,     // chunk beyond the NVLS buffer step
  FAKE_FAULT_OUT_OF_BOUNDS = 32,    // the tuner wrote outside the cost table
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
  int32_t num_threads;     // a channel's, in whole warps; the kernel's block is the most of a launch, at least 128
  int32_t channel;         // the first of its channels
  uint32_t place;          // among the calls of a group, in the order in which they are launched and logged
} fake_result;

fake_host* fake_open(int release);  // 21803, 22105, 22203, 22403, 22705, 22807, 22907, 23003, 23102, 23206
void fake_close(fake_host* host);
int fake_tuner_version(const fake_host* host);  // 0: none found
const char* fake_tuner_name(const fake_host* host);
size_t fake_take_log(char* text, size_t size);  // log lines of this process since the last call

// Where the tuner's log lines go; NULL: into the buffer of fake_take_log.
void fake_set_log(void (*log)(int level, unsigned long subsystems, const char* text));

fake_comm* fake_comm_init(fake_host* host, const fake_comm_spec* spec);
fake_comm* fake_comm_init_shape(fake_host* host, uint64_t comm_id, const nccl_shape* shape, const void* constants);
// Takes algorithms and protocols from what the communicator offers; returns it.
fake_comm* fake_deny(fake_comm* comm, const bool denied[5][7][3]);
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
