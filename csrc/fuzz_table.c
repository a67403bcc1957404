// Fuzzes the table reader, and the decisions made by whatever it lets through.
//
//   libFuzzer:  clang -g -O1 -fsanitize=fuzzer,address,undefined -DLAGOM_LIBFUZZER fuzz_table.c -o fuzz && ./fuzz
//   otherwise:  lagom_fuzz [executions = 100000] [seed = 1]      (random mutations of sound tables)
//
// Half of the inputs get a right checksum, size and magic, so that they come past the first gates.
#define _GNU_SOURCE
#include <stdio.h>

#include "lagom_tuner_check.c"
#include "lagom_tuner_table.c"
#include "lagom_tuner_look_up.c"
#include "lagom_tuner_apply.c"
#include "lagom_tuner_record.c"
#include "lagom_tuner_chain.c"
#include "lagom_tuner.c"

enum { MIB = 1 << 20 };

static context* fuzz_context(void) {
  static context* c;
  if (!c) {
    setenv("LAGOM_CHAIN_TUNER", "none", 1);
    void* made = NULL;
    start(&made, 6, 1, 8, 1, NULL, NULL, NULL);
    c = made;
  }
  return c;
}

static void require(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "broken: %s\n", what);
  abort();
}

// Asks for calls that the input may name, and checks what must hold whatever the table says.
static void decide_some(const uint8_t* data, size_t size) {
  context* c = fuzz_context();
  for (int n = 0; n < 8; n++) {
    uint64_t num_bytes = MIB * ((uint64_t)n + 1);
    size_t row = sizeof(lagom_table_header) + sizeof(lagom_communicator) + (size_t)n * sizeof(lagom_decision);
    int kind = n % NCCL_NUM_KINDS;
    if (n < 6 && size >= row + sizeof(lagom_decision)) {
      lagom_decision d;
      memcpy(&d, data + row, sizeof(d));
      num_bytes = d.first_bytes;
      kind = (int)(d.kind % NCCL_NUM_KINDS);
    }
    float before[21], costs[21];
    for (int i = 0; i < 21; i++) before[i] = costs[i] = (i * 7 + n) % 3 ? 5.0F + (float)i : -1.0F;
    int channels = 0;
    nccl_result result = get_coll_info(c, kind, num_bytes, 1, (float**)(void*)costs, 7, 3, 0, &channels);
    require(result == NCCL_SUCCESS, "always success");
    require(channels >= 0 && channels <= NCCL_MAX_CHANNELS, "channels in range");
    int cheapest = -1;
    for (int i = 0; i < 21; i++) {
      require((before[i] < 0) == (costs[i] < 0), "what is unavailable stays so, and the rest available");
      if (costs[i] >= 0 && (cheapest < 0 || costs[i] < costs[cheapest])) cheapest = i;
    }
    require(costs[cheapest] < DISABLED, "something is left to choose");
    size_t chunk = 131072;
    get_chunk_size(c, kind, num_bytes / 2, cheapest / 3, cheapest % 3, 1, &chunk);
    require(chunk >= grain_of(cheapest % 3), "at least one grain");
    require(chunk % grain_of(cheapest % 3) == 0 || chunk == 131072, "a multiple of the grain");
    require(cheapest / 3 != NCCL_NVLS || chunk <= 131072, "NVLS chunks are not raised");
  }
}

// What the fuzzed communicator's calls have come to is within its cycle.
static void require_followed(void) {
  const context* c = fuzz_context();
  for (int i = 0; i < 2; i++) {
    const int32_t communicator = LOAD(c->communicator[i]);
    if (communicator < 0 || c->ahead[i].sequence != LOAD(tables[i].sequence)) continue;
    const uint32_t num_calls = LOAD(tables[i].roles[communicator].num_calls);
    require(c->ahead[i].place < (num_calls ? num_calls : 1), "a place of the cycle");
  }
}

static uint64_t num_accepted;

static void try_table(uint8_t* data, size_t size, bool is_mended) {
  if (is_mended && size >= sizeof(lagom_table_header)) {
    lagom_table_header h;
    memcpy(&h, data, sizeof(h));
    h.magic = LAGOM_TABLE_MAGIC;
    h.file_bytes = size;
    memcpy(data, &h, sizeof(h));
    h.checksum = table_checksum(data, size);
    memcpy(data, &h, sizeof(h));
  }
  fuzz_context();
  int error = lagom_install(data, size, 0);
  require(error >= 0 && error < NUM_TABLE_ERRORS, "a known error");
  num_accepted += error == TABLE_OK;
  decide_some(data, size);
  require_followed();
}

