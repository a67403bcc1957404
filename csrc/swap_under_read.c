// Swaps tables between two reads of one decision: the worst moment, every time instead of once in ten million.
// Exit 0 if every answer still comes whole from one table, and from the first call of its step after each swap.
#define _GNU_SOURCE
#include <stdint.h>
static void swap_now(void);
#define LAGOM_BETWEEN_READS() swap_now()
#include <stdio.h>

#include "lagom_tuner_check.c"
#include "lagom_tuner_table.c"
#include "lagom_tuner_look_up.c"
#include "lagom_tuner_apply.c"
#include "lagom_tuner_record.c"
#include "lagom_tuner_chain.c"
#include "lagom_tuner.c"

enum { NUM_BYTES = 2 << 20 };
static int swaps_left;
static uint64_t generation = 1;

// One site, called twice in a step: 60 - channels for its first call, and channels for any other.
static void install_next(void) {
  const uint32_t channels = 1 + (uint32_t)(generation % 59);
  struct {
    lagom_table_header header;
    lagom_communicator communicator;
    lagom_decision decisions[2];
    lagom_cycle_call calls[2];
  } file = {
      .header = {.magic = LAGOM_TABLE_MAGIC, .version = LAGOM_TABLE_VERSION, .header_bytes = sizeof(lagom_table_header),
                 .file_bytes = sizeof(file), .generation = generation, .communicator_bytes = sizeof(lagom_communicator),
                 .decision_bytes = sizeof(lagom_decision), .num_communicators = 1, .num_decisions = 2, .num_calls = 2,
                 .call_bytes = sizeof(lagom_cycle_call)},
      .communicator = {.description = "one", .num_ranks = 8, .num_nodes = 1},
  };
  for (uint32_t i = 0; i < 2; i++) {
    const uint32_t mine = i ? 60 - channels : channels;
    file.decisions[i] = (lagom_decision){.first_bytes = NUM_BYTES, .last_bytes = NUM_BYTES, .kind = NCCL_ALL_REDUCE,
                                         .occurrence = i ? 0 : LAGOM_ANY_OCCURRENCE, .algorithm = NCCL_RING,
                                         .protocol = NCCL_SIMPLE, .num_channels = mine, .chunk_bytes = 512 * mine};
    file.calls[i] = (lagom_cycle_call){.num_bytes = NUM_BYTES, .kind = NCCL_ALL_REDUCE};
  }
  _Static_assert(sizeof(file) == 64 + 88 + 2 * 48 + 2 * 16, "no padding");
  generation++;
  file.header.checksum = table_checksum((const uint8_t*)&file, sizeof(file));
  if (lagom_install(&file, sizeof(file), 0)) abort();
}

static void swap_now(void) {
  while (swaps_left > 0) {
    swaps_left--;
    install_next();
  }
}

int main(void) {
  void* made = NULL;
  setenv("LAGOM_CHAIN_TUNER", "none", 1);
  start(&made, 6, 1, 8, 1, NULL, NULL, NULL);
  context* c = made;
  install_next();
  uint64_t last_generation = 0;
  uint32_t expected = 0;
  for (int round = 0; round < 1000; round++) {
    swaps_left = round % 5;  // one swap leaves the reader's buffer alone, two overwrite it
    origin from;
    const call_place at = {.kind = NCCL_ALL_REDUCE, .num_bytes = NUM_BYTES};
    uint64_t word = look_up(c, &at, &from);
    follow(c, NULL, &from);
    expected = from.generation == last_generation ? 1 - expected : 0;
    last_generation = from.generation;
    uint64_t channels = (uint64_t)channels_of(word), common = from.generation % 59 + 1;
    if (!word || chunk_of(word) != 512 * channels || from.occurrence != expected ||
        channels != (expected ? common : 60 - common)) {
      fprintf(stderr, "torn: %llu channels, chunk %zu, call %u of generation %llu\n", (unsigned long long)channels,
              chunk_of(word), from.occurrence, (unsigned long long)from.generation);
      return 1;
    }
  }
  printf("1000 decisions, %llu swaps inside them, none torn\n", (unsigned long long)generation - 2);
  finish(c);
  return 0;
}
