// What the sibling libraries (runtime, NCCL, cuBLAS, CUPTI) use of the driver beyond CUDA's own interface.
// libcuda.so.1 exports one object of this type, `lagom_emulated_gpu`; everything else it exports is CUDA's driver interface.
#ifndef LAGOM_EMULATED_GPU_DEVICE_H
#define LAGOM_EMULATED_GPU_DEVICE_H
#include <stdbool.h>
#include <stdint.h>

#include "client.h"
#include "preset.h"
#include "stream.h"

#define EMULATED_GPU_VERSION 3u

// Who the ranks of a communicator are, by their numbers in the whole job; those from `num_started` on are no processes.
typedef struct {
  int num_ranks, num_started;
  int own;    // this process's place in `ranks`, -1 if it is none of them
  int peer;   // whom a send or receive is for, by its number in the job, -1 for anything else
  int *ranks; // the taker's, to be freed
} emulated_group;

// What profilers are shown of a kernel's launch, in one dimension; zeros are shown as ones.
typedef struct {
  unsigned num_blocks, num_threads;
} emulated_shape;

typedef struct {
  uint32_t version, bytes;
  uint32_t (*describe)(const char *json);
  uint64_t (*submit_op)(const client_op *op, uint64_t cost_ns);  // by numbers, not for streams that record a graph
  enum client_result (*wait)(uint64_t op_id);
  enum client_result (*wait_in_background)(uint64_t op_id);
  enum client_result (*query)(uint64_t op_id);
  bool (*times)(uint64_t op_id, uint64_t *start_ns, uint64_t *end_ns);
  uint64_t (*host_ns)(void);
  void (*advance)(uint64_t cost_ns);
  // On a CUstream or cudaStream_t, also one that records a graph (op_id is then 0). `sequence`, which may be NULL, outlives the
  // process's streams: it is incremented when the operation really runs and gives its instance. So may `shape`.
  int (*submit)(void *stream, uint32_t desc_id, const char *name, const emulated_shape *shape, uint64_t *sequence,
                uint64_t *op_id);
  int (*launch)(CUfunction function, const unsigned *grid, const unsigned *block, unsigned shared_bytes, void **arguments,
                CUstream stream, const char *api);
  const gpu_preset *(*preset)(void);
  const char *(*refusal)(void);
  uint32_t (*physical_device)(uint32_t ordinal);
  uint32_t (*bus)(uint32_t physical);
  bool (*has_nvlink)(uint32_t physical, uint32_t other);
  void (*set_settle)(bool (*settle)(const void *at, size_t bytes, bool may_wait));  // effect.h
  void (*observe)(void (*observer)(const activity *));
  bool (*take_group)(emulated_group *group);  // framework.h
  void (*refuse)(const char *text);
} emulated_gpu;

extern const emulated_gpu lagom_emulated_gpu;
#endif
