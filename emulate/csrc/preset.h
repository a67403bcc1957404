// What GPUs this host has: from the JSON named by LAGOM_EMULATION_GPU, without it eight H100s on an NVSwitch.
#ifndef LAGOM_EMULATED_GPU_PRESET_H
#define LAGOM_EMULATED_GPU_PRESET_H
#include <stdbool.h>
#include <stdint.h>

#define PRESET_MAX_DEVICES 16

enum preset_link { PRESET_PCIE, PRESET_NVLINK_PAIRS, PRESET_NVLINK_MESH, PRESET_NVSWITCH };

typedef struct {
  char name[96];
  uint32_t num_sms, num_devices, host_index, capability_major, capability_minor;
  uint64_t memory_bytes, l2_bytes, clock_hz;
  enum preset_link link;
  uint32_t num_nvlinks, pcie_generation, pcie_width;
} gpu_preset;

const gpu_preset *preset_get(void);

// Why this process must not use the emulated device, NULL if it may.
const char *preset_refusal(void);

uint32_t preset_num_visible(void);
uint32_t preset_physical(uint32_t ordinal);                // after CUDA_VISIBLE_DEVICES
uint32_t preset_bus(uint32_t physical);                    // PCI bus number
bool preset_has_nvlink(uint32_t physical, uint32_t other);
#endif
