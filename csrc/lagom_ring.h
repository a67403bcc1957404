// The rings that the plug-ins write: a header, then num_entries entries, overwritten from the oldest on.
//
// Little endian, fixed size, no pointers. The first word of an entry is its sequence number: 0 while it is being written,
// 1 + number once it is whole. Written through a mapping, by any number of threads, without lock or system call.
// nccl_plugin/table_layout.py holds the same numbers; a test compares both.
#ifndef LAGOM_RING_H
#define LAGOM_RING_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_PATH = 4096, RING_DEFAULT_ENTRIES = 65536, RING_MOST_ENTRIES = 1 << 24, RING_MOST_WORDS = 32 };

typedef struct {
  uint64_t magic;
  uint32_t version;
  uint32_t entry_bytes;
  uint64_t num_entries;  // a power of two
  uint64_t num_written;  // sequence number of the next entry
  uint64_t process_id;
  uint64_t num_dropped;  // profile: calls for which there was no room in the pool
  uint64_t num_late;     // profile: events of calls that had been given up
  uint64_t num_open;     // profile: calls that have begun and are not written yet
} lagom_ring_header;

#define LAGOM_AT(type, field, offset) \
  _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved")

_Static_assert(sizeof(lagom_ring_header) == 64, "ring header");
LAGOM_AT(lagom_ring_header, magic, 0);
LAGOM_AT(lagom_ring_header, version, 8);
LAGOM_AT(lagom_ring_header, entry_bytes, 12);
LAGOM_AT(lagom_ring_header, num_entries, 16);
LAGOM_AT(lagom_ring_header, num_written, 24);
LAGOM_AT(lagom_ring_header, process_id, 32);
LAGOM_AT(lagom_ring_header, num_dropped, 40);
LAGOM_AT(lagom_ring_header, num_late, 48);
LAGOM_AT(lagom_ring_header, num_open, 56);

typedef struct {
  lagom_ring_header* header;  // NULL: nothing is recorded
  uint64_t* words;
  uint64_t mask;
} lagom_ring;

// LAGOM_RANK is PROCESS:RANK, set where the process group says the rank and no launcher's variable; a child that
// inherits it is another process.
static inline const char* rank_text(void) {
  const char* noted = getenv("LAGOM_RANK");
  char* rest = NULL;
  if (noted && *noted && strtol(noted, &rest, 10) == (long)getpid() && *rest == ':' && rest[1] && strlen(rest) < 13) {
    return rest + 1;
  }
  static const char* const names[] = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"};
  for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
    const char* value = getenv(names[i]);
    if (value && *value && strlen(value) < 12) return value;
  }
  return "0";
}

// %r is this process's rank, %p its process id.
static inline bool expand_path(const char* pattern, char path[MAX_PATH]) {
  size_t used = 0;
  for (const char* p = pattern; *p; p++) {
    char number[16];
    char self[2] = {*p, 0};
    const char* piece = self;
    if (p[0] == '%' && p[1] == 'p') {
      snprintf(number, sizeof(number), "%ld", (long)getpid());
      piece = number;
      p++;
    } else if (p[0] == '%' && p[1] == 'r') {
      piece = rank_text();
      p++;
    }
    size_t length = strlen(piece);
    if (used + length + 1 > MAX_PATH) return false;
    memcpy(path + used, piece, length);
    used += length;
  }
  path[used] = 0;
  return used > 0;
}

// A fresh file each time, so that a process that still maps an older one keeps it; blocks are reserved, so that a full
// disk fails here and not with SIGBUS in an append. `wanted` is the text of the least number of entries, or NULL.
static inline bool ring_create(lagom_ring* ring, const char* pattern, const char* wanted, uint64_t magic,
                               uint32_t version, size_t entry_bytes, char path[MAX_PATH]) {
  uint64_t count = RING_DEFAULT_ENTRIES;
  if (wanted && *wanted) {
    uint64_t least = strtoull(wanted, NULL, 10);
    for (count = 16; count < least && count < RING_MOST_ENTRIES;) count *= 2;
  }
  size_t size = sizeof(lagom_ring_header) + count * entry_bytes;
  int fd = -1;
  void* map = MAP_FAILED;
  if (expand_path(pattern, path) && (unlink(path) == 0 || errno == ENOENT)) {
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }
  if (fd >= 0 && posix_fallocate(fd, 0, (off_t)size) == 0) {
    map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  }
  if (fd >= 0) close(fd);
  if (map == MAP_FAILED) {
    if (fd >= 0) unlink(path);
    return false;
  }
  lagom_ring_header* header = map;
  header->version = version;
  header->entry_bytes = (uint32_t)entry_bytes;
  header->num_entries = count;
  header->process_id = (uint64_t)getpid();
  ring->words = (uint64_t*)(header + 1);
  ring->mask = count - 1;
  ring->header = header;
  header->magic = magic;
  return true;
}

// `entry` is entry_bytes long, a multiple of 8; its first word is written here.
static inline void ring_append(lagom_ring* ring, const void* entry, size_t entry_bytes) {
  uint64_t words[RING_MOST_WORDS];
  uint64_t n = __atomic_fetch_add(&ring->header->num_written, 1, __ATOMIC_RELAXED);
  uint64_t* to = ring->words + (n & ring->mask) * (entry_bytes / 8);
  memcpy(words, entry, entry_bytes);
  __atomic_store_n(&to[0], 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (size_t i = 1; i < entry_bytes / 8; i++) __atomic_store_n(&to[i], words[i], __ATOMIC_RELAXED);
  __atomic_store_n(&to[0], n + 1, __ATOMIC_RELEASE);
}

#endif
