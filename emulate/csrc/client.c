#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "preset.h"
#include "protocol.h"

#define FLUSH_OPS 64
#define FLUSH_NS 2000000l
#define SEND_ROOM (64u << 10)
#define RECEIVE_ROOM (256u << 10)
#define MAX_JSON 4096u
// Times are kept for this many operations, newest first: an older one counts as ended long ago.
#define KEPT_TIMES (1u << 22)

typedef struct {
  uint64_t op_id, start_ns, end_ns;
} op_times;

typedef struct {
  char *json;
  uint32_t hash, desc_id;
  bool is_instant;  // events, marks and host functions take no time of their own
} description;

typedef struct {
  uint64_t end_ns;
} toy_stream;

// Two locks, so that a sender who waits for room does not keep a reader from emptying the socket.
static pthread_mutex_t send_lock = PTHREAD_MUTEX_INITIALIZER;   // socket writes, descriptions, op numbers, the host's clock
static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;  // times, replies
static pthread_cond_t replied = PTHREAD_COND_INITIALIZER;
static pthread_cond_t flush_wanted = PTHREAD_COND_INITIALIZER;

enum client_state { UNOPENED, STAND_ALONE, CONNECTED, REFUSED, FORKED, EXITING };
static _Atomic int state;
static int descriptor = -1;
static unsigned char send_buffer[SEND_ROOM];
static size_t send_bytes;
static unsigned buffered_ops;

static unsigned char *receive_buffer;
static size_t receive_from, receive_to;
static bool is_reading;

static op_times *times;  // ring, by op_id
static uint64_t last_op_id;
static _Atomic uint64_t host_ns;
static uint64_t launch_ns = 5000;

static description *descriptions;
static uint32_t num_descriptions, cap_descriptions;
static uint32_t *description_slots, num_slots;  // open addressing, 0 = empty, else index + 1

static toy_stream *toy_streams[CLIENT_MAX_DEVICES];
static uint32_t num_toy_streams[CLIENT_MAX_DEVICES];

static _Thread_local bool has_submitted;
static _Thread_local uint64_t polls_since_ns = UINT64_MAX;  // the host's clock when this thread began to do nothing but poll

static void refuse(const char *text) {
  if (state == EXITING) return;
  if (state != REFUSED) fprintf(stderr, "lagom emulate: %s\n", text);
  state = REFUSED;
}

static bool write_all(const void *bytes, size_t num_bytes) {
  const unsigned char *from = bytes;
  while (num_bytes) {
    ssize_t sent = send(descriptor, from, num_bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    from += sent, num_bytes -= (size_t)sent;
  }
  return true;
}

// The functions below until the next line of dashes need send_lock.
static void flush(void) {
  if (state == CONNECTED && send_bytes && !write_all(send_buffer, send_bytes)) refuse("the coordinator has gone");
  send_bytes = 0, buffered_ops = 0;
}

static void put(const void *bytes, size_t num_bytes) {
  if (send_bytes + num_bytes > SEND_ROOM) flush();
  memcpy(send_buffer + send_bytes, bytes, num_bytes);
  send_bytes += num_bytes;
}

static void *flush_in_time(void *unused) {
  (void)unused;
  pthread_mutex_lock(&send_lock);
  for (;;) {
    while (!send_bytes) pthread_cond_wait(&flush_wanted, &send_lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += FLUSH_NS;
    if (until.tv_nsec >= 1000000000l) until.tv_nsec -= 1000000000l, until.tv_sec++;
    while (send_bytes && pthread_cond_timedwait(&flush_wanted, &send_lock, &until) != ETIMEDOUT) {
    }
    flush();
  }
  return NULL;
}

static void after_fork(void) {
  // The child shares the parent's socket and must never write to it.
  if (descriptor >= 0) close(descriptor);
  descriptor = -1;
  if (state != UNOPENED) state = FORKED;
  pthread_mutex_init(&send_lock, NULL);
  pthread_mutex_init(&state_lock, NULL);
}

static void say_finished(void) {
  pthread_mutex_lock(&send_lock);
  if (state == CONNECTED) {
    protocol_host end = {{PROTOCOL_HOST, sizeof end}, host_ns, PROTOCOL_HOST_FINISHED, 0};
    put(&end, sizeof end);
    flush();
    shutdown(descriptor, SHUT_WR);
    pthread_mutex_lock(&state_lock);
    if (state == CONNECTED) state = EXITING;  // what libraries still ask while they are unloaded fails without a word
    pthread_cond_broadcast(&replied);
    pthread_mutex_unlock(&state_lock);
  }
  pthread_mutex_unlock(&send_lock);
}

static void finish_at_exit(void) { atexit(say_finished); }

void client_expect_exit(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, finish_at_exit);
}

static bool connect_to(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) return false;
  strcpy(address.sun_path, path);
  descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  return descriptor >= 0 && !connect(descriptor, (struct sockaddr *)&address, sizeof address);
}

