// The look-up of a decision, and the counting of calls that tells which one of the step it is.
#define _GNU_SOURCE
#include "lagom_tuner.h"

#ifndef LAGOM_BETWEEN_READS  // a test swaps tables here, where a real swap would hurt most
#define LAGOM_BETWEEN_READS()
#endif

static bool holds(table* t, uint32_t at, uint64_t key) {
  const uint64_t found = LOAD(t->keys[at]);
  return found <= key && found >> KEY_KIND == key >> KEY_KIND &&
         bytes_of_key(key) <= LOAD(t->sites[at].last_bytes);
}

// The place of the site whose range holds a call, or -1; looks at `hint` first.
static int32_t find_site(table* t, uint32_t communicator, uint32_t kind, uint64_t num_bytes, int32_t hint) {
  uint32_t length = LOAD(t->num_sites), at = 0;
  if (length == 0 || length > LAGOM_MAX_DECISIONS || num_bytes > LAGOM_MAX_BYTES) return -1;
  const uint64_t key = site_key(communicator, kind, num_bytes);
  if (hint >= 0 && (uint32_t)hint < length && holds(t, (uint32_t)hint, key)) return hint;
  while (length > 1) {
    const uint32_t half = length / 2;
    at += LOAD(t->keys[at + half]) <= key ? half : 0;
    length -= half;
  }
  return holds(t, at, key) ? (int32_t)at : -1;
}

static uint32_t hash_of(uint32_t kind, uint64_t num_bytes) {
  uint64_t h = (num_bytes ^ (uint64_t)kind << 40) * 0x9E3779B97F4A7C15ULL;
  return (uint32_t)((h ^ h >> 32) * 0xD6E8FEB86659FD93ULL >> 32);
}

// The row of a call that is the `occurrence`-th of its site in the step, the row for every call where there is none, or
// where the occurrence is below 0: not known, or no step was marked.
static uint64_t word_of(table* t, const site* s, int64_t occurrence) {
  const uint32_t num_rows = LOAD(s->num_rows), first_row = LOAD(s->first_row);
  LAGOM_BETWEEN_READS();
  const bool is_own = occurrence >= 0 && occurrence < num_rows;
  const uint64_t word = is_own ? LOAD(t->rows[(first_row + (uint32_t)occurrence) & (LAGOM_MAX_ROWS - 1)]) : LOAD(s->any);
  return word == NOTHING_SET ? 0 : word;
}

// Channels within the communicator's own; none at all where NCCL might index its channels by them unchecked.
static uint64_t limited(uint64_t word, uint32_t most, bool keeps_channels) {
  const uint64_t wanted = (uint64_t)channels_of(word);
  const uint64_t allowed = keeps_channels ? 0 : most && wanted > most ? most : wanted;
  return word ^ (wanted ^ allowed) << WORD_CHANNELS;
}

// The word for a call, 0: none; `at` says which call it is. Retries when a swap was under way.
uint64_t look_up(context* c, const call_place* at, origin* from) {
  from->generation = 0;
  from->communicator = (uint32_t)NO_COMMUNICATOR;
  for (int attempt = 0; attempt < MAX_TRIES; attempt++) {
    uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
    if (now == 0 || !decides()) return 0;
    table* t = &tables[(now - 1) & 1];
    uint32_t sequence = atomic_load_explicit(&t->sequence, memory_order_acquire);
    if (sequence & 1) continue;
    from->generation = LOAD(t->generation);
    int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
    from->communicator = (uint32_t)communicator;
    uint64_t word = 0;
    uint32_t most = 0;
    if (communicator >= 0) {
      int32_t place = find_site(t, (uint32_t)communicator, at->kind, at->num_bytes, at->hint);
      if (place >= 0) word = word_of(t, &t->sites[place & (LAGOM_MAX_DECISIONS - 1)], at->occurrence);
      most = LOAD(t->max_channels[communicator & (LAGOM_MAX_COMMUNICATORS - 1)]);
    }
    atomic_thread_fence(memory_order_acquire);
    if (LOAD(t->sequence) != sequence) continue;
    if (word) word = limited(word, most, at->keeps_channels);
    return word == NOTHING_SET ? 0 : word;  // nothing of it is left: a chained tuner is asked
  }
  from->generation = 0;
  return 0;
}

