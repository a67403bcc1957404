// NCCL's model of the cluster, as lagom_emulate/nccl_tables.py wrote it: LAGOM_EMULATION_NCCL.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/nccl_tuner_abi.h"
#include "nccl_comm.h"

typedef struct {
  char magic[8];
  uint32_t version, release, num_shapes, shape_bytes;
  nccl_constants_v7 constants;
} model_header;
_Static_assert(sizeof(model_header) == 24 + 8 * 159, "the layout that tables.py writes");

static pthread_once_t once = PTHREAD_ONCE_INIT;
static model_header header;
static nccl_shape* shapes;
static fake_host* host;
static int release_code;

static int release_of(const char* text) {
  int major = 0, minor = 0, patch = 0;
  if (sscanf(text, "%d.%d.%d", &major, &minor, &patch) >= 2) return major * 10000 + minor * 100 + patch;
  return atoi(text);
}

static void read_model(const char* path) {
  FILE* file = fopen(path, "rb");
  bool is_whole = file && fread(&header, sizeof(header), 1, file) == 1 && !memcmp(header.magic, "LAGOMNCC", 8) &&
                  header.version == 1 && header.shape_bytes == sizeof(nccl_shape) && header.num_shapes < 65536;
  if (is_whole) {
    shapes = calloc(header.num_shapes + 1, sizeof(*shapes));
    is_whole = shapes && fread(shapes, sizeof(*shapes), header.num_shapes, file) == header.num_shapes;
  }
  if (file) fclose(file);
  if (is_whole) return;
  fprintf(stderr, "lagom emulate: LAGOM_EMULATION_NCCL=%s is not a file of this version's model of NCCL\n", path);
  header.num_shapes = header.release = 0;
}

static void open_host(void) {
  const char* path = getenv("LAGOM_EMULATION_NCCL");
  const char* wanted = getenv("LAGOM_NCCL_VERSION");
  if (path && *path) read_model(path);
  release_code = wanted && *wanted ? release_of(wanted) : header.release ? (int)header.release : 23007;
  fake_set_log(log_tuner_line);
  host = fake_open(release_code);
}

int model_release(void) {
  pthread_once(&once, open_host);
  return release_code;
}

// Ranks that do not spread evenly are taken as if they did.
fake_comm* model_decider(int num_ranks, int num_nodes, uint64_t comm_id, channel_limits limits, const bool denied[5][7][3]) {
  pthread_once(&once, open_host);
  const uint32_t nodes = (uint32_t)num_nodes, filled = ((uint32_t)num_ranks + nodes - 1) / nodes * nodes;
  for (uint32_t i = 0; i < header.num_shapes; i++) {
    if (shapes[i].num_nodes == nodes && shapes[i].num_ranks == filled) {
      nccl_shape shape = shapes[i];
      settings_bound(limits, &shape.num_channels, &shape.nvls_channels);
      return fake_deny(fake_comm_init_shape(host, comm_id, &shape, &header.constants), denied);
    }
  }
  uint32_t num_channels = num_nodes > 1 ? 16 : 24, no_nvls = 0;
  settings_bound(limits, &num_channels, &no_nvls);
  const fake_comm_spec spec = {.comm_id = comm_id,
                               .num_ranks = (uint64_t)filled,
                               .num_nodes = (uint64_t)nodes,
                               .num_channels = (int32_t)num_channels,
                               .has_ll128 = 1};
  return fake_deny(fake_comm_init(host, &spec), denied);
}
