// The entries of the profile ring. nccl_plugin/table_layout.py holds the same numbers; a test compares both.
// docs/formats_plugin.md says what each field means.
#ifndef LAGOM_PROFILE_H
#define LAGOM_PROFILE_H

#include "lagom_ring.h"

#define LAGOM_PROFILE_MAGIC 0x4652504D4F47414CULL  // "LAGOMPRF"

enum {
  LAGOM_PROFILE_VERSION = 3,
  LAGOM_PROFILE_MAX_CHANNELS = 64,
  LAGOM_PROFILE_POOL = 4096,  // collectives that are under way at once in one process
};

enum lagom_profile_event { LAGOM_PROFILE_COMMUNICATOR = 1, LAGOM_PROFILE_COLLECTIVE = 2, LAGOM_PROFILE_CHANNEL = 3 };

enum lagom_profile_flag {
  LAGOM_PROFILE_INCOMPLETE = 1,  // given up with channels missing: start and end are those of the channels seen
  LAGOM_PROFILE_CAPTURED = 2,    // launched by a CUDA graph (v5 on)
  LAGOM_PROFILE_SYMMETRIC = 4,   // by a symmetric-memory kernel, for which NCCL asks no tuner (v7 on)
  LAGOM_PROFILE_NETWORK_INCOMPLETE = 8,  // some of its transfers were not told to the end, or there was no room for them
};

// Host times are CLOCK_MONOTONIC, GPU times globaltimer; 0: not known.
typedef struct {
  uint64_t sequence;
  uint64_t comm_id;
  uint64_t call;         // NCCL's sequence number for this communicator and kind
  uint64_t num_bytes;    // the larger of send and receive buffer, as the tuner is told; 0: a type we do not know
  uint64_t called_ns;    // host, the API call (v5 on; of a captured call: its capture)
  uint64_t launched_ns;  // host, after the launch
  uint64_t start_ns;     // GPU, first channel to start
  uint64_t end_ns;       // GPU, last channel to end
  uint64_t seen_ns;      // host, when NCCL's proxy thread reported that end
  uint32_t event;        // enum lagom_profile_event
  uint32_t kind;         // enum nccl_kind
  uint32_t rank;
  uint32_t num_ranks;
  uint32_t num_nodes;
  int32_t algorithm;     // enum nccl_algorithm, -1: one we do not know
  int32_t protocol;
  uint32_t num_channels;  // as NCCL launched it; 0: NCCL does not say (CollNet)
  uint32_t num_started;   // channels seen
  uint32_t num_ended;
  uint32_t channel;      // of a channel entry
  uint32_t flags;        // enum lagom_profile_flag
  uint32_t abi_version;
  uint32_t launch;       // number of its kernel among this process's: calls of one group have one; 0: NCCL did not say
  uint64_t sent_bytes;  // over the network, as are the rest; by this process's proxy thread
  uint64_t received_bytes;
  uint64_t send_gpu_ns;  // host, sums over transfers: waiting for the GPU's data
  uint64_t send_peer_ns;  // ... for the receiver to be ready
  uint64_t send_network_ns;  // ... for the network to have it sent
  uint64_t receive_network_ns;  // ... for data, sender's delay and all
  uint64_t receive_flush_ns;  // ... for the data to be visible to the GPU
  uint64_t receive_gpu_ns;  // ... for the GPU to take it
  uint64_t network_busy_ns;  // longest time that one channel had a transfer to one peer in the network
  uint64_t network_start_ns;  // host, first transfer posted
  uint64_t network_end_ns;  // host, last transfer done
  uint32_t num_sends;
  uint32_t num_receipts;
} lagom_profile_entry;

_Static_assert(sizeof(lagom_profile_entry) == 224, "profile entry");
LAGOM_AT(lagom_profile_entry, sequence, 0);
LAGOM_AT(lagom_profile_entry, comm_id, 8);
LAGOM_AT(lagom_profile_entry, call, 16);
LAGOM_AT(lagom_profile_entry, num_bytes, 24);
LAGOM_AT(lagom_profile_entry, called_ns, 32);
LAGOM_AT(lagom_profile_entry, launched_ns, 40);
LAGOM_AT(lagom_profile_entry, start_ns, 48);
LAGOM_AT(lagom_profile_entry, end_ns, 56);
LAGOM_AT(lagom_profile_entry, seen_ns, 64);
LAGOM_AT(lagom_profile_entry, event, 72);
LAGOM_AT(lagom_profile_entry, kind, 76);
LAGOM_AT(lagom_profile_entry, rank, 80);
LAGOM_AT(lagom_profile_entry, num_ranks, 84);
LAGOM_AT(lagom_profile_entry, num_nodes, 88);
LAGOM_AT(lagom_profile_entry, algorithm, 92);
LAGOM_AT(lagom_profile_entry, protocol, 96);
LAGOM_AT(lagom_profile_entry, num_channels, 100);
LAGOM_AT(lagom_profile_entry, num_started, 104);
LAGOM_AT(lagom_profile_entry, num_ended, 108);
LAGOM_AT(lagom_profile_entry, channel, 112);
LAGOM_AT(lagom_profile_entry, flags, 116);
LAGOM_AT(lagom_profile_entry, abi_version, 120);
LAGOM_AT(lagom_profile_entry, launch, 124);
LAGOM_AT(lagom_profile_entry, sent_bytes, 128);
LAGOM_AT(lagom_profile_entry, received_bytes, 136);
LAGOM_AT(lagom_profile_entry, send_gpu_ns, 144);
LAGOM_AT(lagom_profile_entry, send_peer_ns, 152);
LAGOM_AT(lagom_profile_entry, send_network_ns, 160);
LAGOM_AT(lagom_profile_entry, receive_network_ns, 168);
LAGOM_AT(lagom_profile_entry, receive_flush_ns, 176);
LAGOM_AT(lagom_profile_entry, receive_gpu_ns, 184);
LAGOM_AT(lagom_profile_entry, network_busy_ns, 192);
LAGOM_AT(lagom_profile_entry, network_start_ns, 200);
LAGOM_AT(lagom_profile_entry, network_end_ns, 208);
LAGOM_AT(lagom_profile_entry, num_sends, 216);
LAGOM_AT(lagom_profile_entry, num_receipts, 220);

#endif
