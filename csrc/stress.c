// Decisions from many threads while tables are swapped under way: every decision must come whole from one table.
//
//   lagom_stress PLUGIN.so [decisions = 1000000] [threads = 4] [keys = 256]
//
// Each cell of the table is a function of (generation, key, occurrence). An answer must be that of a generation which was
// current at some time during the call, at the place that the calls since its first one lead to: the driver follows every
// generation that the answers so far allow. Steps are marked at random. Exit 0 if no answer was torn, missing or out of
// turn.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/nccl_host.h"
#include "lagom_table.h"
#include "nccl/nccl_tuner_abi.h"

enum { MAX_KEYS = 256, NUM_OCCURRENCES = 4, NUM_CELLS = 60, GRAINS = 7680, MAX_THREADS = 16, MAX_GUESSES = 4096, UNIT = 1 << 20 };

static int (*install)(const void*, size_t, uint64_t);
static uint32_t (*mark_step)(void);
static fake_host* host;
static int num_threads = 4;
static uint32_t num_keys = MAX_KEYS;
static uint64_t decisions_each;
static _Atomic uint64_t begun, done;  // newest generation whose installation has begun, and is done
static _Atomic int num_running;
static _Atomic uint64_t num_decided, num_torn, num_missing, num_foreign, num_swaps, num_churned;

