// CUPTI's activity records, as PyTorch's profiler reads them. Layouts as NVIDIA publishes them; those of CUDA 12 and 13 differ in
// the kernel's tail only.
#ifndef LAGOM_EMULATED_GPU_CUPTI_RECORD_H
#define LAGOM_EMULATED_GPU_CUPTI_RECORD_H
#include <stddef.h>
#include <stdint.h>

enum {
  KIND_MEMCPY = 1,
  KIND_MEMSET = 2,
  KIND_DRIVER = 4,
  KIND_RUNTIME = 5,
  KIND_KERNEL = 10,
  KIND_MEMCPY_PEER = 22,
  KIND_CUDA_EVENT = 36,
  KIND_SYNCHRONIZATION = 38,
  KIND_EXTERNAL = 39,
  NUM_KINDS = 64,
};

typedef struct {
  uint32_t kind;
  uint8_t cache_config, shared_config;
  uint16_t registers;
  uint32_t cache_requested, cache_executed;
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], static_shared, dynamic_shared;
  uint32_t local_per_thread, local_total, correlation;
  int64_t grid_id;
  const char *name;
  void *reserved;
  uint64_t queued, submitted;
  uint8_t launch_type, carveout_is_requested, carveout, padding;
  uint32_t shared_executed;
  uint64_t graph_node;
  uint32_t shared_limit, graph;
  void *access_policy;
  uint32_t channel, channel_type, cluster[3], cluster_policy;
  uint64_t local_total_v2;
  uint32_t max_cluster, max_active_clusters;
#if RUNTIME_MAJOR >= 13
  uint8_t is_device_launched, padding3[7];
  int32_t priority;
  uint32_t padding4;
#endif
} kernel_record;

typedef struct {
  uint32_t kind;
  uint8_t copy_kind, from_kind, to_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation, runtime_correlation, pad;
  void *reserved;
  uint64_t graph_node;
  uint32_t graph, channel, channel_type, pad2;
  uint64_t num_copies;
} memcpy_record;

typedef struct {
  uint32_t kind;
  uint8_t copy_kind, from_kind, to_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, from_device, from_context, to_device, to_context, correlation;
  void *reserved;
  uint64_t graph_node;
  uint32_t graph, channel, channel_type, pad;
} peer_record;

typedef struct {
  uint32_t kind, value;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
  uint16_t flags, memory_kind;
  uint32_t pad;
  void *reserved;
  uint64_t graph_node;
  uint32_t graph, channel, channel_type, pad2;
} memset_record;

typedef struct {
  uint32_t kind, callback;
  uint64_t start, end;
  uint32_t process, thread, correlation, result;
} api_record;

typedef struct {
  uint32_t kind, external_kind;
  uint64_t external_id;
  uint32_t correlation, reserved;
} external_record;

typedef struct {
  uint32_t kind, type;
  uint64_t start, end;
  uint32_t correlation, context, stream, event;
  uint64_t event_sync;
  uint32_t result, pad;
} sync_record;

typedef struct {
  uint32_t kind, correlation, context, stream, event, pad, device, pad2;
  void *reserved;
  uint64_t at, event_sync;
} cuda_event_record;

#if RUNTIME_MAJOR >= 13
_Static_assert(sizeof(kernel_record) == 224, "CUpti_ActivityKernel11");
#else
_Static_assert(sizeof(kernel_record) == 208, "CUpti_ActivityKernel9");
#endif
_Static_assert(offsetof(kernel_record, graph_node) == 144 && offsetof(kernel_record, name) == 104, "kernel");
_Static_assert(sizeof(memcpy_record) == 96 && offsetof(memcpy_record, graph_node) == 64, "CUpti_ActivityMemcpy6");
_Static_assert(sizeof(peer_record) == 96 && offsetof(peer_record, correlation) == 60, "CUpti_ActivityMemcpyPtoP4");
_Static_assert(sizeof(memset_record) == 88 && offsetof(memset_record, graph_node) == 64, "CUpti_ActivityMemset4");
_Static_assert(sizeof(api_record) == 40, "CUpti_ActivityAPI");
_Static_assert(sizeof(external_record) == 24, "CUpti_ActivityExternalCorrelation");
_Static_assert(sizeof(sync_record) == 56 && offsetof(sync_record, event) == 36, "CUpti_ActivitySynchronization2");
_Static_assert(sizeof(cuda_event_record) == 56 && offsetof(cuda_event_record, at) == 40, "CUpti_ActivityCudaEvent2");

static inline size_t record_bytes(uint32_t kind) {
  switch (kind) {
    case KIND_KERNEL:
      return sizeof(kernel_record);
    case KIND_MEMCPY:
      return sizeof(memcpy_record);
    case KIND_MEMCPY_PEER:
      return sizeof(peer_record);
    case KIND_MEMSET:
      return sizeof(memset_record);
    case KIND_RUNTIME:
    case KIND_DRIVER:
      return sizeof(api_record);
    case KIND_EXTERNAL:
      return sizeof(external_record);
    case KIND_SYNCHRONIZATION:
      return sizeof(sync_record);
    case KIND_CUDA_EVENT:
      return sizeof(cuda_event_record);
    default:
      return 0;
  }
}
#endif
