// The look-up of a decision, and the counting of calls that tells which one of the step it is.
#define _GNU_SOURCE
#include "lagom_tuner.h"

#ifndef LAGOM_BETWEEN_READS  // a test swaps tables here, where a real swap would hurt most
#define LAGOM_BETWEEN_READS()
#endif

bool gathers_are_uncapped;

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

// Without step marks nothing tells where a step begins: one call too many, of an evaluation say, would shift every later
// decision for good. So the row for every call decides until the first mark, and for calls beyond the last occurrence.
static uint64_t word_of(table* t, const site* s, int64_t occurrence) {
  const uint32_t num_rows = LOAD(s->num_rows), first_row = LOAD(s->first_row);
  LAGOM_BETWEEN_READS();
  const bool is_own = occurrence >= 0 && occurrence < num_rows && LOAD(current_step) > 0;
  const uint64_t word = is_own ? LOAD(t->rows[(first_row + (uint32_t)occurrence) & (LAGOM_MAX_ROWS - 1)]) : LOAD(s->any);
  return word == NOTHING_SET ? 0 : word;
}

// Channels within the communicator's own. NCCL 2.29 and 2.30 ask for grouped broadcasts of several roots (an uneven
// all-gather) as for an all-gather, which nothing tells apart, and index their channels by the answer without a cap: there
// an all-gather is left NCCL's channels unless the communicator's are known.
static uint64_t limited(uint64_t word, uint32_t kind, uint32_t most) {
  const uint64_t wanted = (uint64_t)channels_of(word);
  uint64_t allowed = most && wanted > most ? most : wanted;
  if (!most && kind == NCCL_ALL_GATHER && gathers_are_uncapped) allowed = 0;
  return word ^ (wanted ^ allowed) << WORD_CHANNELS;
}

// The word for the `occurrence`-th call of its site in the step, 0: none. Retries when a swap was under way.
uint64_t look_up(context* c, uint32_t kind, uint64_t num_bytes, int64_t occurrence, int32_t hint, origin* from) {
  from->generation = 0;
  from->communicator = (uint32_t)NO_COMMUNICATOR;
  for (int attempt = 0; attempt < MAX_TRIES; attempt++) {
    uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
    if (now == 0 || LOAD(disabled)) return 0;
    table* t = &tables[(now - 1) & 1];
    uint32_t sequence = atomic_load_explicit(&t->sequence, memory_order_acquire);
    if (sequence & 1) continue;
    from->generation = LOAD(t->generation);
    int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
    from->communicator = (uint32_t)communicator;
    uint64_t word = 0;
    uint32_t most = 0;
    if (communicator >= 0) {
      int32_t place = find_site(t, (uint32_t)communicator, kind, num_bytes, hint);
      if (place >= 0) word = word_of(t, &t->sites[place & (LAGOM_MAX_DECISIONS - 1)], occurrence);
      most = LOAD(t->max_channels[communicator & (LAGOM_MAX_COMMUNICATORS - 1)]);
    }
    atomic_thread_fence(memory_order_acquire);
    if (LOAD(t->sequence) != sequence) continue;
    if (word) word = limited(word, kind, most);
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
  if (now == 0 || LOAD(disabled)) return num_bytes;
  table* t = &tables[(now - 1) & 1];
  const int32_t communicator = LOAD(c->communicator[(now - 1) & 1]);
  if (communicator >= 0) *place = find_site(t, (uint32_t)communicator, kind, num_bytes, -1);
  return *place < 0 ? num_bytes : bytes_of_key(LOAD(t->keys[*place & (LAGOM_MAX_DECISIONS - 1)]));
}

// The counter of a call site, started anew when the step has changed; -1 when the communicator has too many.
int counter_of(context* c, uint32_t kind, uint64_t num_bytes, uint32_t step) {
  if (num_bytes > LAGOM_MAX_BYTES) return -1;
  const uint64_t key = num_bytes << 3 | kind;
  uint32_t i = hash_of(kind, num_bytes);
  for (uint32_t n = 0; n < NUM_COUNTERS; n++, i++) {
    counter* k = &c->counters[i & (NUM_COUNTERS - 1)];
    if (k->key == 0) {
      if (c->num_counters >= MAX_COUNTERS_USED) return -1;
      c->num_counters++;
      *k = (counter){.key = key, .step = step};
    } else if (k->key != key) {
      continue;
    }
    if (k->step != step) {
      k->step = step;
      k->count = 0;
    }
    return (int)(i & (NUM_COUNTERS - 1));
  }
  return -1;
}

// Counts the calls of the last batch that were seen launched, and forgets the others: queries and simulations.
static void settle_batch(context* c, uint32_t step) {
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (!p->launched || p->counter < 0) continue;
    c->counters[p->counter & (NUM_COUNTERS - 1)].count++;
  }
  c->num_pending = 0;
  c->batch_step = step;
  c->is_launching = false;
  c->is_overfull = false;
}

pending_call* pending_of(context* c, const question* q, uint64_t counted, uint32_t step) {
  if (c->is_launching || c->batch_step != step) settle_batch(c, step);
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (p->num_bytes == q->num_bytes && p->kind == q->kind) return p;
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
  p->counter = counter_of(c, (uint32_t)q->kind, counted, step);
  p->earlier = 0;
  for (uint32_t i = 0; i + 1 < c->num_pending; i++) p->earlier += c->pending[i & (MAX_PENDING - 1)].counter == p->counter;
  return p;
}
