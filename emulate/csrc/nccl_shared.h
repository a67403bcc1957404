// What the ranks of a communicator share: a file in memory that all map, made by whoever comes first. Private to the user;
// its name is gone as soon as all ranks have come. Every wait ends: by its event, an abort, a lost rank, or the time limit.
#ifndef LAGOM_NCCL_SHARED_H
#define LAGOM_NCCL_SHARED_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_api.h"

enum { SLOT_BYTES = 1 << 20, NUM_SLOTS = 8, MAX_PAIRED_RANKS = 64, NOTE_BYTES = 64 };

typedef struct {
  uint8_t bytes[16];
} shared_key;

enum member_state { MEMBER_ABSENT, MEMBER_HERE, MEMBER_GONE };

typedef struct {
  _Atomic uint32_t state;
  int32_t pid;
  int32_t device, host;
  _Atomic uint64_t notes;      // notes written; the peers' reading is counted in `notes_read`
  _Atomic uint64_t notes_read;
  uint8_t note[2][NOTE_BYTES];
  _Atomic uint64_t given, taken;  // parts of collectives that this rank gave, and that it has seen all of
} shared_member;

typedef struct {
  _Atomic uint64_t sent, received;
} shared_pair;

typedef struct shared shared;

// Maps the file of this key and takes place as `rank`. NULL, with *result, where that fails.
shared* shared_attach(const shared_key* key, int num_ranks, int rank, int device, int host, ncclResult_t* result);
ncclResult_t shared_wait_for_all(shared* s);
void shared_detach(shared* s);
void shared_abort(shared* s);  // wakes this rank's waits, and its peers' that need this rank
const shared_member* shared_member_of(const shared* s, int rank);

// All ranks' notes of NOTE_BYTES, in the order of the ranks; a collective call.
ncclResult_t shared_gather_notes(shared* s, const void* note, void* all);

// A rank's part of the next exactly computed collective, at most SLOT_BYTES.
ncclResult_t shared_give(shared* s, const void* part, size_t num_bytes, uint64_t* number);
ncclResult_t shared_part(shared* s, uint64_t number, int rank, const void** part);  // waits for it
bool shared_has_part(const shared* s, uint64_t number, int rank);
void shared_took(shared* s, uint64_t number);

bool shared_has_pairs(const shared* s);
ncclResult_t shared_send(shared* s, int to, const void* data, size_t num_bytes);
bool shared_has_message(const shared* s, int from);
ncclResult_t shared_look(shared* s, int from, void* data, size_t num_bytes);  // the next message, which stays
ncclResult_t shared_receive(shared* s, int from, void* data, size_t num_bytes);

const char* shared_error(void);  // this thread's last
#endif