static uint64_t next_random(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static uint32_t crc32_of(const uint8_t* data, size_t size) {
  static uint32_t table[256];
  if (!table[1]) {
    for (uint32_t i = 0; i < 256; i++) {
      table[i] = i;
      for (int k = 0; k < 8; k++) table[i] = table[i] & 1 ? 0xEDB88320u ^ (table[i] >> 1) : table[i] >> 1;
    }
  }
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < size; i++) crc = table[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

static uint32_t cell(uint64_t generation, uint32_t key, uint32_t occurrence) {
  return (uint32_t)((generation + key + 7 * occurrence) % NUM_CELLS);
}

static uint64_t bytes_of(uint32_t key) { return (uint64_t)UNIT * (key + 1); }

// A step calls each key in turn, and all of them again.
static uint32_t num_places(void) { return num_keys * NUM_OCCURRENCES; }

static size_t make_table(uint8_t* data, uint64_t generation) {
  lagom_table_header* h = (lagom_table_header*)data;
  lagom_communicator* c = (lagom_communicator*)(h + 1);
  lagom_decision* d = (lagom_decision*)(c + num_threads);
  memset(h, 0, sizeof(*h));
  for (int t = 0; t < num_threads; t++, c++) {
    *c = (lagom_communicator){.description = "stress", .num_ranks = 2 + (uint32_t)t, .num_nodes = 1};
    for (uint32_t k = 0; k < num_keys; k++) {
      for (uint32_t n = 0; n < NUM_OCCURRENCES; n++, d++) {
        uint32_t x = cell(generation, k, n);
        *d = (lagom_decision){.first_bytes = bytes_of(k), .last_bytes = bytes_of(k), .communicator = (uint32_t)t, .kind = NCCL_ALL_REDUCE,
                              .occurrence = n, .algorithm = (int)(x % 2),
                              .protocol = (int)(x % 3), .num_channels = 1 + x, .chunk_bytes = (uint64_t)GRAINS * (1 + x)};
      }
    }
  }
  lagom_cycle_call* call = (lagom_cycle_call*)d;
  for (uint32_t i = 0; i < (uint32_t)num_threads * num_places(); i++, call++) {
    *call = (lagom_cycle_call){.num_bytes = bytes_of(i % num_keys), .communicator = i / num_places(), .kind = NCCL_ALL_REDUCE};
  }
  size_t size = (size_t)((uint8_t*)call - data);
  *h = (lagom_table_header){.magic = LAGOM_TABLE_MAGIC, .version = LAGOM_TABLE_VERSION, .header_bytes = sizeof(*h),
                            .file_bytes = size, .generation = generation, .communicator_bytes = sizeof(*c),
                            .decision_bytes = sizeof(*d), .num_communicators = (uint32_t)num_threads,
                            .num_decisions = (uint32_t)num_threads * num_places(),
                            .num_calls = (uint32_t)num_threads * num_places(), .call_bytes = sizeof(lagom_cycle_call)};
  h->checksum = crc32_of(data, size);
  return size;
}

static void* swap_tables(void* unused) {
  (void)unused;
  uint8_t* data = malloc(1 << 23);
  for (uint64_t generation = 2; num_running > 0; generation++) {
    size_t size = make_table(data, generation);
    begun = generation;
    if (install(data, size, generation)) abort();
    done = generation;
    num_swaps++;
    if (generation % 7 == 0 && install(data, size - 1, 0) == 0) abort();  // a damaged one in between
  }
  free(data);
  return NULL;
}

static void* churn_communicators(void* unused) {
  (void)unused;
  for (uint64_t id = 1000; num_running > 0; id++) {
    fake_comm_spec spec = {.comm_id = id, .num_ranks = 500, .num_nodes = 2, .num_channels = 8};
    fake_comm* comm = fake_comm_init(host, &spec);
    fake_call call = {.num_bytes = 1 << 20, .kind = NCCL_ALL_GATHER};
    if (fake_group(comm, &call, 1, 0, NULL)) num_foreign++;
    fake_comm_finalize(comm);
    num_churned++;
  }
  return NULL;
}

// Which cell the answer says, -1 if its parts do not belong together.
static int read_cell(const float* costs, int channels, uint64_t chunk) {
  int chosen = -1;
  for (int i = 0; i < 21; i++) {
    if (costs[i] == 0) chosen = chosen < 0 ? i : -2;
  }
  int x = channels - 1;
  if (chosen < 0 || x < 0 || x >= NUM_CELLS) return -1;
  if (chosen / 3 != x % 2 || chosen % 3 != x % 3 || chunk != (uint64_t)GRAINS * (uint64_t)(1 + x)) return -1;
  return x;
}

// A generation that may be in force, and the place at which its cycle goes on.
typedef struct {
  uint64_t generation;
  uint32_t place;
} guess;

// The guesses that an answer leaves, after a call of `key`; none: it is out of turn. `first` to `last` may have been in
// force; those up to `before` were so at the call before.
static size_t follow(guess* guesses, size_t num, uint32_t key, int x, uint64_t before, uint64_t first, uint64_t last) {
  guess kept[MAX_GUESSES];
  size_t num_kept = 0;
  for (uint64_t g = first; g <= last; g++) {
    for (size_t i = 0; i <= num; i++) {
      if (i < num ? guesses[i].generation != g : g <= before) continue;
      const uint32_t from = i < num ? guesses[i].place : 0;
      const uint32_t place = from + (key + num_keys - from % num_keys) % num_keys;  // the key's next one
      const uint32_t taken = place % num_places();
      if (cell(g, key, taken / num_keys) != (uint32_t)x || num_kept == MAX_GUESSES) continue;
      const guess next = {g, (taken + 1) % num_places()};
      bool is_new = true;
      for (size_t k = num_kept; k > 0 && kept[k - 1].generation == g; k--) is_new = is_new && kept[k - 1].place != next.place;
      if (is_new) kept[num_kept++] = next;
    }
  }
  memcpy(guesses, kept, num_kept * sizeof(*kept));
  return num_kept;
}

static void* decide(void* argument) {
  fake_comm* comm = argument;
  guess guesses[MAX_GUESSES];
  size_t num_guesses = 0;
  uint64_t random = 0x1234567 + (uint64_t)(uintptr_t)comm;
  uint64_t before = 0;
  uint32_t next = 0;
  for (uint64_t n = 0; n < decisions_each; n++) {
    uint64_t r = next_random(&random);
    uint32_t key = (r >> 40) % 4 ? next % num_keys : r % num_keys;
    if ((r >> 32) % 64 == 0) mark_step();
    bool is_foreign = (r >> 20) % 16 == 0, is_query = (r >> 24) % 16 == 0;
    float costs[21];
    for (int i = 0; i < 21; i++) costs[i] = i < 6 && !is_query ? 50.0F + (float)i : -1.0F;
    int channels = 0;
    uint64_t bytes = bytes_of(key) + (is_foreign ? 1 : 0), chunk = 2 << 20;
    uint64_t first = done;
    fake_raw_coll_info(comm, NCCL_ALL_REDUCE, bytes, is_query ? 0 : 1, costs, 7, 3, 0, &channels);
    uint64_t last = begun;
    num_decided++;
    if (is_foreign || is_query) {
      if (channels) num_foreign++;
      if (is_query) continue;
      fake_raw_chunk_size(comm, NCCL_ALL_REDUCE, bytes, 1, 2, 1, &chunk);
      if (chunk != 2 << 20) num_foreign++;
      continue;
    }
    int algorithm = 1, protocol = 2;
    for (int i = 0; i < 21; i++) {
      if (costs[i] == 0) algorithm = i / 3, protocol = i % 3;
    }
    for (int part = 0; part < 3; part++) {
      chunk = 2 << 20;
      fake_raw_chunk_size(comm, NCCL_ALL_REDUCE, bytes / 4, algorithm, protocol, 1, &chunk);
    }
    next = key + 1;
    const int x = channels ? read_cell(costs, channels, chunk) : -1;
    if (channels == 0) num_missing++;
    else if (x < 0 || (num_guesses = follow(guesses, num_guesses, key, x, before, first, last)) == 0) num_torn++;
    before = first;
  }
  num_running--;
  return NULL;
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  uint64_t decisions = argc > 2 ? strtoull(argv[2], NULL, 10) : 1000000;
  if (argc > 3) num_threads = atoi(argv[3]);
  if (argc > 4) num_keys = (uint32_t)atoi(argv[4]);
  if (num_keys < 1 || num_keys > MAX_KEYS || num_threads < 1 || num_threads > MAX_THREADS) return 2;
  decisions_each = decisions / (uint64_t)num_threads;
  setenv("NCCL_TUNER_PLUGIN", argv[1], 1);
  setenv("LAGOM_CHAIN_TUNER", "none", 1);
  host = fake_open(23003);
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library || fake_tuner_version(host) != 6) {
    fprintf(stderr, "%s is no tuner of version 6\n", argv[1]);
    return 2;
  }
  *(void**)&install = dlsym(library, "lagom_install");
  *(void**)&mark_step = dlsym(library, "lagom_step");
  uint8_t* data = malloc(1 << 23);
  begun = done = 1;
  if (!install || !mark_step || install(data, make_table(data, 1), 1)) return 2;
  free(data);

  pthread_t threads[MAX_THREADS], swapper, churner;
  fake_comm* comms[MAX_THREADS];
  num_running = num_threads;
  for (int t = 0; t < num_threads; t++) {
    fake_comm_spec spec = {.comm_id = 77 + (uint64_t)t, .num_ranks = 2 + (uint64_t)t, .num_nodes = 1, .num_channels = 64};
    comms[t] = fake_comm_init(host, &spec);
    pthread_create(&threads[t], NULL, decide, comms[t]);
  }
  pthread_create(&swapper, NULL, swap_tables, NULL);
  pthread_create(&churner, NULL, churn_communicators, NULL);
  for (int t = 0; t < num_threads; t++) pthread_join(threads[t], NULL);
  pthread_join(swapper, NULL);
  pthread_join(churner, NULL);
  for (int t = 0; t < num_threads; t++) fake_comm_finalize(comms[t]);
  fake_close(host);
  printf("decisions %llu, swaps %llu, communicators made %llu; torn %llu, missing %llu, touched without a row %llu\n",
         (unsigned long long)num_decided, (unsigned long long)num_swaps, (unsigned long long)num_churned,
         (unsigned long long)num_torn, (unsigned long long)num_missing, (unsigned long long)num_foreign);
  return num_torn || num_missing || num_foreign ? 1 : 0;
}
