#include "device.h"

#include "code.h"
#include "framework.h"

static int submit(void *stream, uint32_t desc_id, const char *name, const emulated_shape *shape, uint64_t *sequence,
                  uint64_t *op_id) {
  operation op = {.kind = OPERATION_KERNEL, .desc_id = desc_id, .name = name, .sequence = sequence, .grid = {1, 1, 1}};
  op.block[0] = op.block[1] = op.block[2] = 1;
  if (shape && shape->num_blocks) op.grid[0] = shape->num_blocks;
  if (shape && shape->num_threads) op.block[0] = shape->num_threads;
  if (op_id) *op_id = 0;
  if (!shape) framework_note_inexact();  // a product; what a collective brings is known
  return stream_submit(stream, &op, "cudaLaunchKernel", op_id);
}

static int launch_kernel(CUfunction function, const unsigned *grid, const unsigned *block, unsigned shared_bytes,
                         void **arguments, CUstream stream, const char *api) {
  launch how = {grid, block, shared_bytes, arguments};
  return code_launch(function, &how, stream, api);
}

__attribute__((visibility("default"))) const emulated_gpu lagom_emulated_gpu = {
    .version = EMULATED_GPU_VERSION,
    .bytes = sizeof(emulated_gpu),
    .describe = client_describe,
    .submit_op = client_submit,
    .wait = client_wait,
    .wait_in_background = client_wait_in_background,
    .query = client_query,
    .times = client_times,
    .host_ns = client_host_ns,
    .advance = client_advance,
    .submit = submit,
    .launch = launch_kernel,
    .preset = preset_get,
    .refusal = preset_refusal,
    .physical_device = preset_physical,
    .bus = preset_bus,
    .has_nvlink = preset_has_nvlink,
    .set_settle = effect_set_settle,
    .observe = stream_observe,
    .take_group = framework_take_group,
    .refuse = lagom_emulation_refuse,
};
