// What a job asks of NCCL's choice: NCCL_ALGO and NCCL_PROTO, and limits of channels by environment and configuration.
// Read from NCCL 2.21 to 2.29 (graph/tuning.cc: parseList; graph/connect.cc: ncclTopoPostset; transport/nvls.cc).
#define _POSIX_C_SOURCE 200809L  // strtok_r, strcasecmp

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nccl_comm.h"

enum { KINDS = 5, ALGORITHMS = 7, PROTOCOLS = 3, MAX_CHANNELS = 64 };

static const char* const kind_names[KINDS] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
static const char* const algorithm_names[ALGORITHMS] = {"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"};
static const char* const protocol_names[PROTOCOLS] = {"LL", "LL128", "Simple"};

static int place(const char* name, const char* const* names, int count) {
  for (int i = 0; i < count; i++) {
    if (!strcasecmp(name, names[i])) return i;
  }
  return -1;
}

// "ring,tree", or all but those of "^ring,tree", for one kind of collective.
static bool allow(char* list, const char* const* names, int count, bool* allowed) {
  const bool is_without = *list == '^';
  char* rest = NULL;
  for (int i = 0; i < count; i++) allowed[i] = is_without;
  for (char* word = strtok_r(list + is_without, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    const int at = place(word, names, count);
    if (at < 0) return false;
    allowed[at] = !is_without;
  }
  return true;
}

// "LIST;kind:LIST;...", kinds from 2.24 on. `allowed` has `count` entries for each kind.
static bool read_lists(const char* text, int release, const char* const* names, int count, bool* allowed) {
  char copy[1024], list[1024];
  if ((size_t)snprintf(copy, sizeof(copy), "%s", text) >= sizeof(copy)) return false;
  char* rest = NULL;
  bool is_first = true;
  for (char* entry = strtok_r(copy, ";", &rest); entry; entry = strtok_r(NULL, ";", &rest), is_first = false) {
    char* colon = strchr(entry, ':');
    if ((colon && release < 22400) || (!colon && !is_first)) return false;
    if (colon) *colon = 0;
    const int kind = colon ? place(entry, kind_names, KINDS) : -1;
    if (colon && kind < 0) return false;
    for (int k = colon ? kind : 0; k < (colon ? kind + 1 : KINDS); k++) {
      snprintf(list, sizeof(list), "%s", colon ? colon + 1 : entry);
      if (!allow(list, names, count, &allowed[k * count])) return false;
    }
  }
  return true;
}

const char* settings_deny(int release, bool denied[5][7][3]) {
  bool algorithms[KINDS * ALGORITHMS], protocols[KINDS * PROTOCOLS];
  memset(algorithms, true, sizeof(algorithms));
  memset(protocols, true, sizeof(protocols));
  const char *algorithm = getenv("NCCL_ALGO"), *protocol = getenv("NCCL_PROTO");
  if (algorithm && !read_lists(algorithm, release, algorithm_names, ALGORITHMS, algorithms)) return "NCCL_ALGO";
  if (protocol && !read_lists(protocol, release, protocol_names, PROTOCOLS, protocols)) return "NCCL_PROTO";
  for (int k = 0; k < KINDS; k++) {
    for (int a = 0; a < ALGORITHMS; a++) {
      for (int p = 0; p < PROTOCOLS; p++) denied[k][a][p] = !algorithms[k * ALGORITHMS + a] || !protocols[k * PROTOCOLS + p];
    }
  }
  return NULL;
}

static int number_of(const char* name, int otherwise) {
  const char* text = getenv(name);
  char* end = NULL;
  const long value = text ? strtol(text, &end, 0) : 0;
  return text && end != text && value >= INT32_MIN && value <= INT32_MAX ? (int)value : otherwise;
}

static int between(int value, int least, int most) { return value < least ? least : value > most ? most : value; }

channel_limits settings_limits(channel_limits asked) {
  const int least = number_of("NCCL_MIN_CTAS", 0), most = number_of("NCCL_MAX_CTAS", 0);
  if (least > 0) asked.least = least;
  if (most > 0) asked.most = most;
  asked.most = asked.most > 0 ? between(asked.most, 1, MAX_CHANNELS) : MAX_CHANNELS;
  asked.least = between(asked.least, 1, asked.most);
  return asked;
}

void settings_bound(channel_limits limits, uint32_t* channels, uint32_t* nvls_channels) {
  const int most = between(number_of("NCCL_MAX_NCHANNELS", MAX_CHANNELS), 1, MAX_CHANNELS);
  const int least = between(number_of("NCCL_MIN_NCHANNELS", 0), 0, MAX_CHANNELS);
  int bound = between((int)*channels, 1, limits.most < most ? limits.most : most);
  if (bound < least) bound = least;
  if (bound < limits.least) bound = limits.least;
  *channels = (uint32_t)bound;
  if (*nvls_channels) *nvls_channels = (uint32_t)between((int)*nvls_channels, limits.least, limits.most);
}
