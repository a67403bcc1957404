// What a job asks of NCCL's choice: NCCL_ALGO and NCCL_PROTO, and limits of channels by environment and configuration.
// Read from NCCL 2.21 to 2.30 (graph/tuning.cc: parseList; misc/param.cc: ncclLoadParam; graph/connect.cc:
// ncclMinNchannels, ncclMaxNchannels, ncclTopoPostset; init.cc: envConfigOverride, parseCommConfig; transport/nvls.cc).
// Malformed values count for what they count there, too: NCCL_MAX_NCHANNELS=abc is 0 and so one channel.
#define _POSIX_C_SOURCE 200809L  // strtok_r, strcasecmp, strdup

#include <errno.h>
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

// "ring,tree", or all but those of "^ring,tree", for one kind of collective. Before 2.24 nobody minds an unknown name.
static bool allow(char* list, int release, const char* const* names, int count, bool* allowed) {
  const bool is_without = *list == '^';
  char* rest = NULL;
  for (int i = 0; i < count; i++) allowed[i] = is_without;
  for (char* word = strtok_r(list + is_without, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    const int at = place(word, names, count);
    if (at >= 0) allowed[at] = !is_without;
    else if (release >= 22400) return false;
  }
  return true;
}

// "LIST" or "kind:LIST", of which NCCL reads no further than a second colon. `text` is taken apart.
static bool read_entry(char* text, bool is_first, int release, const char* const* names, int count, bool* allowed) {
  char* rest = NULL;
  char* name = strtok_r(text, ":", &rest);
  char* listed = strtok_r(NULL, ":", &rest);
  const int kind = listed ? place(name, kind_names, KINDS) : -1;
  if (listed ? kind < 0 : !is_first || !name) return false;
  for (int k = listed ? kind : 0; k < (listed ? kind + 1 : KINDS); k++) {
    char* list = strdup(listed ? listed : name);
    const bool is_read = list && allow(list, release, names, count, &allowed[k * count]);
    free(list);
    if (!is_read) return false;
  }
  return true;
}

// "ENTRY;ENTRY;...", each but the first with its kind; before 2.24 one list for all kinds. `allowed` has `count` entries
// for each kind.
static bool read_lists(const char* text, int release, const char* const* names, int count, bool* allowed) {
  char *copy = strdup(text), *rest = NULL;
  bool is_read = copy != NULL;
  if (release < 22400) {
    if (copy) allow(copy, release, names, count, allowed);
    for (int k = 1; k < KINDS; k++) memcpy(&allowed[k * count], allowed, (size_t)count);
    free(copy);
    return is_read;
  }
  for (char* entry = copy ? strtok_r(copy, ";", &rest) : NULL; entry && is_read; entry = strtok_r(NULL, ";", &rest)) {
    is_read = read_entry(entry, entry == copy, release, names, count, allowed);
  }
  free(copy);
  return is_read;
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
  if (!text || !*text) return otherwise;
  errno = 0;
  const long long value = strtoll(text, NULL, 0);
  return errno ? otherwise : (int)value;
}

// The name of old, then today's; -2 counts as not set.
static int channels_of(const char* old_name, const char* name, int otherwise) {
  const int old = number_of(old_name, -2), value = number_of(name, -2);
  return value != -2 ? value : old != -2 ? old : otherwise;
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
  const int most = between(channels_of("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS", MAX_CHANNELS), 1, MAX_CHANNELS);
  const int least = between(channels_of("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS", 0), 0, MAX_CHANNELS);
  int bound = between((int)*channels, 1, limits.most < most ? limits.most : most);
  if (bound < least) bound = least;
  if (bound < limits.least) bound = limits.least;
  *channels = (uint32_t)bound;
  if (*nvls_channels) *nvls_channels = (uint32_t)(limits.nvls > 0 ? limits.nvls : between((int)*nvls_channels, limits.least, limits.most));
}
