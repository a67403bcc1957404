// The driver interface: memory of other processes, virtual memory, multicast objects.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "context.h"
#include "memory.h"
#include "preset.h"
#include "stream.h"

#define GRANULARITY (2u << 20)

// A handle names the file behind the memory through /proc, which the owner's user may open; another emulated host may not.
typedef struct {
  char tag[8];
  int32_t pid, descriptor;
  uint32_t device, host;
  uint64_t offset, bytes;
} memory_handle;

EXPORT CUresult cuIpcGetMemHandle(CUipcHandle *handle, CUdeviceptr at) {
  memory_block block;
  size_t offset;
  if (!memory_find((void *)at, &block)) return CUDA_ERROR_INVALID_VALUE;
  int descriptor = memory_file(block.start, &offset);
  if (descriptor < 0) return CUDA_ERROR_INVALID_VALUE;
  memory_handle made = {"lagomgpu", getpid(), descriptor, preset_physical(block.device), preset_get()->host_index, offset, block.bytes};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &made, sizeof made);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcHandle handle, unsigned flags) {
  memory_handle given;
  char path[64];
  memcpy(&given, &handle, sizeof given);
  if (memcmp(given.tag, "lagomgpu", 8) || given.host != preset_get()->host_index) return CUDA_ERROR_INVALID_HANDLE;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.descriptor);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return CUDA_ERROR_INVALID_HANDLE;
  size_t before = given.offset % 4096;  // mappings start on a page
  char *base = mmap(NULL, given.bytes + before, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor,
                    (off_t)(given.offset - before));
  close(descriptor);
  if (base == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  CUresult result = memory_add((memory_block){base + before, given.bytes, context_device(), MEMORY_IMPORTED, 0, -1, 0});
  if (result) munmap(base, given.bytes + before);
  *out = (CUdeviceptr)(base + before);
  return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  memory_block removed;
  if (!memory_remove((void *)at, &removed)) return CUDA_ERROR_INVALID_VALUE;
  char *base = (char *)((uintptr_t)removed.start & ~(uintptr_t)4095);
  munmap(base, removed.bytes + (size_t)(removed.start - base));
  return CUDA_SUCCESS;
}

