// The rings that the plug-ins write: a header, then num_entries entries, overwritten from the oldest on.
//
// Little endian, fixed size, no pointers. The first word of an entry is its sequence number: 0 while it is being written,
// 1 + number once it is whole. Appended to private memory, by any number of threads, without lock or system call, and
// written to the file where nothing waits for it: at a step now and then, before a read, when a communicator ends, at exit.
// Nothing of the file is mapped: what becomes of it (truncated, deleted, no room left) is never the job's end.
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
#include <sys/stat.h>
#include <unistd.h>

enum {
  MAX_PATH = 4096,
  RING_DEFAULT_ENTRIES = 65536,
  RING_MOST_ENTRIES = 1 << 24,
  RING_MOST_WORDS = 32,
  RING_COPIED_WORDS = 4096,  // of a flush's copy: 32 KiB at a time
};

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
  uint64_t num_flushed;  // entries that are whole in the file
  int file;
  dev_t device;  // these two: which file that is
  ino_t inode;
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

// A fresh file each time, so that who reads an older one keeps it; blocks are reserved, so that a full disk is known here.
// `wanted` is the text of the least number of entries, or NULL.
static inline bool ring_create(lagom_ring* ring, const char* pattern, const char* wanted, uint64_t magic,
                               uint32_t version, size_t entry_bytes, char path[MAX_PATH]) {
  uint64_t count = RING_DEFAULT_ENTRIES;
  if (wanted && *wanted) {
    uint64_t least = strtoull(wanted, NULL, 10);
    for (count = 16; count < least && count < RING_MOST_ENTRIES;) count *= 2;
  }
  size_t size = sizeof(lagom_ring_header) + count * entry_bytes;
  struct stat st;
  int fd = -1;
  void* memory = MAP_FAILED;
  if (expand_path(pattern, path) && (unlink(path) == 0 || errno == ENOENT)) {
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }
  if (fd >= 0 && fstat(fd, &st) == 0 && posix_fallocate(fd, 0, (off_t)size) == 0) {
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  }
  if (memory == MAP_FAILED) {
    if (fd >= 0) unlink(path);
    if (fd >= 0) close(fd);
    return false;
  }
  lagom_ring_header* header = memory;
  *header = (lagom_ring_header){.magic = magic, .version = version, .entry_bytes = (uint32_t)entry_bytes,
                                .num_entries = count, .process_id = (uint64_t)getpid()};
  ring->words = (uint64_t*)(header + 1);
  ring->mask = count - 1;
  ring->num_flushed = 0;
  ring->file = fd;
  ring->device = st.st_dev;
  ring->inode = st.st_ino;
  ring->header = header;
  return pwrite(fd, header, sizeof(*header), 0) == sizeof(*header);
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

// Whether so much is not in the file that it is worth a system call: a sixteenth of the ring.
static inline bool ring_is_due(const lagom_ring* ring) {
  if (!ring->header) return false;
  const uint64_t num_written = __atomic_load_n(&ring->header->num_written, __ATOMIC_RELAXED);
  return num_written - __atomic_load_n(&ring->num_flushed, __ATOMIC_RELAXED) > ring->mask / 16;
}

// Copies an entry; false, and sequence 0 in the copy, where it is being written or written anew.
static inline bool ring_copy(const uint64_t* from, uint64_t* to, size_t num_words, uint64_t sequence) {
  to[0] = __atomic_load_n(&from[0], __ATOMIC_ACQUIRE);
  for (size_t i = 1; i < num_words; i++) to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  if (to[0] != sequence || __atomic_load_n(&from[0], __ATOMIC_RELAXED) != sequence) to[0] = 0;
  return to[0] != 0;
}

// Whether there is a file of this process's: a forked child has its parent's.
static inline bool ring_is_own(const lagom_ring* ring) {
  return ring->header && ring->header->process_id == (uint64_t)getpid();
}

// Writes what was appended since the last flush to the file. One thread at a time; appends go on meanwhile. A failure
// leaves the file as it is: the next flush begins where this one did.
static inline void ring_flush(lagom_ring* ring) {
  static uint64_t copy[RING_COPIED_WORDS];
  const lagom_ring_header* from = ring->header;
  struct stat st;
  // A job that closes what it does not know may have given the number to a file of its own.
  if (fstat(ring->file, &st) || st.st_dev != ring->device || st.st_ino != ring->inode) return;
  lagom_ring_header header = {.magic = from->magic, .version = from->version, .entry_bytes = from->entry_bytes,
                              .num_entries = from->num_entries, .process_id = from->process_id};
  // What is open is counted first: an entry is written before it is counted off, so 0 says that the file has all.
  header.num_open = __atomic_load_n(&from->num_open, __ATOMIC_ACQUIRE);
  header.num_dropped = __atomic_load_n(&from->num_dropped, __ATOMIC_RELAXED);
  header.num_late = __atomic_load_n(&from->num_late, __ATOMIC_RELAXED);
  header.num_written = __atomic_load_n(&from->num_written, __ATOMIC_ACQUIRE);
  const uint64_t end = header.num_written, num_entries = ring->mask + 1;
  const size_t num_words = header.entry_bytes / 8;
  uint64_t n = end > num_entries && ring->num_flushed < end - num_entries ? end - num_entries : ring->num_flushed;
  uint64_t whole = n;
  bool is_whole = true;
  while (n < end) {
    uint64_t count = RING_COPIED_WORDS / num_words;
    const uint64_t at = n & ring->mask;
    if (count > end - n) count = end - n;
    if (count > num_entries - at) count = num_entries - at;  // up to the ring's edge
    for (uint64_t i = 0; i < count; i++) {
      // One that is under way is written again by the next flush; one that was overtaken meanwhile never is.
      is_whole = ring_copy(ring->words + (at + i) * num_words, copy + i * num_words, num_words, n + i + 1) && is_whole;
      whole += is_whole;
    }
    const size_t num_bytes = count * header.entry_bytes;
    if (pwrite(ring->file, copy, num_bytes, (off_t)(sizeof(header) + at * header.entry_bytes)) != (ssize_t)num_bytes) return;
    n += count;
  }
  __atomic_store_n(&ring->num_flushed, whole, __ATOMIC_RELAXED);
  (void)!pwrite(ring->file, &header, sizeof(header), 0);
}

#endif