static void open_client(uint32_t device) {
  if (state != UNOPENED) return;
  const char *path = getenv("LAGOM_EMULATION_SOCKET"), *cost = getenv("LAGOM_EMULATION_LAUNCH_NS");
  if (cost && *cost) launch_ns = strtoull(cost, NULL, 10);
  times = calloc(KEPT_TIMES, sizeof *times);  // pages come as they are touched
  receive_buffer = malloc(RECEIVE_ROOM);
  if (!times || !receive_buffer) {
    refuse("no memory for the times of operations");
    return;
  }
  pthread_atfork(NULL, NULL, after_fork);
  if (!path || !*path) {
    state = STAND_ALONE;
    return;
  }
  if (!connect_to(path)) {
    char text[256];
    snprintf(text, sizeof text, "cannot reach the coordinator at %s: %s", path, strerror(errno));
    refuse(text);
    return;
  }
  state = CONNECTED;
  protocol_hello hello = {{PROTOCOL_HELLO, sizeof hello}, PROTOCOL_VERSION, device, (uint32_t)getpid(), preset_get()->host_index};
  put(&hello, sizeof hello);
  pthread_t flusher;
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  if (pthread_create(&flusher, &detached, flush_in_time, NULL)) refuse("cannot start a thread");
  pthread_attr_destroy(&detached);
  client_expect_exit();
}

static uint32_t hash_of(const char *text) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 16777619u;
  return hash;
}

static bool grow_slots(void) {
  uint32_t wider = num_slots ? 2 * num_slots : 1024;
  uint32_t *slots = calloc(wider, sizeof *slots);
  if (!slots) return false;
  for (uint32_t i = 0; i < num_descriptions; i++) {
    uint32_t at = descriptions[i].hash & (wider - 1);
    while (slots[at]) at = (at + 1) & (wider - 1);
    slots[at] = i + 1;
  }
  free(description_slots);
  description_slots = slots, num_slots = wider;
  return true;
}

static uint32_t add_description(const char *json, uint32_t hash) {
  if (num_descriptions == cap_descriptions) {
    uint32_t wider = cap_descriptions ? 2 * cap_descriptions : 256;
    description *more = realloc(descriptions, wider * sizeof *more);
    if (!more) return 0;
    descriptions = more, cap_descriptions = wider;
  }
  char *copy = strdup(json);
  if (!copy) return 0;
  uint32_t desc_id = ++num_descriptions;
  bool is_instant = !strncmp(json, "{\"event\"", 8) || !strncmp(json, "{\"host_function\"", 16) ||
                    !strncmp(json, "{\"mark\"", 7);
  descriptions[desc_id - 1] = (description){copy, hash, desc_id, is_instant};
  uint32_t at = hash & (num_slots - 1);
  while (description_slots[at]) at = (at + 1) & (num_slots - 1);
  description_slots[at] = desc_id;
  return desc_id;
}

static uint32_t describe_locked(const char *json) {
  size_t json_bytes = strlen(json);
  if (json_bytes > MAX_JSON || (num_descriptions * 2 >= num_slots && !grow_slots())) return 0;
  uint32_t hash = hash_of(json);
  for (uint32_t at = hash & (num_slots - 1); description_slots[at]; at = (at + 1) & (num_slots - 1)) {
    const description *known = &descriptions[description_slots[at] - 1];
    if (known->hash == hash && !strcmp(known->json, json)) return known->desc_id;
  }
  uint32_t desc_id = add_description(json, hash);
  if (desc_id && state == CONNECTED) {
    uint32_t bytes_total = (uint32_t)(sizeof(protocol_describe) + json_bytes);
    protocol_describe record = {{PROTOCOL_DESCRIBE, bytes_total}, desc_id, (uint32_t)json_bytes};
    put(&record, sizeof record);
    put(json, json_bytes);
  }
  return desc_id;
}

