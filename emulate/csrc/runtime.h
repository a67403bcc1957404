// The CUDA runtime on top of the emulated driver. Built twice: RUNTIME_MAJOR is 12 or 13, where layouts and names differ.
#ifndef LAGOM_EMULATED_GPU_RUNTIME_H
#define LAGOM_EMULATED_GPU_RUNTIME_H
#include "abi.h"
#include "driver.h"

typedef int cudaError_t;

enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorNotSupported = 801,
};

typedef struct {
  unsigned x, y, z;
} dim3;

#if RUNTIME_MAJOR >= 13
#define IF_12(...)
#define IF_13(...) __VA_ARGS__
#else
#define IF_12(...) __VA_ARGS__
#define IF_13(...)
#endif

typedef struct {
  char name[256];
  CUuuid uuid;
  char luid[8];
  unsigned luid_mask;
  size_t total_bytes, shared_bytes_per_block;
  int registers_per_block, warp_size;
  size_t max_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid[3];
  IF_12(int clock_khz;)
  size_t constant_bytes;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  IF_12(int device_overlap;)
  int num_sms;
  IF_12(int kernel_timeout;)
  int integrated, can_map_host_memory;
  IF_12(int compute_mode;)
  int textures[IF_12(39) IF_13(38)];
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc_driver, async_engines, unified_addressing;
  IF_12(int memory_clock_khz;)
  int memory_bus_width, l2_bytes, persisting_l2_bytes, max_threads_per_sm, stream_priorities, global_l1, local_l1;
  size_t shared_bytes_per_sm;
  int registers_per_sm, managed_memory, multi_gpu_board, multi_gpu_group, host_native_atomics;
  IF_12(int single_to_double;)
  int pageable_access, concurrent_managed_access, compute_preemption, host_pointer_for_registered, cooperative_launch;
  IF_12(int cooperative_multi_device;)
  size_t shared_bytes_opt_in;
  int pageable_page_tables, direct_managed_access, max_blocks_per_sm, access_policy_window;
  size_t reserved_shared_bytes;
  int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, rdma;
  unsigned rdma_flush;
  int rdma_ordering;
  unsigned pool_handle_types;
  int deferred_arrays, ipc_events, cluster_launch, unified_function_pointers;
  IF_13(int numa_config, numa_id, mps, host_numa_id; unsigned pci_id, pci_subsystem; int host_numa_ipc;)
  int reserved[IF_12(63) IF_13(56)];
} cudaDeviceProp;

typedef struct {
  int type, device;
  void *device_pointer, *host_pointer;
  IF_13(long reserved[8];)
} cudaPointerAttributes;

typedef struct {
  size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version, cache_mode_ca, max_dynamic_shared_bytes, shared_carveout;
  int rest[23];
} cudaFuncAttributes;

typedef struct {
  dim3 grid, block;
  size_t shared_bytes;
  CUstream stream;
  void *attributes;
  unsigned num_attributes;
} cudaLaunchConfig_t;

// Makes this thread's device current in the driver; the error that it meets.
cudaError_t runtime_enter(void);

// Keeps an error for cudaGetLastError.
cudaError_t runtime_result(CUresult result);
void runtime_follow_device(void);
#endif
