// PyTorch's kernels that are run, not only timed: fills, ranges, copies and conversions of elements, index arithmetic.
//
// They are known by their mangled names: `11FillFunctorIfE` is FillFunctor<float>. Arguments are read as ATen's element-wise
// launchers lay them out (aten/src/ATen/native/cuda: Loops.cuh, CUDALoops.cuh, MemoryAccess.cuh, OffsetCalculator.cuh), tried with
// PyTorch 2.15; a name that does not fit exactly is left to be timed.
#include <string.h>

#include "effect.h"
#include "memory.h"

// Elements that are converted or gathered one by one; larger kernels are only timed unless their operand is all zeros.
#define MAX_ELEMENTS (1 << 22)

static const struct {
  const char *mangled;
  enum element element;
  int scalar_type;  // c10::ScalarType
} types[] = {
    {"h", ELEMENT_U8, 0},
    {"a", ELEMENT_I8, 1},
    {"s", ELEMENT_I16, 2},
    {"i", ELEMENT_I32, 3},
    {"l", ELEMENT_I64, 4},
    {"N3c104HalfE", ELEMENT_F16, 5},
    {"f", ELEMENT_F32, 6},
    {"d", ELEMENT_F64, 7},
    {"b", ELEMENT_BOOL, 11},
    {"N3c108BFloat16E", ELEMENT_BF16, 15},
};
#define NUM_TYPES (sizeof types / sizeof *types)

static const char *after(const char *name, const char *part) {
  const char *at = name ? strstr(name, part) : NULL;
  return at ? at + strlen(part) : NULL;
}

// Reads one type and returns what follows it.
static const char *read_type(const char *letters, enum element *out) {
  for (size_t i = 0; letters && i < NUM_TYPES; i++) {
    size_t length = strlen(types[i].mangled);
    if (strncmp(letters, types[i].mangled, length)) continue;
    *out = types[i].element;
    return letters + length;
  }
  return NULL;
}

static bool element_of_scalar_type(int8_t scalar_type, enum element *out) {
  for (size_t i = 0; i < NUM_TYPES; i++)
    if (types[i].scalar_type == scalar_type) {
      *out = types[i].element;
      return true;
    }
  return false;
}

static effect plain(enum effect_kind kind, void *to, const void *from, int64_t count, enum element element) {
  effect what = {.kind = kind, .to = to, .from = from, .count = (size_t)count, .num_rows = 1};
  what.element_bytes = (uint8_t)effect_element_bytes(element);
  what.to_element = what.from_element = element;
  return what;
}

// Offset calculator and pointers, the captures of the kernel for tensors that are not contiguous.
typedef struct {
  int num_dims;
  uint32_t sizes[25][3];  // divisor, and two numbers for dividing by it
  uint32_t strides[];     // by dimension, then by tensor
} offsets;

static bool read_strided(const void *argument, uint32_t num_tensors, effect *what) {
  const offsets *from = argument;
  if (from->num_dims < 0 || from->num_dims > EFFECT_MAX_DIMS) return false;
  size_t pointers_at = (4 + sizeof from->sizes + 25 * num_tensors * sizeof(uint32_t) + 7) / 8 * 8;
  void *pointers[2] = {NULL, NULL};
  memcpy(pointers, (const char *)argument + pointers_at, num_tensors * sizeof *pointers);
  what->to = pointers[0], what->from = pointers[1];
  what->num_dims = (uint32_t)from->num_dims;
  for (uint32_t d = 0; d < what->num_dims; d++) {
    what->sizes[d] = from->sizes[d][0];
    what->to_strides[d] = from->strides[d * num_tensors];
    what->from_strides[d] = num_tensors > 1 ? from->strides[d * num_tensors + 1] : 0;
  }
  if (num_tensors == 1) memcpy(what->value, (const char *)argument + pointers_at + sizeof(void *), what->element_bytes);
  return memory_is_device(what->to);
}

static bool fill_of(const char *name, void *const *arguments, int64_t count, effect *what) {
  enum element element;
  const char *rest = read_type(after(name, "11FillFunctorI"), &element);
  if (!rest || *rest != 'E') return false;
  if (strstr(name, "18elementwise_kernelI")) {
    *what = plain(EFFECT_STRIDED_FILL, NULL, NULL, count, element);
    return strstr(name, "22gpu_kernel_impl_nocastI") && read_strided(arguments[1], 1, what);
  }
  // With trivial offsets only: the other unrolled kernels have calculators of their own.
  if (!strstr(name, "29vectorized_elementwise_kernelI") && !strstr(name, "23TrivialOffsetCalculatorILi0E")) return false;
  *what = plain(EFFECT_FILL, *(void **)arguments[2], NULL, count, element);
  memcpy(what->value, arguments[1], what->element_bytes);
  return true;
}

// The element type of the innermost lambda, `...clEvEUlfE_`.
static bool lambda_type(const char *name, enum element *element) {
  const char *at = NULL;
  for (const char *next = after(name, "clEvEUl"); next; next = after(next, "clEvEUl")) at = next;
  const char *rest = read_type(at, element);
  return rest && *rest == 'E';
}