int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
  fuzz_context();
  if (size < 1) return 0;
  uint8_t* data = malloc(size);  // exactly as large: the sanitizer sees a byte too far
  memcpy(data, input + 1, size - 1);
  try_table(data, size - 1, input[0] & 1);
  free(data);
  return 0;
}

#ifndef LAGOM_LIBFUZZER
static uint64_t random_state;

static uint32_t below(uint32_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 33) % n;
}

static size_t make_sound(uint8_t* data, uint32_t num_communicators, uint32_t num_decisions) {
  lagom_table_header h = {.magic = LAGOM_TABLE_MAGIC, .version = LAGOM_TABLE_VERSION, .header_bytes = sizeof(h), .generation = 1 + below(9),
                          .communicator_bytes = sizeof(lagom_communicator), .decision_bytes = sizeof(lagom_decision),
                          .num_communicators = num_communicators, .num_decisions = num_decisions,
                          .call_bytes = sizeof(lagom_cycle_call)};
  uint8_t* p = data + sizeof(h);
  const uint8_t* rows = p + num_communicators * sizeof(lagom_communicator);
  for (uint32_t i = 0; i < num_communicators; i++, p += sizeof(lagom_communicator)) {
    lagom_communicator c = {.description = "fuzz", .num_ranks = 8, .num_nodes = below(2), .creation_order = i,
                            .lease_calls = below(2) ? 0 : below(20)};
    memcpy(p, &c, sizeof(c));
  }
  for (uint32_t i = 0; i < num_decisions; i++, p += sizeof(lagom_decision)) {
    const uint64_t first = (below(8) ? MIB : 4096) * (uint64_t)(1 + below(8));
    lagom_decision d = {.first_bytes = first, .last_bytes = first + (below(4) ? 0 : 5000), .communicator = num_communicators ? below(num_communicators) : 0,
                        .kind = below(5), .occurrence = below(2) ? LAGOM_ANY_OCCURRENCE : below(3),
                        .algorithm = (int)below(8) - 1, .protocol = (int)below(4) - 1, .num_channels = below(65),
                        .chunk_bytes = below(2) ? 0 : 1920 * (1 + below(500))};
    memcpy(p, &d, sizeof(d));
  }
  for (uint32_t c = 0; num_decisions && c < num_communicators; c++) {
    for (uint32_t i = below(8); i > 0; i--) {
      lagom_decision d;
      memcpy(&d, rows + below(num_decisions) * sizeof(d), sizeof(d));
      if (d.communicator != c || d.last_bytes < LAGOM_LEAST_BYTES) continue;
      const lagom_cycle_call call = {.num_bytes = below(2) ? d.first_bytes : d.last_bytes, .communicator = c, .kind = d.kind};
      memcpy(p, &call, sizeof(call));
      p += sizeof(call);
      h.num_calls++;
    }
  }
  size_t size = (size_t)(p - data);
  h.file_bytes = size;
  memcpy(data, &h, sizeof(h));
  h.checksum = table_checksum(data, size);
  memcpy(data, &h, sizeof(h));
  return size;
}

static size_t mutate(uint8_t* data, size_t size, size_t capacity) {
  static const uint32_t interesting[] = {0, 1, 2, 7, 15, 16, 63, 64, 65, 127, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  for (uint32_t n = below(4); n > 0; n--) {
    if (size < 8) break;
    switch (below(6)) {
      case 0: data[below((uint32_t)size)] ^= (uint8_t)(1u << below(8)); break;
      case 1: data[below((uint32_t)size)] = (uint8_t)below(256); break;
      case 2: memcpy(data + below((uint32_t)size / 4) * 4, &interesting[below(14)], 4); break;
      case 3: size -= below((uint32_t)(size < 100 ? size : 100)); break;
      case 4: {
        size_t more = below(100);
        if (size + more <= capacity) memset(data + size, (int)below(256), more), size += more;
        break;
      }
      default: memmove(data + below((uint32_t)(size - size / 16)), data, size / 16); break;
    }
  }
  return size;
}

int main(int argc, char** argv) {
  uint64_t executions = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
  random_state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  if (random_state == 0) random_state = 1;
  enum { CAPACITY = 1 << 13 };
  static uint8_t sound[CAPACITY + 64];
  crc_prepare();
  for (uint64_t i = 0; i < executions; i++) {
    size_t size = mutate(sound, make_sound(sound, below(4), below(10)), CAPACITY);
    uint8_t* exact = malloc(size ? size : 1);  // the sanitizer sees a byte too far
    memcpy(exact, sound, size);
    try_table(exact, size, below(2));
    free(exact);
  }
  printf("executions %llu, tables taken %llu\n", (unsigned long long)executions, (unsigned long long)num_accepted);
  return 0;
}
#endif
