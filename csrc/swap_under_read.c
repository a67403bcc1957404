// Swaps tables and marks steps between two reads of one decision: the worst moment, every time instead of once in ten
// million.
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

static int swaps_left, marks_left;
static uint64_t generation = 1;

// One site: channels for every call, and 60 - channels for the first call of a marked step.
static void install_next(void) {
  const uint32_t channels = 1 + (uint32_t)(generation % 59);
  struct {
    lagom_table_header header;
    lagom_communicator communicator;
    lagom_decision decisions[2];
  } file = {
      .header = {.magic = LAGOM_TABLE_MAGIC, .version = LAGOM_TABLE_VERSION, .header_bytes = sizeof(lagom_table_header),
                 .file_bytes = sizeof(file), .generation = generation, .communicator_bytes = sizeof(lagom_communicator),
                 .decision_bytes = sizeof(lagom_decision), .num_communicators = 1, .num_decisions = 2},
      .communicator = {.description = "one", .num_ranks = 8, .num_nodes = 1},
  };
  for (uint32_t i = 0; i < 2; i++) {
    const uint32_t mine = i ? 60 - channels : channels;
    file.decisions[i] = (lagom_decision){.first_bytes = 4096, .last_bytes = 4096, .kind = NCCL_ALL_REDUCE,
                                         .occurrence = i ? 0 : LAGOM_ANY_OCCURRENCE, .algorithm = NCCL_RING,
                                         .protocol = NCCL_SIMPLE, .num_channels = mine, .chunk_bytes = 512 * mine};
  }
  _Static_assert(sizeof(file) == 64 + 80 + 2 * 48, "no padding");
  generation++;
  file.header.checksum = table_checksum((const uint8_t*)&file, sizeof(file));
  if (lagom_install(&file, sizeof(file), 0)) abort();
}

static void swap_now(void) {
  while (swaps_left > 0) {
    swaps_left--;
    install_next();
  }
  for (; marks_left > 0; marks_left--) lagom_step();
}

// A step is marked while a call is decided that was counted before: it must not become the first one of that step.
static void mark_under_read(context* c) {
  float costs[21];
  for (int i = 0; i < 21; i++) costs[i] = 5.0F;
  int channels = 0;
  const int common = 1 + (int)((generation - 1) % 59);
  marks_left = 1;
  get_coll_info(c, NCCL_ALL_REDUCE, 4096, 1, (float**)(void*)costs, 7, 3, 0, &channels);
  if (channels == common) return;
  fprintf(stderr, "a call before the first mark got %d channels, %d are every call's\n", channels, common);
  exit(1);
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
    const call_place at = {.kind = NCCL_ALL_REDUCE, .num_bytes = 4096, .occurrence = round % 2 - 1, .hint = round % 3 - 1};
    uint64_t word = look_up(c, &at, &from);
    uint64_t channels = (uint64_t)channels_of(word), common = from.generation % 59 + 1;
    if (!word || chunk_of(word) != 512 * channels || channels != (at.occurrence < 0 ? common : 60 - common)) {
      fprintf(stderr, "torn: %llu channels, chunk %zu, generation %llu\n", (unsigned long long)channels, chunk_of(word),
              (unsigned long long)from.generation);
      return 1;
    }
  }
  mark_under_read(c);
  printf("1000 decisions, %llu swaps inside them, none torn\n", (unsigned long long)generation - 2);
  finish(c);
  return 0;
}