static toy_stream *toy_stream_of(uint32_t device, uint32_t stream) {
  if (device >= CLIENT_MAX_DEVICES) return NULL;
  if (stream >= num_toy_streams[device]) {
    uint32_t wider = stream + 64;
    toy_stream *more = realloc(toy_streams[device], wider * sizeof *more);
    if (!more) return NULL;
    memset(more + num_toy_streams[device], 0, (wider - num_toy_streams[device]) * sizeof *more);
    toy_streams[device] = more, num_toy_streams[device] = wider;
  }
  return &toy_streams[device][stream];
}

static void keep_times(uint64_t op_id, uint64_t start_ns, uint64_t end_ns) {  // needs state_lock
  times[op_id % KEPT_TIMES] = (op_times){op_id, start_ns, end_ns};
}

static bool run_toy(uint64_t op_id, const client_op *op, uint64_t issue_ns) {
  toy_stream *stream = toy_stream_of(op->device, op->stream);
  if (!stream) return false;
  uint64_t start_ns = issue_ns > stream->end_ns ? issue_ns : stream->end_ns, after_start, after_end;
  if (op->after_op && client_times(op->after_op, &after_start, &after_end) && after_end > start_ns) start_ns = after_end;
  bool takes_time = op->desc_id && !descriptions[op->desc_id - 1].is_instant;
  stream->end_ns = start_ns + (takes_time ? CLIENT_TOY_NS : 0);
  pthread_mutex_lock(&state_lock);
  keep_times(op_id, start_ns, stream->end_ns);
  pthread_mutex_unlock(&state_lock);
  return true;
}
// ----------------------------------------------------------------------------------------------------------------------

uint32_t client_describe(const char *json) {
  pthread_mutex_lock(&send_lock);
  // The connection is opened by the first operation, which knows its device; what was described before then is sent with it.
  uint32_t desc_id = describe_locked(json);
  pthread_mutex_unlock(&send_lock);
  return desc_id;
}

static void open_with_descriptions(uint32_t device) {
  if (state != UNOPENED) return;
  open_client(device);
  for (uint32_t i = 0; i < num_descriptions && state == CONNECTED; i++) {
    size_t json_bytes = strlen(descriptions[i].json);
    uint32_t bytes_total = (uint32_t)(sizeof(protocol_describe) + json_bytes);
    protocol_describe record = {{PROTOCOL_DESCRIBE, bytes_total}, i + 1, (uint32_t)json_bytes};
    put(&record, sizeof record);
    put(descriptions[i].json, json_bytes);
  }
}

uint64_t client_submit(const client_op *op, uint64_t cost_ns) {
  uint64_t op_id = 0;
  pthread_mutex_lock(&send_lock);
  open_with_descriptions(op->device);
  uint64_t issue_ns = host_ns;
  if (state == CONNECTED) {
    op_id = ++last_op_id;
    protocol_op record = {{PROTOCOL_OP, sizeof record}, op_id,    op->device,   op->stream,  op->desc_id,
                          op->priority,                 issue_ns, op->after_op, op->instance};
    put(&record, sizeof record);
    if (++buffered_ops >= FLUSH_OPS)
      flush();
    else if (buffered_ops == 1)  // a new description may lie before it, of which nobody was told
      pthread_cond_signal(&flush_wanted);
  } else if (state == STAND_ALONE && run_toy(last_op_id + 1, op, issue_ns)) {
    op_id = ++last_op_id;
  }
  host_ns += cost_ns;
  has_submitted = true;
  polls_since_ns = UINT64_MAX;
  pthread_mutex_unlock(&send_lock);
  return op_id;
}

static bool has_ended(uint64_t op_id, uint64_t *end_ns) {  // needs state_lock
  const op_times *kept = times ? &times[op_id % KEPT_TIMES] : NULL;
  if (!kept || kept->op_id < op_id) return false;
  *end_ns = kept->op_id == op_id ? kept->end_ns : 0;
  return true;
}