// Events of other processes: the wire has no operation of another process to wait for, so it is refused by name.
EXPORT CUresult cuIpcGetEventHandle(CUipcHandle *handle, CUevent event) { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORT CUresult cuIpcOpenEventHandle(CUevent *event, CUipcHandle handle) { return CUDA_ERROR_NOT_SUPPORTED; }

// ---- virtual memory: an allocation is a file, a mapping a mapping of it

typedef struct {
  int descriptor, references;
  uint32_t device;
  size_t bytes;
  bool is_charged;
  CUmemAllocationProp properties;
} allocation;

typedef struct mapping {
  CUdeviceptr at;
  allocation *of;
  struct mapping *next;
} mapping;

static mapping *mappings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A file's name says whose memory it is: an importer may be another process with another GPU.
#define FILE_NAME "lagom_emulated_gpu_%u"

static uint32_t device_of_file(int descriptor) {
  char path[32], name[64];
  unsigned physical;
  snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(path, name, sizeof name - 1);
  name[length > 0 ? length : 0] = 0;
  if (sscanf(name, "/memfd:" FILE_NAME, &physical) == 1)
    for (uint32_t i = 0; i < preset_num_visible(); i++)
      if (preset_physical(i) == physical) return i;
  return context_device();
}

static CUresult make_allocation(CUmemGenericAllocationHandle *out, size_t bytes, uint32_t device, bool is_charged,
                                const CUmemAllocationProp *properties) {
  if (is_charged && memory_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  allocation *made = calloc(1, sizeof *made);
  char name[32];
  snprintf(name, sizeof name, FILE_NAME, preset_physical(device));
  int descriptor = memfd_create(name, MFD_CLOEXEC);
  if (!made || descriptor < 0 || ftruncate(descriptor, (off_t)bytes)) {
    if (descriptor >= 0) close(descriptor);
    if (is_charged) memory_discharge(device, bytes);
    free(made);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *made = (allocation){descriptor, 1, device, bytes, is_charged, {0}};
  if (properties) made->properties = *properties;
  *out = (CUmemGenericAllocationHandle)made;
  return CUDA_SUCCESS;
}

static void release_locked(allocation *of) {
  if (--of->references) return;
  if (of->is_charged) memory_discharge(of->device, of->bytes);
  close(of->descriptor);
  free(of);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int option) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
  bool is_device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  return make_allocation(out, bytes, is_device ? (uint32_t)properties->location.id : 0, is_device, properties);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  pthread_mutex_lock(&lock);
  release_locked((allocation *)handle);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
  if (alignment < GRANULARITY) alignment = GRANULARITY;
  char *room = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char *at = (char *)(((uintptr_t)room + alignment - 1) & ~(uintptr_t)(alignment - 1));
  if (at > room) munmap(room, (size_t)(at - room));
  munmap(at + bytes, (size_t)(room + alignment - at));
  *out = (CUdeviceptr)at;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  munmap((void *)at, bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  allocation *of = (allocation *)handle;
  mapping *made = malloc(sizeof *made);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  if (mmap((void *)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, of->descriptor,
           (off_t)offset) == MAP_FAILED ||
      memory_add((memory_block){(char *)at, bytes, of->device, MEMORY_MAPPED, 0, of->descriptor, offset})) {
    free(made);
    return CUDA_ERROR_MAP_FAILED;
  }
  pthread_mutex_lock(&lock);
  of->references++;
  *made = (mapping){at, of, mappings};
  mappings = made;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  // One call may take away several mappings that lie side by side.
  for (CUdeviceptr from = at; from < at + bytes;) {
    memory_block removed;
    if (!memory_remove((void *)from, &removed)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (mapping **link = &mappings; *link; link = &(*link)->next)
      if ((*link)->at == from) {
        mapping *gone = *link;
        *link = gone->next;
        release_locked(gone->of);
        free(gone);
        break;
      }
    pthread_mutex_unlock(&lock);
    mmap((void *)from, removed.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    from += removed.bytes;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at) {
  *flags = 3;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *at) {
  memory_block block;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (!memory_find(at, &block)) return result;
  pthread_mutex_lock(&lock);
  for (mapping *each = mappings; each; each = each->next)
    if (each->at == (CUdeviceptr)block.start) {
      each->of->references++;
      *out = (CUmemGenericAllocationHandle)each->of;
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int descriptor = fcntl(((allocation *)handle)->descriptor, F_DUPFD_CLOEXEC, 0);
  *(int *)out = descriptor;
  return descriptor < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, int type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int descriptor = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
  struct stat status;
  allocation *made = calloc(1, sizeof *made);
  if (descriptor < 0 || fstat(descriptor, &status) || !made) {
    if (descriptor >= 0) close(descriptor);
    free(made);
    return CUDA_ERROR_INVALID_VALUE;
  }
  *made = (allocation){descriptor, 1, device_of_file(descriptor), (size_t)status.st_size, false, {0}};
  made->properties.type = 1;  // pinned
  made->properties.requested_handle_types = type;
  made->properties.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, (int)made->device};
  *out = (CUmemGenericAllocationHandle)made;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
  *out = ((allocation *)handle)->properties;
  return CUDA_SUCCESS;
}

// ---- multicast: an object has memory of its own. Nothing is reduced into it; the switch's work is the coordinator's to time.

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *properties) {
  return make_allocation(out, properties->size, context_device(), false, NULL);
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) { return CUDA_SUCCESS; }

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                                   size_t memory_offset, size_t bytes, unsigned long long flags) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr at, size_t bytes,
                                    unsigned long long flags) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastGetGranularity(size_t *bytes, const CUmulticastObjectProp *properties, int option) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
