// The record ring of the tuner: what NCCL asked and offered, and what was answered.
#define _GNU_SOURCE
#include <string.h>

#include "lagom_tuner.h"

lagom_ring record;
static pthread_mutex_t flush_lock = PTHREAD_MUTEX_INITIALIZER;

void start_record(nccl_logger log) {
  const char* pattern = getenv("LAGOM_RECORD");
  if (!pattern || !*pattern) return;
  char path[MAX_PATH];
  if (ring_create(&record, pattern, getenv("LAGOM_RECORD_ENTRIES"), LAGOM_RECORD_MAGIC, LAGOM_RECORD_VERSION,
                  sizeof(lagom_record_entry), path)) {
    LOG(log, NCCL_LOG_LEVEL_INFO, "TUNER/lagom: recording to %s", path);
  } else {
    LOG(log, NCCL_LOG_LEVEL_WARN, "TUNER/lagom: cannot create the record %s; nothing is recorded", pattern);
  }
}

// Writes to the record's file what is not there yet; before it is read. Not for the decision path.
EXPORT void lagom_record_flush(void) {
  if (!ring_is_own(&record)) return;  // asked before the lock, which a forked child may have found taken
  pthread_mutex_lock(&flush_lock);
  ring_flush(&record);
  pthread_mutex_unlock(&flush_lock);
}

__attribute__((destructor)) static void flush_at_exit(void) { lagom_record_flush(); }

void record_entry(const lagom_record_entry* entry) {
  if (record.header) ring_append(&record, entry, sizeof(*entry));
}
_Static_assert(sizeof(lagom_record_entry) % 8 == 0 && offsetof(lagom_record_entry, sequence) == 0, "word copies");

void record_decision(const context* c, const question* q, uint64_t word, const origin* from, const float* offered,
                     uint32_t flags) {
  lagom_record_entry e = {
      .comm_id = c->comm_id,
      .num_bytes = q->num_bytes,
      .generation = from->generation,
      .step = LOAD(current_step),
      .occurrence = from->occurrence,
      .communicator = from->communicator,
      .event = LAGOM_EVENT_DECISION,
      .kind = (uint32_t)q->kind,
      .flags = flags,
      .abi_version = (uint32_t)c->version,
      .num_pipe_ops = q->num_pipe_ops,
      .registered = q->cost ? q->registered : (q->collnet_support ? 1 : 0) | (q->nvls_support ? 2 : 0),
      .algorithm = algorithm_of(word),
      .protocol = protocol_of(word),
      .num_channels = *q->num_channels,
      .chunk_set = chunk_of(word),
  };
  memcpy(e.cost_us, offered, sizeof(e.cost_us));
  record_entry(&e);
}

void keep_offer(const question* q, float* offered) {
  for (int i = 0; i < LAGOM_COST_ENTRIES; i++) {
    int a = i / NCCL_NUM_PROTOCOLS, p = i % NCCL_NUM_PROTOCOLS;
    bool has = q->cost && a < q->num_algorithms && p < q->num_protocols;
    offered[i] = has ? q->cost[a * q->num_protocols + p] : -1.0F;
  }
}