// What a call is counted under: the first bytes of its site, or its own where it has none; `place` is the site's, or -1.
// Between steps, when tables are swapped, nothing is counted, so a swap between this and the look-up does no harm.
uint64_t counted_as(context* c, uint32_t kind, uint64_t num_bytes, int32_t* place) {
  const uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
  *place = -1;
  if (now == 0 || !decides()) return num_bytes;
  table* t = &tables[(now - 1) & 1];
  const int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
  if (communicator >= 0) *place = find_site(t, (uint32_t)communicator, kind, num_bytes, -1);
  return *place < 0 ? num_bytes : bytes_of_key(LOAD(t->keys[*place & (LAGOM_MAX_DECISIONS - 1)]));
}

// What a counter goes by; never 0, because a call has bytes.
enum { COUNTED_KNOWN = 1, COUNTED_KIND = 1, COUNTED_BYTES = 4 };
_Static_assert(LAGOM_MAX_BYTES < 1ULL << (64 - COUNTED_BYTES) && NCCL_NUM_KINDS <= 8, "a counter's key holds them");

static uint64_t counter_key(uint32_t kind, uint64_t num_bytes, bool is_known) {
  return num_bytes << COUNTED_BYTES | (uint64_t)(kind & 7) << COUNTED_KIND | (is_known ? COUNTED_KNOWN : 0);
}

// The counter of a call site, started anew when the step has changed; -1 when the communicator has too many. Counters of
// earlier steps are taken again. A site of the table (`is_known`) takes that of a size without a row, too, which is
// counted no more in this step: a job of ever new sizes must not make its tuned calls look like others.
int counter_of(context* c, uint32_t kind, uint64_t num_bytes, bool is_known, uint32_t step) {
  if (num_bytes > LAGOM_MAX_BYTES) return -1;
  const uint64_t key = counter_key(kind, num_bytes, is_known);
  uint32_t i = hash_of(kind, num_bytes);
  int free = -1, foreign = -1;
  for (uint32_t n = 0; n < NUM_COUNTERS; n++, i++) {
    const int place = (int)(i & (NUM_COUNTERS - 1));
    counter* k = &c->counters[place];
    if (k->key == key) {
      if (k->step != step) *k = (counter){.key = key, .step = step};
      return place;
    }
    if (k->key == 0) {
      const bool is_crowded = c->num_counters >= MAX_COUNTERS_USED;
      if (free < 0 && is_known && is_crowded) free = foreign;
      if (free < 0 && (is_known ? c->num_counters < NUM_COUNTERS - 1 : !is_crowded)) {
        c->num_counters++;
        free = place;
      }
      break;
    }
    if (free < 0 && k->step != step) free = place;
    if (foreign < 0 && !(k->key & COUNTED_KNOWN)) foreign = place;
  }
  if (free >= 0) c->counters[free] = (counter){.key = key, .step = step};
  return free;
}

// Whether a call's counter is still its own: a site of the table may have taken it since.
static bool is_counted(const context* c, const pending_call* p) {
  return p->counter >= 0 && c->counters[p->counter & (NUM_COUNTERS - 1)].key == p->counted;
}

// Counts the calls of the last batch that were seen launched, and forgets the others: queries and simulations.
static void settle_batch(context* c, uint32_t step) {
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (p->launched && is_counted(c, p)) c->counters[p->counter & (NUM_COUNTERS - 1)].count++;
  }
  c->num_pending = 0;
  c->batch_step = step;
  c->is_launching = false;
  c->is_overfull = false;
}

pending_call* pending_of(context* c, const question* q, uint64_t counted, bool is_known, uint32_t step) {
  if (c->is_launching || c->batch_step != step) settle_batch(c, step);
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (p->num_bytes != q->num_bytes || p->kind != q->kind) continue;
    if (!is_counted(c, p)) p->counter = -1;
    return p;
  }
  if (c->num_pending >= MAX_PENDING) {
    c->is_overfull = true;
    return NULL;
  }
  pending_call* p = &c->pending[c->num_pending++ & (MAX_PENDING - 1)];
  p->num_bytes = q->num_bytes;
  p->kind = q->kind;
  p->launched = false;
  p->applied = 0;
  p->counted = counter_key((uint32_t)q->kind, counted, is_known);
  p->counter = counter_of(c, (uint32_t)q->kind, counted, is_known, step);
  p->earlier = 0;
  for (uint32_t i = 0; i + 1 < c->num_pending; i++) p->earlier += c->pending[i & (MAX_PENDING - 1)].counted == p->counted;
  return p;
}
