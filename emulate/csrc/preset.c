#define _GNU_SOURCE
#include "preset.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef REAL_DRIVER_PATHS  // a test compiles this file with others
#define REAL_DRIVER_PATHS "/dev/nvidia0", "/proc/driver/nvidia/version"
#endif

static gpu_preset preset = {
    // NVIDIA H100 SXM5 80 GB: datasheet and whitepaper, 2022; memory as torch's total_memory shows it
    .name = "NVIDIA H100 80GB HBM3",
    .num_sms = 132,
    .num_devices = 8,
    .capability_major = 9,
    .memory_bytes = 85017493504,
    .l2_bytes = 50ull << 20,
    .clock_hz = 1980000000,
    .link = PRESET_NVSWITCH,
    .num_nvlinks = 18,
    .pcie_generation = 5,
    .pcie_width = 16,
};
static uint32_t visible[PRESET_MAX_DEVICES], num_visible;
static const char *refusal;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// The text after `"key":` in a flat JSON object that Python wrote.
static const char *value_of(const char *json, const char *key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\"", key);
  for (const char *at = strstr(json, quoted); at; at = strstr(at + 1, quoted)) {
    const char *after = at + strlen(quoted);
    while (isspace((unsigned char)*after)) after++;
    if (*after != ':') continue;
    for (after++; isspace((unsigned char)*after);) after++;
    return after;
  }
  return NULL;
}

static void read_number(const char *json, const char *key, uint64_t *into) {
  const char *text = value_of(json, key);
  if (text && isdigit((unsigned char)*text)) *into = (uint64_t)strtod(text, NULL);
}

static void read_small(const char *json, const char *key, uint32_t *into) {
  uint64_t wide = *into;
  read_number(json, key, &wide);
  *into = (uint32_t)wide;
}

static bool read_text(const char *json, const char *key, char *into, size_t room) {
  const char *text = value_of(json, key);
  if (!text || *text != '"') return false;
  size_t length = strcspn(++text, "\"");
  if (length >= room) return false;
  memcpy(into, text, length);
  into[length] = 0;
  return true;
}

static void read_preset(const char *json) {
  char text[32];
  read_text(json, "name", preset.name, sizeof preset.name);
  read_small(json, "num_sms", &preset.num_sms);
  read_small(json, "num_devices", &preset.num_devices);
  read_small(json, "host_index", &preset.host_index);
  read_number(json, "memory_bytes", &preset.memory_bytes);
  read_number(json, "l2_bytes", &preset.l2_bytes);
  read_number(json, "clock_hz", &preset.clock_hz);
  read_small(json, "num_nvlinks", &preset.num_nvlinks);
  read_small(json, "pcie_generation", &preset.pcie_generation);
  read_small(json, "pcie_width", &preset.pcie_width);
  if (read_text(json, "compute_capability", text, sizeof text) &&
      sscanf(text, "%u.%u", &preset.capability_major, &preset.capability_minor) != 2)
    refusal = "compute_capability of the GPU description is not like 9.0";
  if (read_text(json, "link", text, sizeof text)) {
    static const char *const words[] = {"pcie", "nvlink_pairs", "nvlink_mesh", "nvswitch"};
    uint32_t i = 0;
    while (i < 4 && strcmp(words[i], text)) i++;
    if (i == 4) refusal = "link of the GPU description is none of pcie, nvlink_pairs, nvlink_mesh, nvswitch";
    preset.link = (enum preset_link)i;
  }
  if (preset.num_devices < 1 || preset.num_devices > PRESET_MAX_DEVICES)
    refusal = "num_devices of the GPU description is not between 1 and 16";
}

static void read_file(const char *path) {
  char json[8192];
  FILE *file = fopen(path, "re");
  if (!file) {
    refusal = "cannot read the GPU description named by LAGOM_EMULATION_GPU";
    return;
  }
  json[fread(json, 1, sizeof json - 1, file)] = 0;
  fclose(file);
  read_preset(json);
}

static void read_visible(void) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (num_visible = 0; num_visible < preset.num_devices; num_visible++) visible[num_visible] = num_visible;
    return;
  }
  // As CUDA does: the list ends at the first entry that is no device.
  while (*text && num_visible < preset.num_devices) {
    char *end;
    long device = strtol(text, &end, 10);
    if (end == text || device < 0 || device >= (long)preset.num_devices) break;
    visible[num_visible++] = (uint32_t)device;
    text = *end == ',' ? end + 1 : end;
  }
}

static void load(void) {
  static const char *const real[] = {REAL_DRIVER_PATHS};
  for (size_t i = 0; i < sizeof real / sizeof *real; i++)
    if (!access(real[i], F_OK)) refusal = "this machine has a real NVIDIA driver; the emulated device is refused here";
  const char *path = getenv("LAGOM_EMULATION_GPU");
  if (!refusal && path && *path) read_file(path);
  if (refusal)
    fprintf(stderr, "lagom emulate: %s\n", refusal);
  else
    read_visible();
}

const gpu_preset *preset_get(void) {
  pthread_once(&once, load);
  return &preset;
}

const char *preset_refusal(void) {
  pthread_once(&once, load);
  return refusal;
}

uint32_t preset_num_visible(void) {
  pthread_once(&once, load);
  return num_visible;
}

uint32_t preset_physical(uint32_t ordinal) { return ordinal < preset_num_visible() ? visible[ordinal] : 0; }

uint32_t preset_bus(uint32_t physical) { return 0x10 + 0x10 * (physical & 7) + (physical >> 3); }

bool preset_has_nvlink(uint32_t physical, uint32_t other) {
  switch (preset_get()->link) {
    case PRESET_PCIE:
      return false;
    case PRESET_NVLINK_PAIRS:
      return physical / 2 == other / 2;
    default:
      return true;
  }
}