// Waits until receive_buffer holds num_bytes unread bytes. Only the reading thread calls it, without a lock.
static bool receive(size_t num_bytes) {
  if (num_bytes > RECEIVE_ROOM) return false;
  if (receive_from + num_bytes > RECEIVE_ROOM) {
    memmove(receive_buffer, receive_buffer + receive_from, receive_to - receive_from);
    receive_to -= receive_from, receive_from = 0;
  }
  while (receive_to - receive_from < num_bytes) {
    ssize_t got = recv(descriptor, receive_buffer + receive_to, RECEIVE_ROOM - receive_to, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    receive_to += (size_t)got;
  }
  return true;
}

static bool read_ended(uint32_t num_ended) {
  for (uint32_t i = 0; i < num_ended; i++) {
    protocol_ended ended;
    if (!receive(sizeof ended)) return false;
    memcpy(&ended, receive_buffer + receive_from, sizeof ended);
    receive_from += sizeof ended;
    pthread_mutex_lock(&state_lock);
    keep_times(ended.op_id, ended.start_ns, ended.end_ns);
    pthread_mutex_unlock(&state_lock);
  }
  return true;
}

typedef struct reply_slot {  // a thread that waits for the reply to its own request
  uint64_t op_id, now_ns;
  bool is_query, has_reply, is_done;
  struct reply_slot *next;
} reply_slot;

static reply_slot *waiting;

static void hand_over(const protocol_completed *reply) {  // needs state_lock
  // A WAIT is answered once, when its operation has ended; a QUERY at once. Requests for one operation are answered in order.
  for (reply_slot *slot = waiting; slot; slot = slot->next)
    if (slot->op_id == reply->op_id && !slot->has_reply && (slot->is_query || reply->is_done)) {
      slot->has_reply = true, slot->is_done = reply->is_done, slot->now_ns = reply->now_ns;
      return;
    }
}

// Reads one reply. False when the connection is of no more use.
static bool read_reply(void) {
  protocol_header header;
  if (!receive(sizeof header)) return false;
  memcpy(&header, receive_buffer + receive_from, sizeof header);
  if (header.type == PROTOCOL_REFUSED) {
    char text[512];
    size_t bytes = header.bytes_total - sizeof(protocol_refused);
    if (header.bytes_total < sizeof(protocol_refused) || !receive(header.bytes_total)) return false;
    snprintf(text, sizeof text, "%.*s", (int)(bytes < 480 ? bytes : 480),
             (const char *)receive_buffer + receive_from + sizeof(protocol_refused));
    refuse(text);
    return false;
  }
  protocol_completed reply;
  if (header.type != PROTOCOL_COMPLETED || !receive(sizeof reply)) return false;
  memcpy(&reply, receive_buffer + receive_from, sizeof reply);
  receive_from += sizeof reply;
  if (header.bytes_total != sizeof reply + (uint64_t)reply.num_ended * sizeof(protocol_ended)) return false;
  if (!read_ended(reply.num_ended)) return false;
  pthread_mutex_lock(&state_lock);
  hand_over(&reply);
  pthread_mutex_unlock(&state_lock);
  return true;
}

static void await_reply(reply_slot *mine) {  // needs state_lock
  while (!mine->has_reply && state == CONNECTED) {
    if (is_reading) {
      pthread_cond_wait(&replied, &state_lock);
      continue;
    }
    is_reading = true;
    pthread_mutex_unlock(&state_lock);
    bool is_fine = read_reply();
    pthread_mutex_lock(&state_lock);
    is_reading = false;
    if (!is_fine) refuse("the coordinator has gone");
    pthread_cond_broadcast(&replied);
  }
}

static bool ask(const void *record, size_t num_bytes, reply_slot *mine) {
  pthread_mutex_lock(&send_lock);
  // Into the list before the record leaves, in the order of the records: replies are handed over in that order.
  pthread_mutex_lock(&state_lock);
  reply_slot **end = &waiting;
  while (*end) end = &(*end)->next;
  *end = mine;
  pthread_mutex_unlock(&state_lock);
  put(record, num_bytes);
  flush();
  pthread_mutex_unlock(&send_lock);
  pthread_mutex_lock(&state_lock);
  await_reply(mine);
  for (end = &waiting; *end != mine;) end = &(*end)->next;
  *end = mine->next;
  pthread_mutex_unlock(&state_lock);
  return mine->has_reply;
}

static void move_host_to(uint64_t ns) {
  pthread_mutex_lock(&send_lock);
  if (ns > host_ns) host_ns = ns;
  pthread_mutex_unlock(&send_lock);
}

static bool is_usable(void) { return state == CONNECTED || state == STAND_ALONE; }

static enum client_result wait_for(uint64_t op_id, uint64_t thread) {
  uint64_t end_ns = 0;
  if (!op_id) return CLIENT_DONE;
  pthread_mutex_lock(&state_lock);
  bool is_known = has_ended(op_id, &end_ns);
  pthread_mutex_unlock(&state_lock);
  if (!is_known) {
    if (state != CONNECTED) return CLIENT_FAILED;
    reply_slot mine = {.op_id = op_id};
    protocol_wait record = {{PROTOCOL_WAIT, sizeof record}, op_id, host_ns, thread};
    if (!ask(&record, sizeof record, &mine)) return CLIENT_FAILED;
    pthread_mutex_lock(&state_lock);
    if (!has_ended(op_id, &end_ns)) end_ns = 0;
    pthread_mutex_unlock(&state_lock);
    if (mine.now_ns > end_ns) end_ns = mine.now_ns;
  }
  if (thread) move_host_to(end_ns), polls_since_ns = UINT64_MAX;
  return is_usable() ? CLIENT_DONE : CLIENT_FAILED;
}

enum client_result client_wait(uint64_t op_id) { return wait_for(op_id, (uint64_t)syscall(SYS_gettid)); }

enum client_result client_wait_in_background(uint64_t op_id) { return wait_for(op_id, 0); }

// Of a query made at `now_ns`: the longer a thread has done nothing but ask, the more time each answer of "not yet" takes.
static enum client_result answered(bool is_done, uint64_t now_ns) {
  if (is_done) return CLIENT_DONE;
  if (polls_since_ns > now_ns) polls_since_ns = now_ns;
  if (has_submitted) client_advance((now_ns - polls_since_ns) / CLIENT_POLL_SHARE);
  return CLIENT_PENDING;
}

enum client_result client_query(uint64_t op_id) {
  if (!op_id) return CLIENT_DONE;
  uint64_t end_ns, now_ns = host_ns;
  pthread_mutex_lock(&state_lock);
  bool is_known = has_ended(op_id, &end_ns);
  pthread_mutex_unlock(&state_lock);
  if (has_submitted) client_advance(CLIENT_QUERY_COST_NS);
  // A thread that never submits (a watchdog) does not move the clock, so what it once saw ended must stay so.
  if (is_known && is_usable()) return answered(!has_submitted || end_ns <= now_ns, now_ns);
  // Threads of libraries go on while a process exits. On a GPU nothing has ended for them then; an error they would take for the
  // job's, as PyTorch's watchdogs do, and end it by a signal.
  if (state == EXITING) return is_known ? CLIENT_DONE : CLIENT_PENDING;
  if (state != CONNECTED) return CLIENT_FAILED;
  reply_slot mine = {.op_id = op_id, .is_query = true};
  protocol_query record = {{PROTOCOL_QUERY, sizeof record}, op_id, now_ns, has_submitted, 0};
  if (!ask(&record, sizeof record, &mine)) return state == EXITING ? CLIENT_PENDING : CLIENT_FAILED;
  if (has_submitted) move_host_to(mine.now_ns);
  return answered(mine.is_done, now_ns);
}

bool client_times(uint64_t op_id, uint64_t *start_ns, uint64_t *end_ns) {
  pthread_mutex_lock(&state_lock);
  const op_times *kept = times ? &times[op_id % KEPT_TIMES] : NULL;
  bool is_kept = kept && kept->op_id == op_id;
  if (is_kept) *start_ns = kept->start_ns, *end_ns = kept->end_ns;
  pthread_mutex_unlock(&state_lock);
  return is_kept;
}

uint64_t client_host_ns(void) { return host_ns; }

void client_advance(uint64_t cost_ns) {
  pthread_mutex_lock(&send_lock);
  host_ns += cost_ns;
  pthread_mutex_unlock(&send_lock);
}

uint64_t client_launch_ns(void) { return launch_ns; }

bool client_is_forked(void) { return state == FORKED; }
