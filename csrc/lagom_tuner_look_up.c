// The look-up of a decision, and the following of a communicator's calls that tells which one of the step it is.
//
// The rule is that of `collective/sites.py`, and a test holds both equal. Nothing that a rank counts by itself is in it: the
// same calls on a communicator give the same places on all of its ranks.
#define _GNU_SOURCE
#include <string.h>

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
int32_t find_site(table* t, uint32_t communicator, uint32_t kind, uint64_t num_bytes, int32_t hint) {
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

// The place in its cycle that a call of a site takes: the site's first from `next` on, around the end; -1: it has none.
static int32_t place_of(table* t, const site* s, uint32_t next) {
  const uint32_t first = LOAD(s->first_place), num = LOAD(s->num_places);
  uint32_t at = 0, length = num;
  if (num == 0 || num > LAGOM_MAX_CALLS) return -1;
  while (length) {  // the first that is not below `next`
    const uint32_t half = length / 2;
    const bool is_below = LOAD(t->places[(first + at + half) & (LAGOM_MAX_CALLS - 1)]) < next;
    at = is_below ? at + half + 1 : at;
    length = is_below ? length - half - 1 : half;
  }
  return (int32_t)LOAD(t->places[(first + (at < num ? at : 0)) & (LAGOM_MAX_CALLS - 1)]);
}

// Channels within the communicator's own; none at all where NCCL might index its channels by them unchecked.
static uint64_t limited(uint64_t word, uint32_t most, bool keeps_channels) {
  const uint64_t wanted = (uint64_t)channels_of(word);
  const uint64_t allowed = keeps_channels ? 0 : most && wanted > most ? most : wanted;
  return word ^ (wanted ^ allowed) << WORD_CHANNELS;
}

// The word that a table has for a call, 0: none; `from` has what the communicator has come to, and gets what it comes to.
static uint64_t word_of(table* t, const role* r, uint32_t communicator, const call_place* at, origin* from) {
  const bool is_large = at->num_bytes >= LAGOM_LEAST_BYTES;
  const uint32_t num_calls = is_large ? LOAD(r->num_calls) : 0;
  uint32_t first = 0, place = 0;
  int32_t hint = -1;
  if (num_calls) {
    first = LOAD(r->first_call);
    place = from->before.place < num_calls ? from->before.place : 0;  // beyond it where the communicator was bound anew
    hint = (int32_t)LOAD(t->cycle[(first + place) & (LAGOM_MAX_CALLS - 1)].site);
  }
  const int32_t found = find_site(t, communicator, at->kind, at->num_bytes, hint);
  if (found < 0) return 0;
  const site* s = &t->sites[found & (LAGOM_MAX_DECISIONS - 1)];
  LAGOM_BETWEEN_READS();
  int32_t taken = num_calls && found == hint ? (int32_t)place : num_calls ? place_of(t, s, place) : -1;
  if (taken < 0) return LOAD(s->any);
  const cycle_place* mine = &t->cycle[(first + (uint32_t)taken) & (LAGOM_MAX_CALLS - 1)];
  from->after.place = (uint32_t)taken + 1 < num_calls ? (uint32_t)taken + 1 : 0;
  from->occurrence = LOAD(mine->occurrence);
  return LOAD(mine->word);
}

// The word for a call, 0: none; `at` says which call it is. Changes nothing: `follow` takes the call as made. Retries when
// a swap was under way.
uint64_t look_up(context* c, const call_place* at, origin* from) {
  static const origin NOWHERE = {.communicator = (uint32_t)NO_COMMUNICATOR, .occurrence = LAGOM_ANY_OCCURRENCE};
  *from = NOWHERE;
  for (int attempt = 0; attempt < MAX_TRIES; attempt++) {
    const uint32_t now = atomic_load_explicit(&active, memory_order_acquire);
    if (now == 0) return 0;
    const uint32_t buffer = (now - 1) & 1;
    table* t = &tables[buffer];
    const uint32_t sequence = atomic_load_explicit(&t->sequence, memory_order_acquire);
    if (sequence & 1) continue;
    const pending_call* p = at->asked;
    const progress* known = p && p->buffer == buffer && p->before.sequence == sequence ? &p->before : &c->ahead[buffer];
    const int32_t communicator = LOAD(c->communicator[buffer]);
    *from = (origin){.generation = LOAD(t->generation), .communicator = (uint32_t)communicator,
                     .occurrence = LAGOM_ANY_OCCURRENCE, .buffer = buffer};
    from->before = known->sequence == sequence ? *known : (progress){.sequence = sequence};
    from->after = from->before;
    from->after.num_calls += at->num_bytes >= LAGOM_LEAST_BYTES;
    uint64_t word = 0, lease = 0;
    uint32_t most = 0;
    if (communicator >= 0) {
      const role* r = &t->roles[communicator & (LAGOM_MAX_COMMUNICATORS - 1)];
      word = word_of(t, r, (uint32_t)communicator, at, from);
      lease = LOAD(r->lease_calls);
      most = LOAD(r->max_channels);
    }
    atomic_thread_fence(memory_order_acquire);
    if (LOAD(t->sequence) != sequence) continue;
    // What is not decided is followed all the same: whether a call is decided here may be known to this rank alone.
    const bool is_over = lease && from->before.num_calls >= lease;
    if (is_over || !decides()) {
      from->generation = 0;
      from->communicator = (uint32_t)NO_COMMUNICATOR;
      from->occurrence = LAGOM_ANY_OCCURRENCE;
      return 0;
    }
    if (word) word = limited(word, most, at->keeps_channels);
    return word == NOTHING_SET ? 0 : word;  // nothing of it is left: a chained tuner is asked
  }
  *from = NOWHERE;
  return 0;
}

// Takes a call as made, at the place that was found for it; one that was asked about before is taken once.
void follow(context* c, pending_call* p, const origin* from) {
  if (from->before.sequence == 0) return;
  if (p) {
    if (p->buffer == from->buffer && p->before.sequence == from->before.sequence) return;
    p->buffer = from->buffer;
    p->before = from->before;
  }
  c->ahead[from->buffer] = from->after;
}

// What is left of a batch once those calls are forgotten that were never launched: queries and simulations.
static void retrace(context* c) {
  for (uint32_t i = 0; i < c->num_pending; i++) {
    const pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    const bool is_large = p->num_bytes >= LAGOM_LEAST_BYTES;
    if (!p->launched) {
      STORE(c->num_large, LOAD(c->num_large) - is_large);
      continue;
    }
    if (p->before.sequence == 0 || !is_large) continue;
    const uint32_t buffer = p->buffer & 1;
    progress* g = &c->launched[buffer];
    if (g->sequence != p->before.sequence) *g = (progress){.sequence = p->before.sequence};
    const int32_t communicator = LOAD(c->communicator[buffer]);
    origin from = {.before = *g, .after = *g};
    const call_place at = {.kind = (uint32_t)p->kind, .num_bytes = p->num_bytes};
    table* t = &tables[buffer];
    from.after.num_calls++;
    if (communicator >= 0) {
      word_of(t, &t->roles[communicator & (LAGOM_MAX_COMMUNICATORS - 1)], (uint32_t)communicator, &at, &from);
    }
    *g = from.after;  // of a buffer that was filled anew, nothing: its sequence is another one
  }
  memcpy(c->ahead, c->launched, sizeof(c->ahead));
}

// The batch is over: its calls that were seen launched are taken as made, and the others forgotten. If it had more than
// are remembered, all are.
static void settle_batch(context* c) {
  bool is_whole = c->is_overfull;
  uint32_t num_launched = 0;
  for (uint32_t i = 0; i < c->num_pending; i++) num_launched += c->pending[i & (MAX_PENDING - 1)].launched;
  is_whole = is_whole || num_launched == c->num_pending;
  if (is_whole) memcpy(c->launched, c->ahead, sizeof(c->launched));
  else retrace(c);
  c->num_pending = 0;
  c->is_launching = false;
  c->is_overfull = false;
}

pending_call* pending_of(context* c, const question* q) {
  if (c->is_launching) settle_batch(c);
  for (uint32_t i = 0; i < c->num_pending; i++) {
    pending_call* p = &c->pending[i & (MAX_PENDING - 1)];
    if (p->num_bytes == q->num_bytes && p->kind == q->kind) return p;
  }
  STORE(c->num_large, LOAD(c->num_large) + (q->num_bytes >= LAGOM_LEAST_BYTES));
  if (c->num_pending >= MAX_PENDING) {
    c->is_overfull = true;
    return NULL;
  }
  pending_call* p = &c->pending[c->num_pending++ & (MAX_PENDING - 1)];
  *p = (pending_call){.num_bytes = q->num_bytes, .kind = q->kind};
  return p;
}
