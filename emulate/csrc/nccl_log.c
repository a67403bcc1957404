// NCCL's log: NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE as NCCL reads them.
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nccl_comm.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int level_shown;
static unsigned long subsystems_shown;
static FILE* output;

static unsigned long subsystem_of(const char* name) {
  static const char* const names[] = {"INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS"};
  if (!strcasecmp(name, "ALL")) return ~0ul;
  for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
    if (!strcasecmp(name, names[i])) return 1ul << i;
  }
  return 0;
}

static void read_environment(void) {
  static const char* const levels[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
  const char* level = getenv("NCCL_DEBUG");
  for (int i = 0; level && i < 6; i++) {
    if (!strcasecmp(level, levels[i])) level_shown = i;
  }
  output = stdout;
  subsystems_shown = subsystem_of("INIT") | subsystem_of("BOOTSTRAP") | subsystem_of("ENV");
  const char* listed = getenv("NCCL_DEBUG_SUBSYS");
  if (listed) {
    const bool is_negated = *listed == '^';
    char text[256];
    snprintf(text, sizeof(text), "%s", listed + is_negated);
    subsystems_shown = is_negated ? ~0ul : 0;
    char* rest = NULL;
    for (char* name = strtok_r(text, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
      if (is_negated) subsystems_shown &= ~subsystem_of(name);
      else subsystems_shown |= subsystem_of(name);
    }
  }
  const char* file = getenv("NCCL_DEBUG_FILE");
  if (!file || level_shown <= 1) return;
  char path[1024], host[128] = "";
  gethostname(host, sizeof(host) - 1);
  size_t used = 0;
  for (const char* c = file; *c && used + 130 < sizeof(path); c++) {
    if (*c != '%') path[used++] = *c;
    else if (*++c == 'h') used += (size_t)snprintf(path + used, sizeof(path) - used, "%s", host);
    else if (*c == 'p') used += (size_t)snprintf(path + used, sizeof(path) - used, "%d", getpid());
    else if (*c == '%') path[used++] = '%';
    else break;
  }
  path[used] = 0;
  FILE* opened = fopen(path, "w");
  if (opened) output = opened;
}

static void show(int level, int device, const char* text) {
  char host[128] = "";
  gethostname(host, sizeof(host) - 1);
  host[strcspn(host, ".")] = 0;
  fprintf(output, "%s:%d:%ld [%d] NCCL %s %s\n", host, getpid(), syscall(SYS_gettid), device, level == NCCL_WARN ? "WARN" : "INFO", text);
  fflush(output);
}

void log_line(int level, unsigned long subsystem, int device, const char* format, ...) {
  pthread_once(&once, read_environment);
  if (level > level_shown || (level == NCCL_INFO && !(subsystem & subsystems_shown))) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  show(level, device, text);
}

void log_tuner_line(int level, unsigned long subsystems, const char* text) {
  log_line(level == 2 ? NCCL_WARN : NCCL_INFO, subsystems, 0, "%s", text);
}
