// Device and host memory of this process. A GPU's memory is one sparse file mapped once: pages exist where something was written.
#ifndef LAGOM_EMULATED_GPU_MEMORY_H
#define LAGOM_EMULATED_GPU_MEMORY_H
#include <stdbool.h>

#include "abi.h"

enum memory_kind { MEMORY_DEVICE = 1, MEMORY_MANAGED, MEMORY_HOST, MEMORY_REGISTERED, MEMORY_MAPPED, MEMORY_IMPORTED };

typedef struct {
  char *start;
  size_t bytes;
  uint32_t device;  // ordinal
  enum memory_kind kind;
  unsigned long long id;
  int descriptor;  // of host memory, mapped memory and imports; device memory belongs to its GPU's file
  size_t file_offset;  // of mapped memory: where it begins in the descriptor's file
} memory_block;

CUresult memory_allocate(void **out, size_t bytes, enum memory_kind kind, uint32_t device);
CUresult memory_free(void *start);

// Memory that others mapped: page-locked host memory, virtual memory, imports. remove gives the block back, false if none starts there.
CUresult memory_add(memory_block block);
bool memory_remove(void *start, memory_block *removed);

bool memory_find(const void *address, memory_block *found);
bool memory_is_device(const void *address);
size_t memory_used(uint32_t device);
CUresult memory_charge(uint32_t device, size_t bytes);  // against the GPU's limit
void memory_discharge(uint32_t device, size_t bytes);

// The file behind device memory, and where in it an address lies; -1 for other memory.
int memory_file(const void *address, size_t *offset);

// Whether nothing was ever written there: it reads as zeros.
bool memory_is_hole(const void *address, size_t bytes);

// Copies and fills that leave holes where the source has them.
void memory_copy(void *to, const void *from, size_t bytes);
void memory_fill(void *to, const void *pattern, size_t pattern_bytes, size_t count);
#endif
