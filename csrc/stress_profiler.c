// The profiler plug-in as NCCL drives it, from many threads: every collective must be written once, whole and right.
//
//   lagom_stress_profiler PLUGIN.so RING [collectives = 40000] [communicators = 3]
//
// A launching thread per communicator reports collectives; two proxy threads each report starts and ends of their
// channels, in turn and at once, and one of them of the network. Times are a function of (communicator, call, channel). Some ends never come. Exit 0 if the
// ring holds every collective once, with the times of its channels.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "lagom_profile.h"
#include "nccl/nccl_profiler_abi.h"

enum { MAX_COMMUNICATORS = 8, NUM_PROXIES = 2, QUEUE = 256, MISSING_EVERY = 97 };

typedef struct {
  void* handle;  // of the collective
  uint32_t call, channels;
  _Atomic uint32_t turn;  // 1 + call once filled, for the proxies
} work;

typedef struct {
  void* context;
  uint64_t id;
  work queue[QUEUE];
  _Atomic uint32_t num_done[NUM_PROXIES];
  pthread_t launcher, proxies[NUM_PROXIES];
} communicator;

static const nccl_profiler_v5* plugin;
static communicator comms[MAX_COMMUNICATORS];
static uint32_t num_calls, num_comms = 3;

static uint64_t base_of(uint64_t comm, uint32_t call) { return comm * 1000000000000ULL + (uint64_t)(call + 1) * 1000; }
static uint64_t start_of(uint64_t comm, uint32_t call, uint32_t channel) { return base_of(comm, call) + channel * 7 % 13; }
static uint64_t end_of(uint64_t comm, uint32_t call, uint32_t channel) {
  return base_of(comm, call) + 500 + channel * 5 % 11;
}
static uint32_t channels_of(uint32_t call) { return 1 + call % 12; }
static uint64_t bytes_of(uint32_t call, uint32_t channel) { return 1 + call % 7 + channel; }
static bool is_missing(uint32_t call, uint32_t channel) { return call % MISSING_EVERY == 5 && channel == 0; }

// No communicator runs ahead of another by more than a queue, so that none is given up for being slow.
static void wait_for_all(uint32_t call) {
  for (uint32_t i = 0; i < num_comms; i++) {
    for (int p = 0; p < NUM_PROXIES; p++) {
      while (call >= QUEUE + atomic_load(&comms[i].num_done[p])) sched_yield();
    }
  }
}

static void* launch(void* argument) {
  communicator* c = argument;
  for (uint32_t call = 0; call < num_calls; call++) {
    work* w = &c->queue[call % QUEUE];
    wait_for_all(call);
    void* call_handle = NULL;
    nccl_event event = {.type = NCCL_EVENT_COLLECTIVE_CALL};
    plugin->start_event(c->context, &call_handle, &event);
    plugin->stop_event(call_handle);
    event = (nccl_event){.type = NCCL_EVENT_COLLECTIVE, .parent = call_handle,
                         .collective = {.sequence = call, .kind = "AllReduce", .count = call + 1, .type = "ncclFloat32",
                                        .num_channels = (uint8_t)channels_of(call), .algorithm = "RING",
                                        .protocol = "LL128"}};
    plugin->start_event(c->context, &w->handle, &event);
    w->call = call;
    w->channels = channels_of(call);
    atomic_store_explicit(&w->turn, call + 1, memory_order_release);
    plugin->stop_event(w->handle);
  }
  return NULL;
}

typedef struct {
  communicator* comm;
  uint32_t number;
} proxy;

// Two transfers of a channel, taken up before its kernel ends; the operation ends after it.
static void* send(const communicator* c, const work* w, uint32_t channel) {
  void* op = NULL;
  nccl_event event = {.type = NCCL_EVENT_PROXY_OPERATION, .parent = w->handle,
                      .proxy_operation = {.pid = (int)getpid(), .channel = (uint8_t)channel, .is_send = 1}};
  plugin->start_event(c->context, &op, &event);
  if (!op) return NULL;
  nccl_event_state_arguments arguments = {.num_bytes = bytes_of(w->call, channel)};
  plugin->record_event_state(op, NCCL_STATE_PROXY_OPERATION_IN_PROGRESS, &arguments);
  for (int i = 0; i < 2; i++) {
    void* step = NULL;
    event = (nccl_event){.type = NCCL_EVENT_PROXY_STEP, .parent = op, .proxy_step = {.step = i}};
    plugin->start_event(c->context, &step, &event);
    if (step) plugin->record_event_state(step, NCCL_STATE_SEND_WAIT, &arguments);
    if (step) plugin->stop_event(step);
  }
  return op;
}

