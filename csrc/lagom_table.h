// The two files of the tuner plug-in: the decision table it reads and the entries of the record ring it writes.
//
// Little endian, fixed size, no pointers. nccl_plugin/table_layout.py holds the same numbers; a test compares both.
// docs/formats.md says what each field means.
#ifndef LAGOM_TABLE_H
#define LAGOM_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "lagom_ring.h"

#define LAGOM_TABLE_MAGIC 0x4C42544D4F47414CULL   // "LAGOMTBL"
#define LAGOM_RECORD_MAGIC 0x4345524D4F47414CULL  // "LAGOMREC"

enum {
  LAGOM_TABLE_VERSION = 3,
  LAGOM_RECORD_VERSION = 2,
  LAGOM_MAX_COMMUNICATORS = 1024,
  LAGOM_MAX_DECISIONS = 16384,
  LAGOM_MAX_CALLS = 65536,  // of all cycles together
  LAGOM_DESCRIPTION_BYTES = 64,
  LAGOM_COST_ENTRIES = 21,
};

#define LAGOM_ANY_OCCURRENCE 0xFFFFFFFFu
#define LAGOM_MAX_CHUNK_BYTES (1ULL << 30)
#define LAGOM_MAX_BYTES (1ULL << 48)

enum { LAGOM_LEAST_BYTES = 1 << 20 };  // smaller calls are part of no step: online/routes/base.py

// File: one header, num_communicators communicators, num_decisions decisions, num_calls calls, nothing else.
typedef struct {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  uint64_t file_bytes;
  uint64_t generation;  // chosen by the writer, never 0; every rank holds the same
  uint32_t checksum;    // CRC-32 (IEEE) of the whole file with this field 0
  uint32_t communicator_bytes;
  uint32_t decision_bytes;
  uint32_t num_communicators;
  uint32_t num_decisions;
  uint32_t flags;       // 0
  uint32_t num_calls;
  uint32_t call_bytes;
} lagom_table_header;

// A communicator as it is known in every run: NCCL's own id is drawn anew each time.
typedef struct {
  char description[LAGOM_DESCRIPTION_BYTES];  // printable UTF-8, padded with NUL, at least one NUL
  uint32_t num_ranks;
  uint32_t num_nodes;       // 0: not known; the order then counts communicators with the same number of ranks
  uint32_t creation_order;  // 0 for the first communicator of this process with these ranks and nodes
  uint32_t max_channels;    // no decision is given more; 0: not known
  uint64_t lease_calls;     // after so many calls of LAGOM_LEAST_BYTES and more nothing is decided here; 0: for good
} lagom_communicator;

// A call site is (communicator, kind, range of bytes); ranges of one communicator and kind do not overlap.
typedef struct {
  uint64_t first_bytes;   // NCCL's: the larger of send and receive buffer; the sum for aggregated calls
  uint64_t last_bytes;    // inclusive; equal on all rows of a site
  uint32_t communicator;  // index into the communicators
  uint32_t kind;          // enum nccl_kind
  uint32_t occurrence;    // n-th call of the site in its communicator's cycle, or LAGOM_ANY_OCCURRENCE
  int32_t algorithm;      // enum nccl_algorithm, -1: NCCL's choice
  int32_t protocol;       // enum nccl_protocol, -1: NCCL's choice
  uint32_t num_channels;  // 0: NCCL's choice
  uint64_t chunk_bytes;   // 0: NCCL's choice
} lagom_decision;

// A call of a cycle, which is the calls of one step on a communicator: those of LAGOM_LEAST_BYTES and more, in the order
// of issue, set or not. By it the plug-in follows the sequence of calls, all that ranks are sure to share. The cycles lie
// in the order of their communicators.
typedef struct {
  uint64_t num_bytes;  // of a site of the table
  uint32_t communicator;
  uint32_t kind;
} lagom_cycle_call;

enum lagom_event { LAGOM_EVENT_INIT = 1, LAGOM_EVENT_DECISION = 2, LAGOM_EVENT_CHUNK = 3 };

enum lagom_record_flag {
  LAGOM_FLAG_MATCHED = 1,      // the table has a decision for this call
  LAGOM_FLAG_APPLIED = 2,      // and what it asks for was on offer
  LAGOM_FLAG_CHAINED = 4,      // passed on to the chained tuner
  LAGOM_FLAG_NOT_COUNTED = 8,  // a query, not a call: nothing on offer or numPipeOps 0
};

