#include "nccl_data.h"

#include <math.h>
#include <string.h>

size_t type_bytes(ncclDataType_t type) {
  static const size_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

const char* type_name(ncclDataType_t type) {
  static const char* const names[ncclNumTypes] = {"i8",  "u8",  "i32", "u32",  "i64",    "u64",
                                                  "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
  return names[type];
}

// A float of `exponent` and `mantissa` bits. Without `has_infinity` (E4M3) the largest exponent holds numbers, too.
typedef struct {
  int exponent, mantissa, has_infinity;
} float_format;

static double decode(uint32_t bits, float_format f) {
  const uint32_t mask = (1u << f.mantissa) - 1, most = (1u << f.exponent) - 1;
  const uint32_t exponent = bits >> f.mantissa & most, mantissa = bits & mask;
  const double sign = bits >> (f.mantissa + f.exponent) & 1 ? -1 : 1;
  const int bias = (1 << (f.exponent - 1)) - 1;
  if (f.has_infinity && exponent == most) return mantissa ? (double)NAN : sign * (double)INFINITY;
  if (!f.has_infinity && exponent == most && mantissa == mask) return (double)NAN;
  if (!exponent) return sign * ldexp(mantissa, 1 - bias - f.mantissa);
  return sign * ldexp((double)(mantissa | 1u << f.mantissa), (int)exponent - bias - f.mantissa);
}

static uint32_t encode(double value, float_format f) {
  const uint32_t sign = signbit(value) ? 1u << (f.mantissa + f.exponent) : 0;
  const uint32_t mask = (1u << f.mantissa) - 1, most = (1u << f.exponent) - 1;
  const int bias = (1 << (f.exponent - 1)) - 1;
  const uint32_t infinity = f.has_infinity ? most << f.mantissa : (most << f.mantissa | mask);
  if (isnan(value)) return sign | (f.has_infinity ? infinity | 1u << (f.mantissa - 1) : infinity);
  if (isinf(value)) return sign | infinity;
  value = fabs(value);
  int exponent = value == 0 ? 1 - bias : ilogb(value);
  if (exponent < 1 - bias) exponent = 1 - bias;
  const double steps = nearbyint(ldexp(value, f.mantissa - exponent));  // to even, as the default rounding is
  uint32_t bits = (uint32_t)steps;
  if (bits >> f.mantissa) bits += (uint32_t)(exponent + bias - 1) << f.mantissa;  // a carry lands in the exponent
  const uint32_t largest = f.has_infinity ? infinity - 1 : infinity - 1;
  return sign | (bits > largest ? infinity : bits);
}

static const float_format HALF = {5, 10, 1}, BFLOAT = {8, 7, 1}, E4M3 = {4, 3, 0}, E5M2 = {5, 2, 1};

static double load_float(const void* from, size_t i, ncclDataType_t type) {
  uint16_t two;
  float four;
  double eight;
  switch (type) {
    case ncclFloat32: return memcpy(&four, (const char*)from + 4 * i, 4), (double)four;
    case ncclFloat64: return memcpy(&eight, (const char*)from + 8 * i, 8), eight;
    case ncclFloat16: return memcpy(&two, (const char*)from + 2 * i, 2), decode(two, HALF);
    case ncclBfloat16: return memcpy(&two, (const char*)from + 2 * i, 2), decode(two, BFLOAT);
    case ncclFloat8e4m3: return decode(((const uint8_t*)from)[i], E4M3);
    default: return decode(((const uint8_t*)from)[i], E5M2);
  }
}

static void store_float(void* to, size_t i, ncclDataType_t type, double value) {
  const float four = (float)value;
  uint16_t two;
  switch (type) {
    case ncclFloat32: memcpy((char*)to + 4 * i, &four, 4); break;
    case ncclFloat64: memcpy((char*)to + 8 * i, &value, 8); break;
    case ncclFloat16:
    case ncclBfloat16:
      two = (uint16_t)encode(value, type == ncclFloat16 ? HALF : BFLOAT);
      memcpy((char*)to + 2 * i, &two, 2);
      break;
    default: ((uint8_t*)to)[i] = (uint8_t)encode(value, type == ncclFloat8e4m3 ? E4M3 : E5M2);
  }
}

static int is_signed(ncclDataType_t type) { return type == ncclInt8 || type == ncclInt32 || type == ncclInt64; }

static uint64_t load_integer(const void* from, size_t i, ncclDataType_t type) {
  const size_t size = type_bytes(type);
  uint64_t value = 0;
  memcpy(&value, (const char*)from + size * i, size);
  if (is_signed(type) && size < 8 && value >> (8 * size - 1) & 1) value |= ~(uint64_t)0 << (8 * size);
  return value;
}

// Sums and products wrap, as on the GPU.
static uint64_t combine_integers(uint64_t a, uint64_t b, ncclRedOp_t op, int has_sign) {
  const int is_less = has_sign ? (int64_t)a < (int64_t)b : a < b;
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return is_less ? b : a;
    case ncclMin: return is_less ? a : b;
    default: return a + b;
  }
}

static double combine_floats(double a, double b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return isnan(a) || isnan(b) ? (double)NAN : a < b ? b : a;
    case ncclMin: return isnan(a) || isnan(b) ? (double)NAN : a < b ? a : b;
    default: return a + b;
  }
}

void reduce_parts(void* out, const void* const* parts, int num_parts, size_t count, ncclDataType_t type, const reduction* how) {
  const int is_float = type >= ncclFloat16, has_sign = is_signed(type);
  for (size_t i = 0; i < count; i++) {
    if (is_float) {
      double value = 0;
      for (int p = 0; p < num_parts; p++) {
        double part = load_float(parts[p], i, type);
        if (how->has_factor) part *= how->factor;
        value = p ? combine_floats(value, part, how->op) : part;
      }
      store_float(out, i, type, how->op == ncclAvg ? value / num_parts : value);
      continue;
    }
    uint64_t value = 0;
    for (int p = 0; p < num_parts; p++) {
      uint64_t part = load_integer(parts[p], i, type);
      if (how->has_factor) part *= (uint64_t)how->integer;
      value = p ? combine_integers(value, part, how->op, has_sign) : part;
    }
    if (how->op == ncclAvg) value = has_sign ? (uint64_t)((int64_t)value / num_parts) : value / (uint64_t)num_parts;
    memcpy((char*)out + i * type_bytes(type), &value, type_bytes(type));
  }
}

double scalar_value(const void* scalar, ncclDataType_t type) {
  if (type >= ncclFloat16) return load_float(scalar, 0, type);
  const uint64_t value = load_integer(scalar, 0, type);
  return is_signed(type) ? (double)(int64_t)value : (double)value;
}
