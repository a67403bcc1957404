// Swaps tables between two reads of one decision: the worst moment, every time instead of once in ten million.
// Exit 0 if every answer still comes whole from one table.
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

static int swaps_left;
static uint64_t generation = 1;

static void install_next(void) {
  struct {
    lagom_table_header header;
    lagom_communicator communicator;
    lagom_decision decision;
  } file = {
      .header = {.magic = LAGOM_TABLE_MAGIC, .version = LAGOM_TABLE_VERSION, .header_bytes = sizeof(lagom_table_header),
                 .file_bytes = sizeof(file), .generation = generation, .communicator_bytes = sizeof(lagom_communicator),
                 .decision_bytes = sizeof(lagom_decision), .num_communicators = 1, .num_decisions = 1},
      .communicator = {.description = "one", .num_ranks = 8, .num_nodes = 1},
      .decision = {.first_bytes = 4096, .last_bytes = 4096, .kind = NCCL_ALL_REDUCE, .occurrence = LAGOM_ANY_OCCURRENCE, .algorithm = 1,
                   .protocol = 2, .num_channels = 1 + (uint32_t)(generation % 60), .chunk_bytes = 512 * (1 + generation % 60)},
  };
  _Static_assert(sizeof(file) == 64 + 80 + 48, "no padding");
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
  for (int round = 0; round < 1000; round++) {
    swaps_left = round % 5;  // one swap leaves the reader's buffer alone, two overwrite it
    origin from;
    uint64_t word = look_up(c, NCCL_ALL_REDUCE, 4096, 0, round % 3 - 1, &from);
    uint64_t channels = (uint64_t)channels_of(word);
    if (!word || chunk_of(word) != 512 * channels || from.generation % 60 + 1 != channels) {
      fprintf(stderr, "torn: %llu channels, chunk %zu, generation %llu\n", (unsigned long long)channels, chunk_of(word),
              (unsigned long long)from.generation);
      return 1;
    }
  }
  printf("1000 decisions, %llu swaps inside them, none torn\n", (unsigned long long)generation - 2);
  finish(c);
  return 0;
}
