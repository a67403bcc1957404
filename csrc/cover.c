// A coverage-guided driver for LLVMFuzzerTestOneInput where there is gcc and no clang.
//
//   cc -g -O1 -fsanitize=address,undefined -fsanitize-coverage=trace-pc,trace-cmp -DLAGOM_LIBFUZZER -c fuzz_table.c
//   cc -g -O1 -fsanitize=address,undefined cover.c fuzz_table.o -o cover -ldl -lpthread
//   ./cover SECONDS [seed = 1] [file ...]     files: inputs to begin with
//
// An input that takes an edge a new number of times (in powers of two) is kept and mutated further, as AFL and libFuzzer
// do. Operands of comparisons that failed are written over the input, so that it comes past magic numbers. A crash leaves
// its input in `crash.bin`.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { EDGES = 1 << 16, MAX_INPUT = 1 << 13, MAX_CORPUS = 1 << 14, OPERANDS = 1 << 10, MUTANTS = 64 };

int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size);

static uint8_t edges[EDGES], seen[EDGES];
static uintptr_t previous;
static uint64_t operands[OPERANDS];
static uint32_t num_operands;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
  const uintptr_t here = (uintptr_t)__builtin_return_address(0);
  uint8_t* edge = &edges[(here ^ previous) % EDGES];
  if (*edge < 255) ++*edge;
  previous = here >> 1;
}

#define COMPARISON(name, type)                          \
  void name(type left, type right);                     \
  void name(type left, type right) {                    \
    if (left == right) return;                          \
    operands[num_operands++ % OPERANDS] = (uint64_t)left;  \
    operands[num_operands++ % OPERANDS] = (uint64_t)right; \
  }
COMPARISON(__sanitizer_cov_trace_cmp1, uint8_t)
COMPARISON(__sanitizer_cov_trace_cmp2, uint16_t)
COMPARISON(__sanitizer_cov_trace_cmp4, uint32_t)
COMPARISON(__sanitizer_cov_trace_cmp8, uint64_t)
COMPARISON(__sanitizer_cov_trace_const_cmp1, uint8_t)
COMPARISON(__sanitizer_cov_trace_const_cmp2, uint16_t)
COMPARISON(__sanitizer_cov_trace_const_cmp4, uint32_t)
COMPARISON(__sanitizer_cov_trace_const_cmp8, uint64_t)
void __sanitizer_cov_trace_cmpf(float left, float right);
void __sanitizer_cov_trace_cmpf(float left, float right) { (void)left, (void)right; }
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases);
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases) {
  (void)value;
  for (uint64_t i = 0; i < cases[0]; i++) operands[num_operands++ % OPERANDS] = cases[2 + i];
}

typedef struct {
  uint8_t* data;
  size_t size;
} input;

static input corpus[MAX_CORPUS];
static uint32_t num_corpus;
static uint8_t now[MAX_INPUT];
static size_t now_size;
static uint64_t state;

static uint32_t below(uint32_t n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return n ? (uint32_t)(state >> 33) % n : 0;
}

static void crashed(int number) {
  (void)number;
  int fd = open("crash.bin", O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd >= 0 && write(fd, now, now_size) >= 0) close(fd);
  signal(SIGABRT, SIG_DFL);
  abort();
}

// Runs the input; true if it took an edge a new number of times.
static int run(void) {
  memset(edges, 0, sizeof(edges));
  previous = 0;
  LLVMFuzzerTestOneInput(now, now_size);
  int is_new = 0;
  for (uint32_t i = 0; i < EDGES; i++) {
    if (!edges[i]) continue;
    uint8_t bucket = (uint8_t)(1u << (31 - __builtin_clz(edges[i])));
    if (seen[i] & bucket) continue;
    seen[i] |= bucket;
    is_new = 1;
  }
  return is_new;
}

static void keep(void) {
  input* slot = &corpus[num_corpus < MAX_CORPUS ? num_corpus++ : below(MAX_CORPUS)];
  free(slot->data);
  slot->data = malloc(now_size + 1);
  slot->size = now_size;
  memcpy(slot->data, now, now_size);
}

static void change(void) {
  static const uint8_t widths[] = {1, 2, 4, 8};
  for (uint32_t n = 1 + below(6); n > 0; n--) {
    const uint32_t at = below((uint32_t)now_size), width = widths[below(4)];
    const uint32_t aligned = at - at % (width ? width : 1);
    switch (below(8)) {
      case 0: if (now_size) now[at] ^= (uint8_t)(1u << below(8)); break;
      case 1: if (now_size) now[at] = (uint8_t)below(256); break;
      case 2: case 3:
        if (aligned + width <= now_size) {
          uint64_t value = operands[below(num_operands < OPERANDS ? num_operands : OPERANDS)] + below(3) - 1;
          memcpy(now + aligned, &value, width);
        }
        break;
      case 4: {
        const uint32_t more = 1 + below(96);
        if (now_size + more <= MAX_INPUT) {
          memmove(now + at + more, now + at, now_size - at);
          now_size += more;
        }
        break;
      }
      case 5: {
        const uint32_t less = 1 + below(96);
        if (at + less <= now_size) {
          memmove(now + at, now + at + less, now_size - at - less);
          now_size -= less;
        }
        break;
      }
      case 6: {
        const input* other = &corpus[below(num_corpus)];
        const uint32_t from = below((uint32_t)other->size), length = below((uint32_t)(other->size - from)) % 128;
        if (at + length <= now_size) memcpy(now + at, other->data + from, length);
        break;
      }
      default:
        if (aligned + width <= now_size) memset(now + aligned, below(2) ? 0 : 0xFF, width);
    }
  }
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const double seconds = strtod(argv[1], NULL);
  state = argc > 2 ? strtoull(argv[2], NULL, 10) | 1 : 1;
  signal(SIGABRT, crashed);
  signal(SIGSEGV, crashed);
  signal(SIGFPE, crashed);
  for (int i = 3; i < argc; i++) {
    FILE* file = fopen(argv[i], "rb");
    if (!file) return 2;
    now[0] = 1;  // a checksum that is made right
    now_size = 1 + fread(now + 1, 1, MAX_INPUT - 1, file);
    fclose(file);
    run();
    keep();
  }
  now_size = 64;
  memset(now, 0, now_size);
  run();
  keep();
  struct timespec began, at;
  clock_gettime(CLOCK_MONOTONIC, &began);
  uint64_t executions = 0;
  double elapsed = 0, told = 0;
  while (elapsed < seconds) {
    const input* base = &corpus[below(2) ? below(num_corpus) : num_corpus - 1 - below(num_corpus < 16 ? num_corpus : 16)];
    for (int n = 0; n < MUTANTS; n++, executions++) {
      now_size = base->size;
      memcpy(now, base->data, now_size);
      change();
      if (run()) {
        keep();
        break;
      }
    }
    clock_gettime(CLOCK_MONOTONIC, &at);
    elapsed = (double)(at.tv_sec - began.tv_sec) + (double)(at.tv_nsec - began.tv_nsec) / 1e9;
    if (elapsed - told >= 60 || elapsed >= seconds) {
      uint32_t num_edges = 0;
      for (uint32_t i = 0; i < EDGES; i++) num_edges += seen[i] != 0;
      printf("%.0f s: %llu executions, %u edges, %u inputs kept\n", elapsed, (unsigned long long)executions, num_edges, num_corpus);
      fflush(stdout);
      told = elapsed;
    }
  }
  return 0;
}
