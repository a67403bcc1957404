// Which ranks of a communicator are processes. Under `lagom emulate --symmetric` only those of the first host are; every other is
// absent and does what the process in the same place on the first host does, whose parts of an exchange stand for its own.
#ifndef LAGOM_NCCL_MEMBERS_H
#define LAGOM_NCCL_MEMBERS_H
#include <stdbool.h>

#include "device.h"
#include "nccl_api.h"

typedef struct {
  int num_present;  // processes
  int own;          // this rank's place among them
  int* places;      // of each rank, or of the one that stands for it, among those present
  int* hosts;       // of each rank
} members;

bool members_are_symmetric(void);  // whether ranks of this job may be absent

// All ranks are processes; their hosts are still to be filled in.
void members_all(members* m, int num_ranks, int rank);

// As `group` has them. On failure `text` says why.
ncclResult_t members_of_group(members* m, int num_ranks, int rank, const emulated_group* group, char* text, size_t size);
void members_free(members* m);

int members_count_hosts(const members* m, int num_ranks);
#endif