static bool copy_of(const char *name, void *const *arguments, int64_t count, effect *what) {
  enum element element;
  if (!strstr(name, "23direct_copy_kernel_cudaE") || !lambda_type(name, &element)) return false;
  if (strstr(name, "18elementwise_kernelI")) {
    *what = plain(EFFECT_STRIDED_COPY, NULL, NULL, count, element);
    return strstr(name, "22gpu_kernel_impl_nocastI") && read_strided(arguments[1], 2, what);
  }
  void *const *pointers = arguments[2];
  *what = plain(EFFECT_CONVERT, pointers[0], pointers[1], count, element);
  if (strstr(name, "29vectorized_elementwise_kernelI")) return true;
  // Loads and stores that convert: their types are arguments. What is computed with lies between the two.
  if (!strstr(name, "12LoadWithCast") || !strstr(name, "13StoreWithCast") || !strstr(name, "23TrivialOffsetCalculatorILi1E"))
    return false;
  return element_of_scalar_type(*(int8_t *)arguments[5], &what->from_element) &&
         element_of_scalar_type(*(int8_t *)arguments[6], &what->to_element);
}

static bool conversion_of(const char *name, void *const *arguments, int64_t count, effect *what) {
  enum element to, from;
  const char *rest = read_type(after(name, "27converting_copy_kernel_cudaI"), &from);
  bool is_known = rest && read_type(rest, &to);
  if (!is_known) {  // PyTorch 2.14: a kernel for each of the two halves
    const char *bfloat = after(name, "25bfloat16_copy_kernel_cudaE"), *half = after(name, "24float16_copy_kernel_cudaE");
    const char *typed = read_type(after(bfloat ? bfloat : half, "EUl"), &from);
    is_known = typed && *typed == 'E';
    to = bfloat ? ELEMENT_BF16 : ELEMENT_F16;
  }
  if (!is_known || !strstr(name, "29vectorized_elementwise_kernelI")) return false;
  void *const *pointers = arguments[2];
  *what = plain(EFFECT_CONVERT, pointers[0], pointers[1], count, to);
  what->from_element = from;
  return true;
}

// Integer ranges. The dispatch numbers its types: ...`15arange_cuda_out`...`ENKUlvE2_clEvE` is the fourth.
static bool range_of(const char *name, void *const *arguments, int64_t count, effect *what) {
  static const enum element order[] = {ELEMENT_U8, ELEMENT_I8, ELEMENT_I32, ELEMENT_I64, ELEMENT_I16};
  const char *at = after(after(name, "15arange_cuda_out"), "clEvENKUlvE");
  if (!at) return false;
  unsigned index = *at == '_' ? 0 : (unsigned)(*at - '0') + 1;
  if (index >= sizeof order / sizeof *order) return false;
  *what = plain(EFFECT_RANGE, *(void **)arguments[2], NULL, count, order[index]);
  memcpy(what->value, arguments[1], 16);  // start and step, both of 64 bits
  return true;
}

// Index arithmetic with a scalar. A functor object lies before the scalar: empty, or the comparison's kind (0 equal, 1 not).
static bool integers_of(const char *name, void *const *arguments, int64_t count, effect *what) {
  const char *functor = arguments[1];
  int64_t first = 1, second = 0;
  enum effect_kind kind = EFFECT_LINEAR;
  if (!strstr(name, "29vectorized_elementwise_kernelI")) return false;
  if (strstr(name, "21CUDAFunctorOnSelf_addIlE")) {
    int64_t other, alpha;
    memcpy(&other, functor, 8);
    memcpy(&alpha, functor + 8, 8);
    second = (int64_t)((uint64_t)other * (uint64_t)alpha);
  } else if (strstr(name, "13AUnaryFunctorIlllNS0_15binary_internal10MulFunctorIlE")) {
    memcpy(&first, functor + 8, 8);
  } else if (strstr(name, "13AUnaryFunctorIllbNS0_") && strstr(name, "16CompareEqFunctorIlE")) {
    kind = EFFECT_EQUAL;
    second = *(const int *)functor;
    memcpy(&first, functor + 8, 8);
  } else {
    return false;
  }
  void *const *pointers = arguments[2];
  *what = plain(kind, pointers[0], pointers[1], count, kind == EFFECT_EQUAL ? ELEMENT_BOOL : ELEMENT_I64);
  memcpy(what->value, &first, 8);
  memcpy(what->value + 8, &second, 8);
  return true;
}

static bool is_in_memory(const effect *what) {
  return memory_is_device(what->to) && (!what->from || memory_is_device(what->from));
}

// One element at a time is for small kernels.
static bool is_affordable(const effect *what) {
  if (what->kind == EFFECT_FILL || what->count <= MAX_ELEMENTS) return true;
  if (what->kind != EFFECT_CONVERT) return false;
  return what->to_element == what->from_element ||
         memory_is_hole(what->from, what->count * effect_element_bytes(what->from_element));
}

bool effect_of_kernel(const char *name, void *const *arguments, effect *what, int64_t *num_elements) {
  int count;
  *what = (effect){.kind = EFFECT_NONE};
  *num_elements = -1;
  if (!arguments || !strstr(name, "elementwise_kernel") || !strstr(name, "N2at6native")) {
    bool is_range = arguments && strstr(name, "15arange_cuda_out");
    if (!is_range) return false;
  }
  if (strstr(name, "28elementwise_kernel_with_indexIl")) return false;  // more than 2^31 elements
  memcpy(&count, arguments[0], sizeof count);
  if (count < 0) return false;
  *num_elements = count;
  effect found = {.kind = EFFECT_NONE};
  bool is_known = fill_of(name, arguments, count, &found) || conversion_of(name, arguments, count, &found) ||
                  copy_of(name, arguments, count, &found) || range_of(name, arguments, count, &found) ||
                  integers_of(name, arguments, count, &found);
  if (!is_known || !is_in_memory(&found) || !is_affordable(&found)) return false;
  *what = found;
  return true;
}
