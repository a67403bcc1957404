#include "nccl_members.h"

#include <stdio.h>
#include <stdlib.h>

bool members_are_symmetric(void) {
  const char* hosts = getenv("LAGOM_EMULATION_SYMMETRIC_HOSTS");
  return hosts && *hosts;
}

void members_all(members* m, int num_ranks, int rank) {
  *m = (members){.num_present = num_ranks, .own = rank};
  m->places = calloc((size_t)num_ranks, sizeof(*m->places));
  m->hosts = calloc((size_t)num_ranks, sizeof(*m->hosts));
  for (int r = 0; r < num_ranks; r++) m->places[r] = r;
}

void members_free(members* m) {
  free(m->places);
  free(m->hosts);
  m->places = m->hosts = NULL;
}

// The place of a rank of the job in the communicator, -1 if it is not there.
static int find(const emulated_group* group, int rank) {
  for (int r = 0; r < group->num_ranks; r++) {
    if (group->ranks[r] == rank) return r;
  }
  return -1;
}

static ncclResult_t fill(members* m, const emulated_group* group, char* text, size_t size) {
  const int started = group->num_started;
  int num_present = 0;
  for (int r = 0; r < group->num_ranks; r++) {
    m->hosts[r] = group->ranks[r] / started;
    if (r == group->own) m->own = num_present;
    if (group->ranks[r] < started) m->places[r] = num_present++;
  }
  m->num_present = num_present;
  for (int r = 0; r < group->num_ranks; r++) {
    if (group->ranks[r] < started) continue;
    const int stands_for = find(group, group->ranks[r] % started);
    if (stands_for < 0) {
      snprintf(text, size, "rank %d is not started, and rank %d, which stands for it, is not in its group", group->ranks[r],
               group->ranks[r] % started);
      return ncclInvalidUsage;
    }
    m->places[r] = m->places[stands_for];
  }
  return ncclSuccess;
}

ncclResult_t members_of_group(members* m, int num_ranks, int rank, const emulated_group* group, char* text, size_t size) {
  members_all(m, num_ranks, rank);
  // A send or a receive may have a communicator of its own (PyTorch's engine before 2.15).
  const bool is_pair = group->ranks && num_ranks == 2 && group->num_ranks != 2 && group->peer >= 0;
  ncclResult_t result = ncclSuccess;
  if (is_pair && group->peer >= group->num_started) {
    snprintf(text, size, "a send to or receive from rank %d, which is not started", group->peer);
    result = ncclInvalidUsage;
  } else if (!is_pair && (!group->ranks || group->num_started < 1 || group->num_ranks != num_ranks || group->own != rank)) {
    snprintf(text, size, "a communicator of %d ranks that are none of torch.distributed's groups", num_ranks);
    result = ncclInvalidUsage;
  } else if (!is_pair) {
    result = fill(m, group, text, size);
  }
  if (result) members_free(m);
  return result;
}

int members_count_hosts(const members* m, int num_ranks) {
  int hosts = 0;
  for (int r = 0; r < num_ranks; r++) {
    bool is_new = true;
    for (int q = 0; q < r && is_new; q++) is_new = m->hosts[q] != m->hosts[r];
    hosts += is_new;
  }
  return hosts;
}
