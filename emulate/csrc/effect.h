// What an operation does to memory. Most kernels do nothing: they are timed, not run. Those that run say so in their description
// ("is_exact"), so that a report can tell their share.
#ifndef LAGOM_EMULATED_GPU_EFFECT_H
#define LAGOM_EMULATED_GPU_EFFECT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum effect_kind {
  EFFECT_NONE,
  EFFECT_COPY,
  EFFECT_FILL,
  EFFECT_CONVERT,
  EFFECT_RANGE,
  EFFECT_WRITE_VALUE,
  EFFECT_STRIDED_COPY,
  EFFECT_STRIDED_FILL,
  EFFECT_LINEAR,  // 64-bit integers: times the first half of `value`, plus the second
  EFFECT_EQUAL,   // 64-bit integers to booleans: equal to the first half of `value`, the second: or not
};

enum element {
  ELEMENT_U8,
  ELEMENT_I8,
  ELEMENT_I16,
  ELEMENT_I32,
  ELEMENT_I64,
  ELEMENT_F16,
  ELEMENT_BF16,
  ELEMENT_F32,
  ELEMENT_F64,
  ELEMENT_BOOL,
  NUM_ELEMENTS
};

#define EFFECT_MAX_DIMS 8

typedef struct {
  enum effect_kind kind;
  void *to;
  const void *from;
  size_t count;                           // elements in a row
  size_t num_rows, to_pitch, from_pitch;  // copies and fills of rectangles; one row otherwise
  uint8_t element_bytes;
  enum element to_element, from_element;  // EFFECT_CONVERT, EFFECT_RANGE
  unsigned char value[16];                // what is filled in; start and step of EFFECT_RANGE
  uint32_t num_dims;                      // EFFECT_STRIDED_*: the first dimension moves fastest
  uint32_t sizes[EFFECT_MAX_DIMS], to_strides[EFFECT_MAX_DIMS], from_strides[EFFECT_MAX_DIMS];  // in bytes
} effect;

void effect_run(const effect *what);

// Who owes the contents of some memory (a collective that is computed when its result is asked for): called before an effect reads
// or writes, with what it touches, and with NULL after a wait has ended. Whether nothing is owed there any more, which is so
// where it may wait for other ranks.
void effect_set_settle(bool (*settle)(const void *at, size_t bytes, bool may_wait));
bool effect_settle_range(const void *at, size_t bytes, bool may_wait);
void effect_settle(const effect *what);

size_t effect_element_bytes(enum element element);

// The effect of a kernel launch that is known by its (mangled) name and read from its arguments; also its number of elements.
// False: the kernel is timed only. num_elements is -1 where the arguments do not tell. (torch_kernel.c)
bool effect_of_kernel(const char *name, void *const *arguments, effect *what, int64_t *num_elements);
#endif
