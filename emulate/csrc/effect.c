#include "effect.h"

#include <string.h>

#include "memory.h"

static void run_rows(const effect *what) {
  for (size_t row = 0; row < what->num_rows; row++) {
    char *to = (char *)what->to + row * what->to_pitch;
    if (what->kind == EFFECT_COPY)
      memory_copy(to, (const char *)what->from + row * what->from_pitch, what->count * what->element_bytes);
    else
      memory_fill(to, what->value, what->element_bytes, what->count);
  }
}

static double read_float(const unsigned char *at, enum element element) {
  uint16_t half;
  uint32_t bits;
  float single;
  double wide;
  switch (element) {
    case ELEMENT_F32:
      memcpy(&single, at, 4);
      return (double)single;
    case ELEMENT_F64:
      memcpy(&wide, at, 8);
      return wide;
    case ELEMENT_BF16:
      memcpy(&half, at, 2);
      bits = (uint32_t)half << 16;
      memcpy(&single, &bits, 4);
      return (double)single;
    default: {
      memcpy(&half, at, 2);
      uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
      if (exponent == 0) return (sign ? -1.0 : 1.0) * (double)mantissa / 16777216.0;
      bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
      memcpy(&single, &bits, 4);
      return (double)single;
    }
  }
}

static uint16_t half_of(float single) {  // round to nearest, ties to even, as the hardware converts
  uint32_t bits;
  memcpy(&bits, &single, 4);
  uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and more become infinite
  if (magnitude < 0x38800000u) {                                    // below the smallest normal half
    float scaled;
    memcpy(&scaled, &magnitude, 4);
    scaled += 0.5f;  // the sum's unit in the last place is the half's
    memcpy(&bits, &scaled, 4);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  magnitude += 0xfffu + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

static uint16_t bfloat_of(float single) {
  uint32_t bits;
  memcpy(&bits, &single, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static bool is_float(enum element element) { return element >= ELEMENT_F16 && element <= ELEMENT_F64; }

static int64_t read_integer(const unsigned char *at, enum element element) {
  int16_t i16;
  int32_t i32;
  int64_t i64;
  switch (element) {
    case ELEMENT_I8:
      return (int8_t)*at;
    case ELEMENT_I16:
      memcpy(&i16, at, 2);
      return i16;
    case ELEMENT_I32:
      memcpy(&i32, at, 4);
      return i32;
    case ELEMENT_I64:
      memcpy(&i64, at, 8);
      return i64;
    default:
      return *at;
  }
}

static void write_float(unsigned char *at, enum element element, double value) {
  float single = (float)value;
  uint16_t half = element == ELEMENT_BF16 ? bfloat_of(single) : half_of(single);
  switch (element) {
    case ELEMENT_F32:
      memcpy(at, &single, 4);
      break;
    case ELEMENT_F64:
      memcpy(at, &value, 8);
      break;
    default:
      memcpy(at, &half, 2);
  }
}

size_t effect_element_bytes(enum element element) {
  static const uint8_t bytes[NUM_ELEMENTS] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  return bytes[element];
}

static void write_integer(unsigned char *at, enum element element, int64_t value) {
  if (element == ELEMENT_BOOL)
    *at = value != 0;
  else
    memcpy(at, &value, effect_element_bytes(element));  // little-endian: the low bytes
}

// A float beyond the integers converts to the nearest one, as the hardware does: 32 bits wide, or 64 for a 64-bit result.
static int64_t integer_of(double value, enum element to) {
  double limit = to == ELEMENT_I64 ? 9223372036854775808.0 : 2147483648.0;
  int64_t largest = to == ELEMENT_I64 ? INT64_MAX : INT32_MAX;
  if (value != value) return 0;
  return value >= limit ? largest : value < -limit ? -largest - 1 : (int64_t)value;
}

static void convert_one(unsigned char *to, enum element to_element, const unsigned char *from, enum element from_element) {
  if (is_float(from_element)) {
    double value = read_float(from, from_element);
    if (is_float(to_element))
      write_float(to, to_element, value);
    else
      write_integer(to, to_element, to_element == ELEMENT_BOOL ? value != 0 : integer_of(value, to_element));
  } else {
    int64_t value = read_integer(from, from_element);
    if (!is_float(to_element))
      write_integer(to, to_element, value);
    else if (to_element == ELEMENT_F64)
      write_float(to, to_element, (double)value);
    else
      write_float(to, to_element, (double)(float)value);
  }
}

static void run_convert(const effect *what) {
  size_t to_bytes = effect_element_bytes(what->to_element), from_bytes = effect_element_bytes(what->from_element);
  if (what->to_element == what->from_element) {
    memory_copy(what->to, what->from, what->count * to_bytes);
    return;
  }
  if (memory_is_hole(what->from, what->count * from_bytes)) {  // zero is zero in every type
    static const unsigned char zero[1];
    memory_fill(what->to, zero, 1, what->count * to_bytes);
    return;
  }
  unsigned char *to = what->to;
  const unsigned char *from = what->from;
  for (size_t i = 0; i < what->count; i++)
    convert_one(to + i * to_bytes, what->to_element, from + i * from_bytes, what->from_element);
}

// From the first byte to the last that the strides reach.
static size_t reach(const effect *what, const uint32_t *strides) {
  size_t bytes = what->element_bytes;
  for (uint32_t d = 0; d < what->num_dims; d++) bytes += (size_t)(what->sizes[d] - 1) * strides[d];
  return bytes;
}

// Untouched memory is zero, and reading it would take a page as writing does: zeros onto zeros are left out, and a whole block
// of zeros is given back.
static bool copies_nothing(const effect *what) {
  size_t to_bytes = reach(what, what->to_strides);
  if (!memory_is_hole(what->from, reach(what, what->from_strides))) return false;
  if (memory_is_hole(what->to, to_bytes)) return true;
  if (to_bytes != what->count * what->element_bytes) return false;
  static const unsigned char zero[1];
  memory_fill(what->to, zero, 1, to_bytes);
  return true;
}

static void run_strided(const effect *what) {
  if (what->kind == EFFECT_STRIDED_COPY && what->count && copies_nothing(what)) return;
  uint32_t index[EFFECT_MAX_DIMS] = {0};
  char *to = what->to;
  const char *from = what->kind == EFFECT_STRIDED_COPY ? what->from : (const void *)what->value;
  bool has_source = what->kind == EFFECT_STRIDED_COPY;
  for (size_t i = 0; i < what->count; i++) {
    memcpy(to, from, what->element_bytes);
    for (uint32_t d = 0; d < what->num_dims; d++) {  // the next index, as an odometer
      to += what->to_strides[d];
      if (has_source) from += what->from_strides[d];
      if (++index[d] < what->sizes[d]) break;
      to -= (size_t)what->to_strides[d] * what->sizes[d];
      if (has_source) from -= (size_t)what->from_strides[d] * what->sizes[d];
      index[d] = 0;
    }
  }
}

static void run_range(const effect *what) {
  size_t bytes = effect_element_bytes(what->to_element);
  int64_t start, step;
  memcpy(&start, what->value, 8);
  memcpy(&step, what->value + 8, 8);
  for (size_t i = 0; i < what->count; i++)
    write_integer((unsigned char *)what->to + i * bytes, what->to_element, start + step * (int64_t)i);
}

static void run_integers(const effect *what) {
  uint64_t first, second;  // overflow wraps
  memcpy(&first, what->value, 8);
  memcpy(&second, what->value + 8, 8);
  for (size_t i = 0; i < what->count; i++) {
    uint64_t value;
    memcpy(&value, (const char *)what->from + 8 * i, 8);
    if (what->kind == EFFECT_EQUAL) {
      ((unsigned char *)what->to)[i] = (value == first) != (second != 0);
    } else {
      value = value * first + second;
      memcpy((char *)what->to + 8 * i, &value, 8);
    }
  }
}

void effect_run(const effect *what) {
  switch (what->kind) {
    case EFFECT_NONE:
      return;
    case EFFECT_COPY:
    case EFFECT_FILL:
      run_rows(what);
      return;
    case EFFECT_CONVERT:
      run_convert(what);
      return;
    case EFFECT_RANGE:
      run_range(what);
      return;
    case EFFECT_STRIDED_COPY:
    case EFFECT_STRIDED_FILL:
      run_strided(what);
      return;
    case EFFECT_LINEAR:
    case EFFECT_EQUAL:
      run_integers(what);
      return;
    case EFFECT_WRITE_VALUE:
      memcpy(what->to, what->value, what->element_bytes);
      return;
  }
}

static bool (*_Atomic settle_with)(const void *, size_t, bool);

void effect_set_settle(bool (*settle)(const void *at, size_t bytes, bool may_wait)) { settle_with = settle; }

bool effect_settle_range(const void *at, size_t bytes, bool may_wait) {
  bool (*settle)(const void *, size_t, bool) = settle_with;
  return !settle || settle(at, bytes, may_wait);
}

static size_t span_of(const effect *what, const uint32_t *strides, size_t pitch) {
  size_t bytes = what->element_bytes;
  if (what->num_dims) {
    for (uint32_t d = 0; d < what->num_dims; d++) bytes += (size_t)strides[d] * (what->sizes[d] - 1);
    return bytes;
  }
  return bytes * what->count + (what->num_rows > 1 ? (what->num_rows - 1) * pitch : 0);
}

void effect_settle(const effect *what) {
  bool (*settle)(const void *, size_t, bool) = settle_with;
  if (!settle || (what && what->kind == EFFECT_NONE)) return;
  if (!what) {
    settle(NULL, 0, true);
    return;
  }
  settle(what->to, span_of(what, what->to_strides, what->to_pitch), true);
  // A conversion's operand may have elements that are up to eight times as wide.
  size_t wider = what->kind == EFFECT_CONVERT || what->kind == EFFECT_EQUAL ? 8 : 1;
  if (what->from) settle(what->from, wider * span_of(what, what->from_strides, what->from_pitch), true);
}
