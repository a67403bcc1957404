// Stand-ins for a collective on ONE GPU, launched from Python through the C functions at the end of this file.
//
// spin:    num_blocks blocks that hold their SM and touch no memory: the loss of SMs alone.
// channel: num_blocks blocks that move data as an NCCL ring channel does, in chunks of chunk_bytes through a FIFO of
//          num_slots slots: a producer copies user memory to a slot, its partner copies the slot to user memory. A last
//          block without a partner plays both parts in turn. Pacing holds each block to block_bytes_per_s.
//
// Both run until *stop is set (by a memset on the victim's stream, after the victim's last kernel: the victim is covered
// by construction) or until deadline_ns, which is reported as such, so that a mistake cannot hang the device.
// Each block sets its word of resident, in host memory, so that the host starts the victim only when all hold an SM.
// dynamic shared memory (shared_bytes) keeps victims that need shared memory off the SM; small kernels still fit,
// as they do next to NCCL.
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

namespace {

struct Fifo {                            // one per pair of blocks; counters only grow
  volatile unsigned long long produced;  // written by the producer
  char pad_produced[120];
  volatile unsigned long long consumed;  // written by the consumer
  char pad_consumed[120];
};
static_assert(sizeof(Fifo) == 256, "producer and consumer counters must not share a cache line");

__device__ __forceinline__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ unsigned int sm_id() {
  unsigned int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

struct Report {  // one per block, read by the host after the kernel
  unsigned long long start_ns, end_ns, num_chunks, sm, reached_deadline;
};

__device__ void report(Report* r, unsigned long long start, unsigned long long chunks, bool deadline) {
  r->start_ns = start, r->end_ns = now_ns(), r->num_chunks = chunks, r->sm = sm_id(), r->reached_deadline = deadline;
}

// A plain store per block: host memory behind PCIe need not support atomics.
__device__ void announce(volatile unsigned int* resident) {
  if (threadIdx.x == 0) {
    resident[blockIdx.x] = 1;
    __threadfence_system();
  }
  __syncthreads();
}

// Eight independent 16-byte loads per thread before the first store. Loads are volatile: the FIFO is written by others.
__device__ __forceinline__ void copy_chunk(const uint4* from, uint4* to, size_t num_vectors) {
  constexpr int kUnroll = 8;
  const size_t step = blockDim.x;
  size_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * step < num_vectors; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++)
      asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                   : "l"(from + i + u * step));
#pragma unroll
    for (int u = 0; u < kUnroll; u++) to[i + u * step] = v[u];
  }
  for (; i < num_vectors; i += step) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from + i));
    to[i] = v;
  }
}

__global__ void spin(const volatile unsigned int* stop, unsigned int* resident, Report* reports,
                     unsigned long long deadline_ns) {
  const unsigned long long start = now_ns();
  announce(resident);
  bool deadline = false;
  if (threadIdx.x == 0) {
    while (!*stop) {
      if (now_ns() - start > deadline_ns) {
        deadline = true;
        break;
      }
    }
    report(&reports[blockIdx.x], start, 0, deadline);
  }
  __syncthreads();  // the other threads hold their registers until the block is done
}

enum Verdict { kGo, kStop, kDeadline };

__global__ void channel(const volatile unsigned int* stop, unsigned int* resident, Report* reports, char* user,
                        char* slots, Fifo* fifos, size_t window_bytes, size_t chunk_bytes, int num_slots,
                        double block_bytes_per_s, unsigned long long deadline_ns) {
  __shared__ int verdict;
  const bool alone = (blockIdx.x == gridDim.x - 1) && (gridDim.x & 1);
  const bool produces = !(blockIdx.x & 1);
  Fifo* fifo = fifos + (blockIdx.x >> 1);
  char* const ring = slots + (size_t)(blockIdx.x >> 1) * num_slots * chunk_bytes;
  char* const mine = user + (size_t)blockIdx.x * window_bytes;
  const size_t num_vectors = chunk_bytes / sizeof(uint4), chunks_per_window = window_bytes / chunk_bytes;
  const unsigned long long start = now_ns();
  announce(resident);
  unsigned long long k = 0;  // chunks moved by this block, in either direction
  for (;; k++) {
    if (threadIdx.x == 0) {
      verdict = kGo;
      const double due_ns = block_bytes_per_s > 0 ? (double)(k * chunk_bytes) / block_bytes_per_s * 1e9 : 0;
      for (;;) {
        const unsigned long long elapsed = now_ns() - start;
        if (*stop) {
          verdict = kStop;
          break;
        }
        if (elapsed > deadline_ns) {
          verdict = kDeadline;
          break;
        }
        const bool ready = alone || (produces ? k < fifo->consumed + num_slots : k < fifo->produced);
        if (ready && (double)elapsed >= due_ns) break;
      }
      __threadfence();
    }
    __syncthreads();
    if (verdict != kGo) break;
    // alone: chunk k = 2j is written to a slot, k = 2j+1 read back from it
    const unsigned long long place = alone ? k >> 1 : k;
    char* slot = ring + (place % num_slots) * chunk_bytes;
    char* data = mine + (place % chunks_per_window) * chunk_bytes;
    const bool out = alone ? !(k & 1) : produces;
    copy_chunk((const uint4*)(out ? data : slot), (uint4*)(out ? slot : data), num_vectors);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && !alone) {
      if (produces)
        fifo->produced = k + 1;
      else
        fifo->consumed = k + 1;
    }
  }
  if (threadIdx.x == 0) report(&reports[blockIdx.x], start, k, verdict == kDeadline);
}

}  // namespace

extern "C" {

// Return the cudaError_t of the first call that failed, 0 when all went well.

int standin_attributes(int is_channel, int* num_registers, int* max_threads) {
  cudaFuncAttributes a;
  const cudaError_t e = cudaFuncGetAttributes(&a, is_channel ? (const void*)channel : (const void*)spin);
  if (e == cudaSuccess) *num_registers = a.numRegs, *max_threads = a.maxThreadsPerBlock;
  return e;
}

int standin_spin(void* stop, void* resident, void* reports, int num_blocks, int num_threads, int shared_bytes,
                 unsigned long long deadline_ns, void* stream) {
  cudaError_t e = cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (e != cudaSuccess) return e;
  spin<<<num_blocks, num_threads, shared_bytes, (cudaStream_t)stream>>>(
      (const volatile unsigned int*)stop, (unsigned int*)resident, (Report*)reports, deadline_ns);
  return cudaGetLastError();
}

int standin_channel(void* stop, void* resident, void* reports, void* user, void* slots, void* fifos,
                    size_t window_bytes, size_t chunk_bytes, int num_slots, double block_bytes_per_s, int num_blocks,
                    int num_threads, int shared_bytes, unsigned long long deadline_ns, void* stream) {
  cudaError_t e = cudaFuncSetAttribute(channel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (e != cudaSuccess) return e;
  channel<<<num_blocks, num_threads, shared_bytes, (cudaStream_t)stream>>>(
      (const volatile unsigned int*)stop, (unsigned int*)resident, (Report*)reports, (char*)user, (char*)slots,
      (Fifo*)fifos, window_bytes, chunk_bytes, num_slots, block_bytes_per_s, deadline_ns);
  return cudaGetLastError();
}

const char* standin_error(int error) { return cudaGetErrorString((cudaError_t)error); }

}  // extern "C"
