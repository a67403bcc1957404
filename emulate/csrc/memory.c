#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "preset.h"

#define PAGE 4096u
#define GRAIN 512u             // alignment of every allocation, as CUDA gives
#define LARGE (2u << 20)       // larger ones start on 2 MiB
#define SPARSE_BYTES (1u << 18)  // copies and zeroing below this are not worth looking for holes
// Addresses that a GPU's file spans over its memory, so that free room is found though it is split.
#define SPAN 4u

typedef struct {
  int descriptor;
  char *base;
  size_t bytes, used;
} gpu_memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gpu_memory gpus[PRESET_MAX_DEVICES];
static memory_block *blocks;  // by address
static size_t num_blocks, cap_blocks;
static unsigned long long last_id;

static size_t first_after(const void *address) {
  size_t low = 0, high = num_blocks;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle].start > (const char *)address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

static memory_block *block_at(const void *address) {
  size_t after = first_after(address);
  if (!after) return NULL;
  memory_block *before = &blocks[after - 1];
  return (const char *)address < before->start + before->bytes ? before : NULL;
}

static bool insert(memory_block block) {
  if (num_blocks == cap_blocks) {
    size_t wider = cap_blocks ? 2 * cap_blocks : 256;
    memory_block *more = realloc(blocks, wider * sizeof *more);
    if (!more) return false;
    blocks = more, cap_blocks = wider;
  }
  size_t at = first_after(block.start);
  memmove(blocks + at + 1, blocks + at, (num_blocks - at) * sizeof *blocks);
  block.id = ++last_id;
  blocks[at] = block;
  num_blocks++;
  return true;
}

static void erase(memory_block *block) {
  size_t at = (size_t)(block - blocks);
  memmove(block, block + 1, (--num_blocks - at) * sizeof *blocks);
}

static bool open_gpu(gpu_memory *gpu) {
  if (gpu->base) return true;
  size_t bytes = SPAN * preset_get()->memory_bytes / LARGE * LARGE;
  int descriptor = memfd_create("lagom_emulated_gpu", MFD_CLOEXEC);
  if (descriptor < 0) return false;
  if (ftruncate(descriptor, (off_t)bytes)) {
    close(descriptor);
    return false;
  }
  char *room = mmap(NULL, bytes + LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *base = (char *)(((uintptr_t)room + LARGE - 1) & ~(uintptr_t)(LARGE - 1));
  if (room == MAP_FAILED || mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, descriptor,
                                 0) == MAP_FAILED) {
    close(descriptor);
    return false;
  }
  madvise(base, bytes, MADV_NOHUGEPAGE);
  *gpu = (gpu_memory){descriptor, base, bytes, 0};
  return true;
}

// First fit between the blocks of this GPU.
static char *find_room(const gpu_memory *gpu, size_t bytes) {
  uintptr_t align = bytes >= LARGE ? LARGE : GRAIN;
  char *from = gpu->base;
  for (size_t i = first_after(gpu->base - 1); i < num_blocks; i++) {
    if (blocks[i].start >= gpu->base + gpu->bytes) break;
    char *aligned = (char *)(((uintptr_t)from + align - 1) & ~(align - 1));
    if (aligned + bytes <= blocks[i].start) return aligned;
    from = blocks[i].start + blocks[i].bytes;
  }
  char *aligned = (char *)(((uintptr_t)from + align - 1) & ~(align - 1));
  return aligned + bytes <= gpu->base + gpu->bytes ? aligned : NULL;
}

static CUresult allocate_on_gpu(void **out, size_t bytes, enum memory_kind kind, uint32_t device) {
  gpu_memory *gpu = &gpus[device];
  if (gpu->used + bytes > preset_get()->memory_bytes || !open_gpu(gpu)) return CUDA_ERROR_OUT_OF_MEMORY;
  char *start = find_room(gpu, bytes);
  if (!start || !insert((memory_block){start, bytes, device, kind, 0, -1, 0})) return CUDA_ERROR_OUT_OF_MEMORY;
  gpu->used += bytes;
  *out = start;
  return CUDA_SUCCESS;
}