static void* progress(void* argument) {
  const proxy* p = argument;
  communicator* c = p->comm;
  for (uint32_t call = 0; call < num_calls; call++) {
    work* w = &c->queue[call % QUEUE];
    while (atomic_load_explicit(&w->turn, memory_order_acquire) != call + 1) sched_yield();
    void *handles[LAGOM_PROFILE_MAX_CHANNELS] = {NULL}, *ops[LAGOM_PROFILE_MAX_CHANNELS] = {NULL};
    for (uint32_t channel = 0; p->number == 0 && channel < w->channels; channel++) ops[channel] = send(c, w, channel);
    for (uint32_t channel = p->number; channel < w->channels; channel += NUM_PROXIES) {
      nccl_event event = {.type = NCCL_EVENT_CHANNEL, .parent = w->handle,
                          .channel = {.channel = (uint8_t)channel, .timer_ns = start_of(c->id, call, channel)}};
      plugin->start_event(c->context, &handles[channel], &event);
    }
    for (uint32_t channel = p->number; channel < w->channels; channel += NUM_PROXIES) {
      if (!handles[channel] || is_missing(call, channel)) continue;
      nccl_event_state_arguments arguments = {.timer_ns = end_of(c->id, call, channel)};
      plugin->record_event_state(handles[channel], NCCL_STATE_CHANNEL_STOP, &arguments);
      plugin->stop_event(handles[channel]);
    }
    for (uint32_t channel = 0; channel < w->channels; channel++) {
      if (ops[channel]) plugin->stop_event(ops[channel]);
    }
    atomic_store(&c->num_done[p->number], call + 1);
  }
  return NULL;
}

static bool is_right(const lagom_profile_entry* e) {
  const uint32_t call = (uint32_t)e->call, channels = channels_of(call);
  uint64_t first = UINT64_MAX, last = 0;
  uint64_t sent = 0;
  uint32_t ended = 0;
  for (uint32_t channel = 0; channel < channels; channel++) {
    if (start_of(e->comm_id, call, channel) < first) first = start_of(e->comm_id, call, channel);
    sent += 2 * bytes_of(call, channel);
    if (is_missing(call, channel)) continue;
    if (end_of(e->comm_id, call, channel) > last) last = end_of(e->comm_id, call, channel);
    ended++;
  }
  return e->num_channels == channels && e->num_started == channels && e->num_ended == ended && e->start_ns == first &&
         e->end_ns == last && e->num_bytes == 4 * (uint64_t)(call + 1) &&
         e->sent_bytes == sent && e->num_sends == 2 * channels && !(e->flags & LAGOM_PROFILE_NETWORK_INCOMPLETE) &&
         (e->flags & LAGOM_PROFILE_INCOMPLETE) == (ended < channels ? LAGOM_PROFILE_INCOMPLETE : 0) &&
         e->called_ns && e->called_ns <= e->launched_ns && (ended == 0 || e->launched_ns <= e->seen_ns);
}

static int check(const char* path) {
  int fd = open(path, O_RDONLY);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) return 2;
  const lagom_ring_header* header = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
  const lagom_profile_entry* entries = (const lagom_profile_entry*)(header + 1);
  uint8_t* seen = calloc(num_comms + 1, num_calls);
  uint64_t num = 0, wrong = 0, twice = 0;
  for (uint64_t i = 0; i < header->num_written && i < header->num_entries; i++) {
    const lagom_profile_entry* e = &entries[i];
    if (e->sequence != i + 1) wrong++;
    if (e->event != LAGOM_PROFILE_COLLECTIVE) continue;
    num++;
    if (e->comm_id < 1 || e->comm_id > num_comms || e->call >= num_calls || !is_right(e)) wrong++;
    else if (seen[e->comm_id * num_calls + e->call]++) twice++;
  }
  const uint64_t expected = (uint64_t)num_comms * num_calls;
  printf("collectives %llu of %llu, dropped %llu, wrong %llu, twice %llu, late %llu\n", (unsigned long long)num,
         (unsigned long long)expected, (unsigned long long)header->num_dropped, (unsigned long long)wrong,
         (unsigned long long)twice, (unsigned long long)header->num_late);
  free(seen);
  return num != expected || wrong || twice || header->num_late || header->num_dropped;
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  num_calls = (argc > 3 ? (uint32_t)atoi(argv[3]) : 40000) / (argc > 4 ? (uint32_t)atoi(argv[4]) : num_comms);
  if (argc > 4) num_comms = (uint32_t)atoi(argv[4]);
  if (num_comms > MAX_COMMUNICATORS) return 2;
  char length[24];
  snprintf(length, sizeof(length), "%u", num_comms * (num_calls + 1));
  setenv("LAGOM_PROFILE", argv[2], 1);
  setenv("LAGOM_PROFILE_NETWORK", "1", 1);
  setenv("LAGOM_PROFILE_ENTRIES", length, 1);
  void* library = dlopen(argv[1], RTLD_NOW);
  plugin = library ? dlsym(library, "ncclProfiler_v6") : NULL;
  if (!plugin) return 2;
  proxy proxies[MAX_COMMUNICATORS][NUM_PROXIES];
  int mask = 0;
  for (uint32_t i = 0; i < num_comms; i++) {
    communicator* c = &comms[i];
    c->id = i + 1;
    plugin->init(&c->context, c->id, &mask, NULL, 1, 2, 0, NULL);
    if (!(mask & NCCL_EVENT_CHANNEL)) return 2;
  }
  for (uint32_t i = 0; i < num_comms; i++) {
    communicator* c = &comms[i];
    pthread_create(&c->launcher, NULL, launch, c);
    for (uint32_t p = 0; p < NUM_PROXIES; p++) {
      proxies[i][p] = (proxy){c, p};
      pthread_create(&c->proxies[p], NULL, progress, &proxies[i][p]);
    }
  }
  for (uint32_t i = 0; i < num_comms; i++) {
    pthread_join(comms[i].launcher, NULL);
    for (uint32_t p = 0; p < NUM_PROXIES; p++) pthread_join(comms[i].proxies[p], NULL);
    plugin->finalize(comms[i].context);
  }
  return check(argv[2]);
}
