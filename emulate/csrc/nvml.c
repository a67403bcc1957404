// NVML for the emulated GPUs: what NCCL, PyTorch and monitoring tools ask for. Layouts and numbers as NVIDIA publishes them.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "device.h"

typedef int nvmlReturn_t;
enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_DRIVER_NOT_LOADED = 9 };
enum { REMOTE_GPU = 0, REMOTE_SWITCH = 2 };

typedef struct {
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
} pci_info;

typedef struct {
  unsigned field, scope;
  long long timestamp, latency_us;
  int value_type;
  nvmlReturn_t result;
  uint64_t value;
} field_value;

typedef struct {
  unsigned version;
  unsigned char cluster[16];
  nvmlReturn_t status;
  unsigned clique;
  unsigned char state;
} fabric_info;

_Static_assert(sizeof(pci_info) == 68 && sizeof(field_value) == 40, "NVML");

typedef uintptr_t nvmlDevice_t;  // the GPU's number on this host, plus one

static const gpu_preset *preset(void) { return lagom_emulated_gpu.preset(); }

static uint32_t index_of(nvmlDevice_t device) { return (uint32_t)device - 1; }

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
  return lagom_emulated_gpu.refusal() ? NVML_DRIVER_NOT_LOADED : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

EXPORT const char *nvmlErrorString(nvmlReturn_t result) { return result ? "an error of the emulated NVML" : "Success"; }

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned room) {
  snprintf(text, room, "595.0 (emulated)");
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13020;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT nvmlReturn_t nvmlSystemGetConfComputeState(void *state) {
  memset(state, 0, 3 * sizeof(unsigned));
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetConfComputeSettings(void *settings) { return NVML_NOT_SUPPORTED; }

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  *count = preset()->num_devices;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  if (index >= preset()->num_devices) return NVML_INVALID_ARGUMENT;
  *device = index + 1;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
  unsigned domain, bus, slot;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) return NVML_INVALID_ARGUMENT;
  for (uint32_t i = 0; i < preset()->num_devices; i++)
    if (lagom_emulated_gpu.bus(i) == bus) return nvmlDeviceGetHandleByIndex_v2(i, device);
  return NVML_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
  *index = index_of(device);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned room) {
  snprintf(text, room, "%s", preset()->name);
  return NVML_SUCCESS;
}

// The bytes that cuDeviceGetUuid gives.
EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned room) {
  snprintf(text, room, "GPU-6c61676f-6d20-656d-756c-61746564%02x%02x", preset()->host_index & 255, index_of(device));
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  char text[64];
  for (uint32_t i = 0; i < preset()->num_devices; i++) {
    nvmlDeviceGetUUID(i + 1, text, sizeof text);
    if (!strcmp(text, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, device);
  }
  return NVML_NOT_FOUND;
}

static void fill_pci(unsigned bus, pci_info *info) {
  memset(info, 0, sizeof *info);
  info->bus = bus;
  snprintf(info->id, sizeof info->id, "00000000:%02X:00.0", bus & 255);
  snprintf(info->legacy_id, sizeof info->legacy_id, "0000:%02X:00.0", bus & 255);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, pci_info *info) {
  fill_pci(lagom_emulated_gpu.bus(index_of(device)), info);
  info->device_id = 0x10de;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, pci_info *info) {
  return nvmlDeviceGetPciInfo_v3(device, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, pci_info *info) {
  return nvmlDeviceGetPciInfo_v3(device, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  *major = (int)preset()->capability_major, *minor = (int)preset()->capability_minor;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, uint64_t *total_free_used) {
  // What other processes use is not known: all of it is free.
  total_free_used[0] = total_free_used[1] = preset()->memory_bytes;
  total_free_used[2] = 0;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, void *infos) {
  *count = 0;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, void *infos) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

// ---- links

// The GPU at the other end of a link, -1 for a switch, -2 for no link. Links of a mesh go to the peers in turn.
static int remote_of(nvmlDevice_t device, unsigned link) {
  const gpu_preset *gpu = preset();
  unsigned index = index_of(device), num_peers = gpu->num_devices - 1;
  if (gpu->link == PRESET_PCIE || link >= gpu->num_nvlinks || !num_peers) return -2;
  if (gpu->link == PRESET_NVSWITCH) return -1;
  if (gpu->link == PRESET_NVLINK_PAIRS) return (index ^ 1) < gpu->num_devices ? (int)(index ^ 1) : -2;
  unsigned peer = link % num_peers;
  return (int)(peer < index ? peer : peer + 1);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, int *is_active) {
  *is_active = remote_of(device, link) != -2;
  return *is_active ? NVML_SUCCESS : preset()->link == PRESET_PCIE ? NVML_NOT_SUPPORTED : NVML_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, int capability, unsigned *value) {
  *value = remote_of(device, link) != -2;
  return *value ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version) {
  *version = preset()->capability_major >= 9 ? 4 : 3;
  return remote_of(device, link) != -2 ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, pci_info *info) {
  int remote = remote_of(device, link);
  if (remote == -2) return NVML_INVALID_ARGUMENT;
  fill_pci(remote == -1 ? 5 : lagom_emulated_gpu.bus((uint32_t)remote), info);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link, pci_info *info) {
  return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, int *type) {
  int remote = remote_of(device, link);
  *type = remote == -1 ? REMOTE_SWITCH : REMOTE_GPU;
  return remote == -2 ? NVML_INVALID_ARGUMENT : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t peer, int capability, int *status) {
  enum { READ, WRITE, NVLINK, ATOMICS, PCIE };
  bool has_nvlink = lagom_emulated_gpu.has_nvlink(index_of(device), index_of(peer));
  bool is_ok = capability == NVLINK || capability == ATOMICS ? has_nvlink : true;
  *status = is_ok ? 0 : 5;  // 5: not supported
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, field_value *values) {
  for (int i = 0; i < count; i++) values[i].result = NVML_NOT_SUPPORTED;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, fabric_info *info) {
  info->status = NVML_NOT_SUPPORTED;
  info->state = 0;  // one host: no fabric manager
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, void *info) { return NVML_NOT_SUPPORTED; }

EXPORT nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t device, unsigned *mbytes_per_s) {
  *mbytes_per_s = 500u << (preset()->pcie_generation > 0 ? preset()->pcie_generation : 1);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
  *generation = preset()->pcie_generation;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
  return nvmlDeviceGetCurrPcieLinkGeneration(device, generation);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
  *width = preset()->pcie_width;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
  return nvmlDeviceGetCurrPcieLinkWidth(device, width);
}