static CUresult allocate_on_host(void **out, size_t bytes, uint32_t device) {
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!insert((memory_block){start, bytes, device, MEMORY_HOST, 0, -1, 0})) {
    munmap(start, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = start;
  return CUDA_SUCCESS;
}

CUresult memory_allocate(void **out, size_t bytes, enum memory_kind kind, uint32_t device) {
  if (!bytes || bytes > SIZE_MAX / 2) return bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
  bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
  pthread_mutex_lock(&lock);
  CUresult result =
      kind == MEMORY_HOST ? allocate_on_host(out, bytes, device) : allocate_on_gpu(out, bytes, kind, device);
  pthread_mutex_unlock(&lock);
  return result;
}

// The file behind an address, of virtual memory too, a peer's among it; -1 where none is known.
static int file_behind(const void *address, size_t *offset) {
  memory_block block;
  int descriptor = memory_file(address, offset);
  if (descriptor >= 0 || !memory_find(address, &block) || block.kind != MEMORY_MAPPED) return descriptor;
  *offset = block.file_offset + (size_t)((const char *)address - block.start);
  return block.descriptor;
}

// Gives whole pages back; what shares its first and last page with a neighbour is zeroed.
static void zero(char *from, size_t bytes) {
  char *first = (char *)(((uintptr_t)from + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
  char *last = (char *)(((uintptr_t)from + bytes) & ~(uintptr_t)(PAGE - 1));
  size_t offset;
  int descriptor = bytes >= SPARSE_BYTES && last > first ? file_behind(first, &offset) : -1;
  if (descriptor < 0 || fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, last - first)) {
    memset(from, 0, bytes);
    return;
  }
  memset(from, 0, (size_t)(first - from));
  memset(last, 0, (size_t)(from + bytes - last));
}

// New memory is zero: a page that is shared with a neighbour must not keep what lay there.
static void discard(const memory_block *block) {
  if (block->bytes >= SPARSE_BYTES) {
    zero(block->start, block->bytes);
    return;
  }
  // Without touching pages that were never written: mincore knows them.
  char *first = (char *)((uintptr_t)block->start & ~(uintptr_t)(PAGE - 1));
  size_t num_pages = (size_t)(block->start + block->bytes - first + PAGE - 1) / PAGE;
  unsigned char resident[SPARSE_BYTES / PAGE + 2];
  if (mincore(first, num_pages * PAGE, resident)) memset(resident, 1, num_pages);
  for (size_t i = 0; i < num_pages; i++) {
    char *from = first + i * PAGE, *to = from + PAGE, *end = block->start + block->bytes;
    if (from < block->start) from = block->start;
    if (to > end) to = end;
    if (resident[i] & 1) memset(from, 0, (size_t)(to - from));
  }
}

CUresult memory_free(void *start) {
  if (!start) return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  memory_block *block = block_at(start);
  bool is_ours = block && block->start == start && block->kind <= MEMORY_HOST;
  memory_block freed = is_ours ? *block : (memory_block){0};
  if (is_ours && freed.kind != MEMORY_HOST) discard(&freed), gpus[freed.device].used -= freed.bytes;
  if (is_ours) erase(block);
  pthread_mutex_unlock(&lock);
  if (is_ours && freed.kind == MEMORY_HOST) munmap(freed.start, freed.bytes);
  return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_add(memory_block block) {
  pthread_mutex_lock(&lock);
  CUresult result = block_at(block.start) ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                    : insert(block)       ? CUDA_SUCCESS
                                          : CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_unlock(&lock);
  return result;
}

bool memory_remove(void *start, memory_block *removed) {
  pthread_mutex_lock(&lock);
  memory_block *block = block_at(start);
  bool is_there = block && block->start == start;
  if (is_there) *removed = *block, erase(block);
  pthread_mutex_unlock(&lock);
  return is_there;
}

bool memory_find(const void *address, memory_block *found) {
  pthread_mutex_lock(&lock);
  memory_block *block = block_at(address);
  if (block) *found = *block;
  pthread_mutex_unlock(&lock);
  return block;
}

bool memory_is_device(const void *address) {
  memory_block block;
  return memory_find(address, &block) && block.kind != MEMORY_HOST && block.kind != MEMORY_REGISTERED;
}

size_t memory_used(uint32_t device) {
  pthread_mutex_lock(&lock);
  size_t used = gpus[device].used;
  pthread_mutex_unlock(&lock);
  return used;
}

CUresult memory_charge(uint32_t device, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool fits = gpus[device].used + bytes <= preset_get()->memory_bytes;
  if (fits) gpus[device].used += bytes;
  pthread_mutex_unlock(&lock);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_discharge(uint32_t device, size_t bytes) {
  pthread_mutex_lock(&lock);
  gpus[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

int memory_file(const void *address, size_t *offset) {
  const char *at = address;
  for (uint32_t i = 0; i < PRESET_MAX_DEVICES; i++)
    if (gpus[i].base && at >= gpus[i].base && at < gpus[i].base + gpus[i].bytes) {
      *offset = (size_t)(at - gpus[i].base);
      return gpus[i].descriptor;
    }
  return -1;
}

bool memory_is_hole(const void *address, size_t bytes) {
  size_t offset;
  int descriptor = file_behind(address, &offset);
  if (descriptor < 0) return false;
  off_t data = lseek(descriptor, (off_t)offset, SEEK_DATA);
  return data < 0 || (size_t)data >= offset + bytes;
}

void memory_copy(void *to, const void *from, size_t bytes) {
  size_t start;
  int descriptor = bytes >= SPARSE_BYTES ? file_behind(from, &start) : -1;
  if (descriptor < 0) {
    memmove(to, from, bytes);
    return;
  }
  size_t at = start, end = start + bytes;
  while (at < end) {
    off_t data = lseek(descriptor, (off_t)at, SEEK_DATA);
    size_t data_from = data < 0 || (size_t)data > end ? end : (size_t)data;
    if (data_from > at) zero((char *)to + (at - start), data_from - at);
    if (data_from == end) return;
    off_t hole = lseek(descriptor, (off_t)data_from, SEEK_HOLE);
    at = hole < 0 || (size_t)hole > end ? end : (size_t)hole;
    memmove((char *)to + (data_from - start), (const char *)from + (data_from - start), at - data_from);
  }
}

void memory_fill(void *to, const void *pattern, size_t pattern_bytes, size_t count) {
  static const unsigned char zeros[16];
  if (!count) return;
  if (pattern_bytes <= sizeof zeros && !memcmp(pattern, zeros, pattern_bytes)) {
    zero(to, pattern_bytes * count);
  } else if (pattern_bytes == 1) {
    memset(to, *(const unsigned char *)pattern, count);
  } else {
    char *at = to;
    size_t done = pattern_bytes, total = pattern_bytes * count;
    memcpy(at, pattern, pattern_bytes);
    for (; done < total; done *= 2) memcpy(at + done, at, done < total - done ? done : total - done);
  }
}
