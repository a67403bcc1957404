// Every value that a profiler plug-in writes into NCCL's event mask while it starts and ends communicators, in order.
//
//   watched_mask PLUGIN.so
//
// NCCL's threads read the mask at any time. It lies on a page that cannot be written: a write faults, is let through for
// one instruction, and what it left is printed. x86-64 only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "nccl/nccl_profiler_abi.h"

enum { MOST = 64, PAGE = 4096, SINGLE_STEP = 0x100 };

static int* mask;
static int seen[MOST], num_seen;

static void on_write(int number, siginfo_t* info, void* context) {
  (void)number;
  if ((char*)info->si_addr < (char*)mask || (char*)info->si_addr >= (char*)mask + PAGE) signal(SIGSEGV, SIG_DFL);
  mprotect(mask, PAGE, PROT_READ | PROT_WRITE);
  ((ucontext_t*)context)->uc_mcontext.gregs[REG_EFL] |= SINGLE_STEP;
}

static void on_written(int number, siginfo_t* info, void* context) {
  (void)number, (void)info;
  if (num_seen < MOST) seen[num_seen++] = *mask;
  mprotect(mask, PAGE, PROT_READ);
  ((ucontext_t*)context)->uc_mcontext.gregs[REG_EFL] &= ~SINGLE_STEP;
}

int main(int argc, char** argv) {
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  const nccl_profiler_v5* plugin = library ? dlsym(library, "ncclProfiler_v6") : NULL;
  int (*enable)(int) = library ? (int (*)(int))dlsym(library, "lagom_profile_enable") : NULL;
  mask = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!plugin || !enable || mask == MAP_FAILED) return 2;
  struct sigaction write_action = {.sa_sigaction = on_write, .sa_flags = SA_SIGINFO};
  struct sigaction step_action = {.sa_sigaction = on_written, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &write_action, NULL);
  sigaction(SIGTRAP, &step_action, NULL);
  void *first, *second;
  plugin->init(&first, 1, mask, NULL, 1, 2, 0, NULL);
  plugin->init(&second, 2, mask, NULL, 1, 2, 0, NULL);  // while the first is at work
  enable(0);
  enable(1);
  plugin->finalize(second);
  plugin->finalize(first);
  for (int i = 0; i < num_seen; i++) printf("%d\n", seen[i]);
  return 0;
}
