// The wire between a process on emulated GPUs and its coordinator: fixed little-endian records on a unix stream socket.
// emulate/src/lagom_emulate/protocol.py holds the same layout; a test keeps both equal.
#ifndef LAGOM_EMULATED_GPU_PROTOCOL_H
#define LAGOM_EMULATED_GPU_PROTOCOL_H
#include <stdint.h>

#define PROTOCOL_VERSION 1u

enum protocol_type {
  PROTOCOL_HELLO = 1,
  PROTOCOL_DESCRIBE = 2,
  PROTOCOL_OP = 3,
  PROTOCOL_WAIT = 4,
  PROTOCOL_QUERY = 5,
  PROTOCOL_HOST = 6,
  PROTOCOL_COMPLETED = 16,
  PROTOCOL_REFUSED = 17,
};

enum protocol_host_state { PROTOCOL_HOST_RUNNING = 0, PROTOCOL_HOST_FINISHED = 1 };

typedef struct {
  uint32_t type, bytes_total;  // bytes_total counts this header and whatever follows the fixed part
} protocol_header;

typedef struct {
  protocol_header header;
  uint32_t version, device, pid, pad;
} protocol_hello;

typedef struct {
  protocol_header header;
  uint32_t desc_id, json_bytes;  // json_bytes of UTF-8 follow, without a closing zero
} protocol_describe;

typedef struct {
  protocol_header header;
  uint64_t op_id;
  uint32_t device, stream, desc_id;
  int32_t priority;
  uint64_t issue_ns, after_event_op, instance;
} protocol_op;

typedef struct {
  protocol_header header;
  uint64_t op_id, host_ns, thread;  // thread 0: our helper waits, the program's host does not
} protocol_wait;

typedef struct {
  protocol_header header;
  uint64_t op_id, host_ns;
  uint32_t advances, pad;
} protocol_query;

typedef struct {
  protocol_header header;
  uint64_t host_ns;
  uint32_t state, pad;
} protocol_host;

typedef struct {
  protocol_header header;
  uint64_t op_id;
  uint32_t is_done, num_ended;
  uint64_t now_ns;  // num_ended protocol_ended follow
} protocol_completed;

typedef struct {
  uint64_t op_id, start_ns, end_ns;
} protocol_ended;

typedef struct {
  protocol_header header;
  uint32_t text_bytes;  // text_bytes of UTF-8 follow
} protocol_refused;

_Static_assert(sizeof(protocol_hello) == 24, "HELLO");
_Static_assert(sizeof(protocol_describe) == 16, "DESCRIBE");
_Static_assert(sizeof(protocol_op) == 56, "OP");
_Static_assert(sizeof(protocol_wait) == 32, "WAIT");
_Static_assert(sizeof(protocol_query) == 32, "QUERY");
_Static_assert(sizeof(protocol_host) == 24, "HOST");
_Static_assert(sizeof(protocol_completed) == 32, "COMPLETED");
_Static_assert(sizeof(protocol_ended) == 24, "an ended operation");
_Static_assert(sizeof(protocol_refused) == 12, "REFUSED");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are written as they lie in memory");
#endif
