// Whether the bytes of a table are sound: the one gate between a file and what decides.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "lagom_tuner.h"

static const char* const TABLE_ERROR_TEXT[NUM_TABLE_ERRORS] = {
    "ok",
    "LAGOM_TABLE is not set or too long",
    "cannot be opened or read",
    "is not a regular file of this user that only its owner may write",
    "has another size than its header says, or none that a table can have",
    "is not a lagom table",
    "is of another version",
    "is damaged: the checksum differs",
    "is of another generation than asked for",
    "has an impossible header",
    "has an impossible communicator",
    "has an impossible decision",
    "has a step with a call that is out of order, too small or without a row",
    "names a communicator or call twice",
    "does not fit into memory",
    "was not prepared, or another one since",
};

const char* table_error_text(enum table_error error) {
  return error >= 0 && error < NUM_TABLE_ERRORS ? TABLE_ERROR_TEXT[error] : "unknown error";
}

static uint32_t crc_table[256];

void crc_prepare(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    crc_table[i] = c;
  }
}

static uint32_t crc_update(uint32_t crc, const uint8_t* data, size_t size) {
  for (size_t i = 0; i < size; i++) crc = crc_table[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
  return crc;
}

static uint32_t table_checksum(const uint8_t* data, size_t size) {
  static const uint8_t zero[4] = {0};
  const size_t at = offsetof(lagom_table_header, checksum);
  uint32_t crc = crc_update(0xFFFFFFFFu, data, at);
  crc = crc_update(crc, zero, sizeof(zero));
  return ~crc_update(crc, data + at + sizeof(zero), size - at - sizeof(zero));
}

static bool is_sound_communicator(const lagom_communicator* c) {
  if (c->max_channels > NCCL_MAX_CHANNELS || c->num_ranks < 1 || c->num_ranks > (1u << 24) || c->num_nodes > c->num_ranks) return false;
  if (c->creation_order >= (1u << 24) || c->description[LAGOM_DESCRIPTION_BYTES - 1] != 0) return false;
  size_t length = strlen(c->description);
  for (size_t i = 0; i < LAGOM_DESCRIPTION_BYTES; i++) {
    uint8_t byte = (uint8_t)c->description[i];
    if (i < length ? byte < 0x20 || byte == 0x7F : byte != 0) return false;
  }
  return true;
}

static bool is_sound_decision(const lagom_decision* d, uint32_t num_communicators) {
  if (d->communicator >= num_communicators || d->kind >= NCCL_NUM_KINDS) return false;
  if (d->first_bytes < 1 || d->last_bytes < d->first_bytes || d->last_bytes > LAGOM_MAX_BYTES) return false;
  if (d->algorithm < -1 || d->algorithm >= NCCL_NUM_ALGORITHMS) return false;
  if (d->protocol < -1 || d->protocol >= NCCL_NUM_PROTOCOLS) return false;
  if (d->num_channels > NCCL_MAX_CHANNELS) return false;
  if (d->chunk_bytes && (d->chunk_bytes < NCCL_GRAIN_LL || d->chunk_bytes > LAGOM_MAX_CHUNK_BYTES)) return false;
  if (d->chunk_bytes && d->protocol >= 0 && d->chunk_bytes < grain_of(d->protocol)) return false;
  return d->occurrence == LAGOM_ANY_OCCURRENCE || d->occurrence < LAGOM_MAX_CALLS;
}

static bool is_sound_call(const lagom_cycle_call* call, uint32_t least_communicator, uint32_t num_communicators) {
  if (call->communicator < least_communicator || call->communicator >= num_communicators) return false;
  return call->kind < NCCL_NUM_KINDS && call->num_bytes >= LAGOM_LEAST_BYTES && call->num_bytes <= LAGOM_MAX_BYTES;
}

static int by_place(const void* left, const void* right) {
  const lagom_communicator *a = left, *b = right;
  if (a->num_ranks != b->num_ranks) return a->num_ranks < b->num_ranks ? -1 : 1;
  if (a->num_nodes != b->num_nodes) return a->num_nodes < b->num_nodes ? -1 : 1;
  return (a->creation_order > b->creation_order) - (a->creation_order < b->creation_order);
}

static enum table_error check_communicators(const uint8_t* data, uint32_t count) {
  lagom_communicator* sorted = malloc((size_t)count * sizeof(*sorted) + 1);
  if (!sorted) return TABLE_NO_MEMORY;
  enum table_error error = TABLE_OK;
  memcpy(sorted, data + sizeof(lagom_table_header), (size_t)count * sizeof(*sorted));
  for (uint32_t i = 0; i < count && !error; i++) {
    if (!is_sound_communicator(&sorted[i])) error = TABLE_BAD_COMMUNICATOR;
  }
  if (!error) qsort(sorted, count, sizeof(*sorted), by_place);
  for (uint32_t i = 1; i < count && !error; i++) {
    if (by_place(&sorted[i - 1], &sorted[i]) == 0) error = TABLE_DUPLICATE;
  }
  free(sorted);
  return error;
}

// Trusts no byte of `data`. Duplicate decisions, overlapping ranges and calls without a site are found when the buffer is
// filled.
enum table_error check_table(const uint8_t* data, size_t size) {
  lagom_table_header h;
  if (size < sizeof(h)) return TABLE_WRONG_SIZE;
  memcpy(&h, data, sizeof(h));
  if (h.magic != LAGOM_TABLE_MAGIC) return TABLE_WRONG_MAGIC;
  if (h.version != LAGOM_TABLE_VERSION) return TABLE_WRONG_VERSION;
  if (h.header_bytes != sizeof(h) || h.communicator_bytes != sizeof(lagom_communicator) ||
      h.decision_bytes != sizeof(lagom_decision) || h.call_bytes != sizeof(lagom_cycle_call) || h.flags ||
      h.generation == 0 || h.num_communicators > LAGOM_MAX_COMMUNICATORS || h.num_decisions > LAGOM_MAX_DECISIONS ||
      h.num_calls > LAGOM_MAX_CALLS) {
    return TABLE_BAD_HEADER;
  }
  uint64_t expected = sizeof(h) + (uint64_t)h.num_communicators * sizeof(lagom_communicator) +
                      (uint64_t)h.num_decisions * sizeof(lagom_decision) + (uint64_t)h.num_calls * sizeof(lagom_cycle_call);
  if (h.file_bytes != size || expected != size) return TABLE_WRONG_SIZE;
  if (table_checksum(data, size) != h.checksum) return TABLE_WRONG_CHECKSUM;
  enum table_error error = check_communicators(data, h.num_communicators);
  if (error) return error;
  const uint8_t* row = data + sizeof(h) + (size_t)h.num_communicators * sizeof(lagom_communicator);
  for (uint32_t i = 0; i < h.num_decisions; i++, row += sizeof(lagom_decision)) {
    lagom_decision d;
    memcpy(&d, row, sizeof(d));
    if (!is_sound_decision(&d, h.num_communicators)) return TABLE_BAD_DECISION;
  }
  uint32_t least = 0;
  for (uint32_t i = 0; i < h.num_calls; i++, row += sizeof(lagom_cycle_call)) {
    lagom_cycle_call call;
    memcpy(&call, row, sizeof(call));
    if (!is_sound_call(&call, least, h.num_communicators)) return TABLE_BAD_CYCLE;
    least = call.communicator;
  }
  return TABLE_OK;
}
