#define _GNU_SOURCE
#include "nccl_shared.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  _Atomic uint32_t change;  // rises with every change that somebody may wait for
  uint32_t num_ranks;
  _Atomic uint32_t num_here;
  shared_member members[];
} shared_head;

struct shared {
  shared_head* head;
  size_t bytes, parts_at, pairs_at, messages_at;
  int num_ranks, rank;
  _Atomic bool is_aborted;
  char path[256];
};

static _Thread_local char error_text[512];

const char* shared_error(void) { return error_text; }

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t limit_ns(void) {
  const char* text = getenv("LAGOM_NCCL_TIMEOUT_S");
  const double seconds = text ? strtod(text, NULL) : 0;
  return (uint64_t)((seconds > 0 ? seconds : 300) * 1e9);
}

static void announce(shared* s) {
  atomic_fetch_add(&s->head->change, 1);
  syscall(SYS_futex, &s->head->change, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static bool is_lost(const shared_member* m) {
  if (m->state == MEMBER_GONE) return true;
  return m->state == MEMBER_HERE && m->pid != getpid() && kill(m->pid, 0) != 0 && errno == ESRCH;
}

// Waits until `counter` is at least `least`; `rank` is who must bring that about, -1 for no one in particular.
static ncclResult_t wait_until(shared* s, const _Atomic uint64_t* counter, uint64_t least, int rank, const char* what) {
  const uint64_t begin = now_ns(), limit = limit_ns();
  for (int i = 0;; i++) {
    const uint32_t seen = atomic_load(&s->head->change);
    if (atomic_load(counter) >= least) return ncclSuccess;
    if (s->is_aborted) {
      snprintf(error_text, sizeof(error_text), "the communicator was aborted");
      return ncclSystemError;
    }
    if (rank >= 0 && is_lost(&s->head->members[rank]) && atomic_load(counter) < least) {
      snprintf(error_text, sizeof(error_text), "rank %d has gone: %s", rank, what);
      return ncclRemoteError;
    }
    if (now_ns() - begin > limit) {
      snprintf(error_text, sizeof(error_text), "rank %d did not come within %.0f s: %s", rank, (double)limit / 1e9, what);
      return ncclTimeout;
    }
    const struct timespec pause = {.tv_nsec = i < 20 ? 2000000 : 50000000};
    syscall(SYS_futex, &s->head->change, FUTEX_WAIT, seen, &pause, NULL, 0);
  }
}

static void name_file(const shared_key* key, char* path, size_t size) {
  const char* socket = getenv("LAGOM_EMULATION_SOCKET");  // the coordinator removes its folder, whatever became of the ranks
  const char* slash = socket ? strrchr(socket, '/') : NULL;
  int n = slash ? snprintf(path, size, "%.*s/nccl_", (int)(slash - socket), socket) : snprintf(path, size, "/dev/shm/lagom_nccl_");
  for (int i = 0; i < 16 && n > 0 && (size_t)n + 3 < size; i++) n += snprintf(path + n, size - (size_t)n, "%02x", key->bytes[i]);
}

static size_t up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

shared* shared_attach(const shared_key* key, int num_ranks, int rank, int device, int host, ncclResult_t* result) {
  shared* s = calloc(1, sizeof(*s));
  const size_t n = (size_t)num_ranks, pairs = num_ranks <= MAX_PAIRED_RANKS ? n * n : 0;
  s->num_ranks = num_ranks, s->rank = rank;
  s->parts_at = up(sizeof(shared_head) + n * sizeof(shared_member));
  s->pairs_at = s->parts_at + n * NUM_SLOTS * SLOT_BYTES;
  s->messages_at = s->pairs_at + up(pairs * sizeof(shared_pair));
  s->bytes = s->messages_at + pairs * NUM_SLOTS * SLOT_BYTES;
  name_file(key, s->path, sizeof(s->path));
  const int file = open(s->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  struct stat about;
  if (file < 0 || fstat(file, &about) || about.st_uid != geteuid() || ftruncate(file, (off_t)s->bytes)) goto failed;
  s->head = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (s->head == MAP_FAILED) goto failed;
  close(file);
  shared_member* own = &s->head->members[rank];
  if (own->state != MEMBER_ABSENT) {
    snprintf(error_text, sizeof(error_text), "rank %d is there twice", rank);
    munmap(s->head, s->bytes);
    free(s);
    *result = ncclInvalidUsage;
    return NULL;
  }
  own->pid = getpid(), own->device = device, own->host = host;
  s->head->num_ranks = (uint32_t)num_ranks;
  atomic_store(&own->state, MEMBER_HERE);
  if (atomic_fetch_add(&s->head->num_here, 1) + 1 == (uint32_t)num_ranks) unlink(s->path);
  announce(s);
  return s;
failed:
  snprintf(error_text, sizeof(error_text), "%s: %s", s->path, strerror(errno));
  if (file >= 0) close(file);
  free(s);
  *result = ncclSystemError;
  return NULL;
}

ncclResult_t shared_wait_for_all(shared* s) {
  const uint64_t begin = now_ns(), limit = limit_ns();
  for (;;) {
    const uint32_t seen = atomic_load(&s->head->change);
    if (atomic_load(&s->head->num_here) >= (uint32_t)s->num_ranks) return ncclSuccess;
    if (s->is_aborted) return ncclSystemError;
    if (now_ns() - begin > limit) {
      snprintf(error_text, sizeof(error_text), "%u of %d ranks came within %.0f s", s->head->num_here, s->num_ranks,
               (double)limit / 1e9);
      unlink(s->path);
      return ncclTimeout;
    }
    const struct timespec pause = {.tv_nsec = 50000000};
    syscall(SYS_futex, &s->head->change, FUTEX_WAIT, seen, &pause, NULL, 0);
  }
}

void shared_abort(shared* s) {
  s->is_aborted = true;
  atomic_store(&s->head->members[s->rank].state, MEMBER_GONE);
  announce(s);
}

void shared_detach(shared* s) {
  atomic_store(&s->head->members[s->rank].state, MEMBER_GONE);
  if (atomic_load(&s->head->num_here) < (uint32_t)s->num_ranks) unlink(s->path);
  announce(s);
  munmap(s->head, s->bytes);
  free(s);
}

const shared_member* shared_member_of(const shared* s, int rank) { return &s->head->members[rank]; }

ncclResult_t shared_gather_notes(shared* s, const void* note, void* all) {
  shared_member* own = &s->head->members[s->rank];
  const uint64_t number = own->notes;
  for (int r = 0; r < s->num_ranks; r++) {  // the note before the last has been read by all
    ncclResult_t result = wait_until(s, &s->head->members[r].notes_read, number ? number - 1 : 0, r, "an exchange");
    if (result) return result;
  }
  memcpy(own->note[number % 2], note, NOTE_BYTES);
  atomic_store(&own->notes, number + 1);
  announce(s);
  for (int r = 0; r < s->num_ranks; r++) {
    shared_member* m = &s->head->members[r];
    ncclResult_t result = wait_until(s, &m->notes, number + 1, r, "an exchange");
    if (result) return result;
    memcpy((char*)all + (size_t)r * NOTE_BYTES, m->note[number % 2], NOTE_BYTES);
  }
  atomic_store(&own->notes_read, number + 1);
  announce(s);
  return ncclSuccess;
}

static char* slot_of(shared* s, int rank, uint64_t number) {
  return (char*)s->head + s->parts_at + ((size_t)rank * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES;
}

ncclResult_t shared_give(shared* s, const void* part, size_t num_bytes, uint64_t* number) {
  shared_member* own = &s->head->members[s->rank];
  *number = own->given;
  for (int r = 0; r < s->num_ranks && *number >= NUM_SLOTS; r++) {
    ncclResult_t result = wait_until(s, &s->head->members[r].taken, *number - NUM_SLOTS + 1, r, "a collective");
    if (result) return result;
  }
  if (num_bytes) memcpy(slot_of(s, s->rank, *number), part, num_bytes);
  atomic_store(&own->given, *number + 1);
  announce(s);
  return ncclSuccess;
}

ncclResult_t shared_part(shared* s, uint64_t number, int rank, const void** part) {
  *part = slot_of(s, rank, number);
  return wait_until(s, &s->head->members[rank].given, number + 1, rank, "a collective");
}

bool shared_has_part(const shared* s, uint64_t number, int rank) { return atomic_load(&s->head->members[rank].given) > number; }

void shared_took(shared* s, uint64_t number) {
  atomic_store(&s->head->members[s->rank].taken, number + 1);
  announce(s);
}

bool shared_has_pairs(const shared* s) { return s->num_ranks <= MAX_PAIRED_RANKS; }

static shared_pair* pair_of(const shared* s, int from, int to) {
  return (shared_pair*)(void*)((char*)s->head + s->pairs_at) + (size_t)from * (size_t)s->num_ranks + (size_t)to;
}

static char* message_of(shared* s, int from, int to, uint64_t number) {
  const size_t pair = (size_t)from * (size_t)s->num_ranks + (size_t)to;
  return (char*)s->head + s->messages_at + (pair * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES;
}

ncclResult_t shared_send(shared* s, int to, const void* data, size_t num_bytes) {
  shared_pair* pair = pair_of(s, s->rank, to);
  const uint64_t number = pair->sent;
  ncclResult_t result = ncclSuccess;
  if (number >= NUM_SLOTS) result = wait_until(s, &pair->received, number - NUM_SLOTS + 1, to, "a receive");
  if (result) return result;
  memcpy(message_of(s, s->rank, to, number), data, num_bytes);
  atomic_store(&pair->sent, number + 1);
  announce(s);
  return ncclSuccess;
}

bool shared_has_message(const shared* s, int from) {
  shared_pair* pair = pair_of(s, from, s->rank);
  return atomic_load(&pair->sent) > atomic_load(&pair->received);
}

ncclResult_t shared_look(shared* s, int from, void* data, size_t num_bytes) {
  shared_pair* pair = pair_of(s, from, s->rank);
  const uint64_t number = pair->received;
  ncclResult_t result = wait_until(s, &pair->sent, number + 1, from, "a send");
  if (!result) memcpy(data, message_of(s, from, s->rank, number), num_bytes);
  return result;
}

ncclResult_t shared_receive(shared* s, int from, void* data, size_t num_bytes) {
  shared_pair* pair = pair_of(s, from, s->rank);
  ncclResult_t result = shared_look(s, from, data, num_bytes);
  if (result) return result;
  atomic_fetch_add(&pair->received, 1);
  announce(s);
  return ncclSuccess;
}
