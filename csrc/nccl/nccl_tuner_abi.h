// The binary interface between NCCL and a tuner plug-in, versions 2 to 7.
//
// Struct layouts, enum values and call signatures are facts about NCCL (checked against the releases named next to them
// each struct); names and words are ours, so that the plug-in builds without NCCL's headers.
//
//   release      newest version it looks for   what is new
//   2.21         v2                            algorithm, protocol and channels as outputs; no cost table
//   2.22 - 2.23  v3                            flat cost table
//   2.24 - 2.27  v4                            regBuff
//   2.28 - 2.29  v5                            communicator id, NVLink domains and model constants at init
//   2.30 - 2.32  v6                            getChunkSize
//   2.32.6       v7                            constants with a fifth GPU generation
#ifndef LAGOM_NCCL_TUNER_ABI_H
#define LAGOM_NCCL_TUNER_ABI_H

#include <stddef.h>
#include <stdint.h>

#define NCCL_SUCCESS 0
#define NCCL_INTERNAL_ERROR 3

enum nccl_kind {
  NCCL_BROADCAST = 0,
  NCCL_REDUCE = 1,
  NCCL_ALL_GATHER = 2,
  NCCL_REDUCE_SCATTER = 3,
  NCCL_ALL_REDUCE = 4,
  NCCL_NUM_KINDS = 5
};

enum nccl_algorithm {
  NCCL_TREE = 0,
  NCCL_RING = 1,
  NCCL_COLLNET_DIRECT = 2,
  NCCL_COLLNET_CHAIN = 3,
  NCCL_NVLS = 4,
  NCCL_NVLS_TREE = 5,
  NCCL_PAT = 6,  // since 2.23; 2.21 and 2.22 pass numAlgo = 6
  NCCL_NUM_ALGORITHMS = 7
};

enum nccl_protocol { NCCL_LL = 0, NCCL_LL128 = 1, NCCL_SIMPLE = 2, NCCL_NUM_PROTOCOLS = 3 };

// Granularity of a chunk in bytes; NCCL rounds a chunk down to it, and a chunk below it divides by zero.
enum nccl_grain { NCCL_GRAIN_LL = 16, NCCL_GRAIN_LL128 = 1920, NCCL_GRAIN_SIMPLE = 512 };

enum nccl_log_level { NCCL_LOG_LEVEL_WARN = 2, NCCL_LOG_LEVEL_INFO = 3 };
enum nccl_log_subsystem { NCCL_SUBSYSTEM_INIT = 0x1, NCCL_SUBSYSTEM_TUNING = 0x40 };

#define NCCL_MAX_CHANNELS 64  // 32 before 2.25; NCCL caps a total above the communicator's own

typedef int nccl_result;
typedef void (*nccl_logger)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);

typedef struct {
  int num_domains;
  int min_ranks_per_domain;
  int max_ranks_per_domain;
} nccl_nvlink_domains;

enum { NCCL_NUM_LINK_TYPES = 3, NCCL_NUM_SCALES = 3, NCCL_NUM_GPU_GENERATIONS_V5 = 4, NCCL_NUM_GPU_GENERATIONS_V7 = 5 };

// v5 and v6. Latencies in us, bandwidths in GB/s.
typedef struct {
  double base_latencies[NCCL_NUM_ALGORITHMS][NCCL_NUM_PROTOCOLS];
  double link_latencies[NCCL_NUM_LINK_TYPES][NCCL_NUM_ALGORITHMS][NCCL_NUM_PROTOCOLS];
  double bandwidths[5][NCCL_NUM_GPU_GENERATIONS_V5][NCCL_NUM_SCALES];  // LL, ring LL128, tree LL128, tree, NVLS tree
} nccl_constants_v5;

typedef struct {
  double base_latencies[NCCL_NUM_ALGORITHMS][NCCL_NUM_PROTOCOLS];
  double link_latencies[NCCL_NUM_LINK_TYPES][NCCL_NUM_ALGORITHMS][NCCL_NUM_PROTOCOLS];
  double bandwidths[5][NCCL_NUM_GPU_GENERATIONS_V7][NCCL_NUM_SCALES];
} nccl_constants_v7;

typedef struct {  // 2.21
  const char* name;
  nccl_result (*init)(size_t num_ranks, size_t num_nodes, nccl_logger log, void** context);
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int collnet_support, int nvls_support,
                               int num_pipe_ops, int* algorithm, int* protocol, int* num_channels);
  nccl_result (*destroy)(void* context);
} nccl_tuner_v2;

typedef struct {  // 2.22
  const char* name;
  nccl_result (*init)(size_t num_ranks, size_t num_nodes, nccl_logger log, void** context);
  // `table` is declared float** by NCCL but points to num_algorithms * num_protocols floats in one row.
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int num_pipe_ops, float** table,
                               int num_algorithms, int num_protocols, int* num_channels);
  nccl_result (*destroy)(void* context);
} nccl_tuner_v3;

typedef struct {  // 2.24
  const char* name;
  nccl_result (*init)(size_t num_ranks, size_t num_nodes, nccl_logger log, void** context);
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int num_pipe_ops, float** table,
                               int num_algorithms, int num_protocols, int registered, int* num_channels);
  nccl_result (*destroy)(void* context);
} nccl_tuner_v4;

typedef struct {  // 2.28
  const char* name;
  nccl_result (*init)(void** context, uint64_t comm_id, size_t num_ranks, size_t num_nodes, nccl_logger log,
                      nccl_nvlink_domains* domains, nccl_constants_v5* constants);
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int num_pipe_ops, float** table,
                               int num_algorithms, int num_protocols, int registered, int* num_channels);
  nccl_result (*finalize)(void* context);
} nccl_tuner_v5;

typedef struct {  // 2.30.3
  const char* name;
  nccl_result (*init)(void** context, uint64_t comm_id, size_t num_ranks, size_t num_nodes, nccl_logger log,
                      nccl_nvlink_domains* domains, nccl_constants_v5* constants);
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int num_pipe_ops, float** table,
                               int num_algorithms, int num_protocols, int registered, int* num_channels);
  nccl_result (*finalize)(void* context);
  nccl_result (*get_chunk_size)(void* context, int kind, size_t num_bytes, int algorithm, int protocol,
                                int num_channels, size_t* chunk_bytes);
} nccl_tuner_v6;

typedef struct {  // 2.32.6
  const char* name;
  nccl_result (*init)(void** context, uint64_t comm_id, size_t num_ranks, size_t num_nodes, nccl_logger log,
                      nccl_nvlink_domains* domains, nccl_constants_v7* constants);
  nccl_result (*get_coll_info)(void* context, int kind, size_t num_bytes, int num_pipe_ops, float** table,
                               int num_algorithms, int num_protocols, int registered, int* num_channels);
  nccl_result (*finalize)(void* context);
  nccl_result (*get_chunk_size)(void* context, int kind, size_t num_bytes, int algorithm, int protocol,
                                int num_channels, size_t* chunk_bytes);
} nccl_tuner_v7;

#endif