typedef struct {
  uint64_t sequence;  // 1 + sequence number once complete, 0 while being written
  uint64_t comm_id;   // NCCL's, this run's; before v5 a number of our own
  uint64_t num_bytes; // decision: the call's; chunk: as NCCL gives it (one channel's); init: ranks
  uint64_t generation;
  uint64_t chunk_offered;  // chunk: NCCL's default
  uint64_t chunk_set;      // chunk: after us
  uint32_t step;
  uint32_t occurrence;     // decision: the call's in the cycle, that it was decided by; init: creation order among equal ranks and nodes
  uint32_t communicator;   // index in the table, 0xFFFFFFFF if it has none
  uint32_t event;          // enum lagom_event
  uint32_t kind;
  uint32_t flags;          // enum lagom_record_flag
  uint32_t abi_version;
  int32_t num_pipe_ops;    // init: nodes
  int32_t registered;      // v2: bit 0 CollNet, bit 1 NVLS
  int32_t algorithm;       // decision: asked for, -1 if not; chunk: NCCL's choice
  int32_t protocol;
  int32_t num_channels;    // decision: after us, 0 if untouched; chunk: as NCCL gives it
  float cost_us[LAGOM_COST_ENTRIES];  // decision, v3 on: as NCCL offered it, -1 where unavailable
  uint32_t reserved;
} lagom_record_entry;

_Static_assert(sizeof(lagom_table_header) == 64, "table header");
LAGOM_AT(lagom_table_header, magic, 0);
LAGOM_AT(lagom_table_header, version, 8);
LAGOM_AT(lagom_table_header, header_bytes, 12);
LAGOM_AT(lagom_table_header, file_bytes, 16);
LAGOM_AT(lagom_table_header, generation, 24);
LAGOM_AT(lagom_table_header, checksum, 32);
LAGOM_AT(lagom_table_header, communicator_bytes, 36);
LAGOM_AT(lagom_table_header, decision_bytes, 40);
LAGOM_AT(lagom_table_header, num_communicators, 44);
LAGOM_AT(lagom_table_header, num_decisions, 48);
LAGOM_AT(lagom_table_header, flags, 52);
LAGOM_AT(lagom_table_header, num_calls, 56);
LAGOM_AT(lagom_table_header, call_bytes, 60);

_Static_assert(sizeof(lagom_communicator) == 88, "communicator");
LAGOM_AT(lagom_communicator, description, 0);
LAGOM_AT(lagom_communicator, num_ranks, 64);
LAGOM_AT(lagom_communicator, num_nodes, 68);
LAGOM_AT(lagom_communicator, creation_order, 72);
LAGOM_AT(lagom_communicator, max_channels, 76);
LAGOM_AT(lagom_communicator, lease_calls, 80);

_Static_assert(sizeof(lagom_decision) == 48, "decision");
LAGOM_AT(lagom_decision, first_bytes, 0);
LAGOM_AT(lagom_decision, last_bytes, 8);
LAGOM_AT(lagom_decision, communicator, 16);
LAGOM_AT(lagom_decision, kind, 20);
LAGOM_AT(lagom_decision, occurrence, 24);
LAGOM_AT(lagom_decision, algorithm, 28);
LAGOM_AT(lagom_decision, protocol, 32);
LAGOM_AT(lagom_decision, num_channels, 36);
LAGOM_AT(lagom_decision, chunk_bytes, 40);

_Static_assert(sizeof(lagom_cycle_call) == 16, "call of a cycle");
LAGOM_AT(lagom_cycle_call, num_bytes, 0);
LAGOM_AT(lagom_cycle_call, communicator, 8);
LAGOM_AT(lagom_cycle_call, kind, 12);

_Static_assert(sizeof(lagom_record_entry) == 184, "record entry");
LAGOM_AT(lagom_record_entry, sequence, 0);
LAGOM_AT(lagom_record_entry, comm_id, 8);
LAGOM_AT(lagom_record_entry, num_bytes, 16);
LAGOM_AT(lagom_record_entry, generation, 24);
LAGOM_AT(lagom_record_entry, chunk_offered, 32);
LAGOM_AT(lagom_record_entry, chunk_set, 40);
LAGOM_AT(lagom_record_entry, step, 48);
LAGOM_AT(lagom_record_entry, occurrence, 52);
LAGOM_AT(lagom_record_entry, communicator, 56);
LAGOM_AT(lagom_record_entry, event, 60);
LAGOM_AT(lagom_record_entry, kind, 64);
LAGOM_AT(lagom_record_entry, flags, 68);
LAGOM_AT(lagom_record_entry, abi_version, 72);
LAGOM_AT(lagom_record_entry, num_pipe_ops, 76);
LAGOM_AT(lagom_record_entry, registered, 80);
LAGOM_AT(lagom_record_entry, algorithm, 84);
LAGOM_AT(lagom_record_entry, protocol, 88);
LAGOM_AT(lagom_record_entry, num_channels, 92);
LAGOM_AT(lagom_record_entry, cost_us, 96);

#endif
