"""Kernels of PyTorch that are run, launched by their names as its libraries register them, against numpy."""

import pytest
from coordinator import Coordinator

LAUNCH = """
    import ctypes as c, struct
    import numpy as np
    from emulated import Runtime
    cuda, driver = Runtime(13), c.CDLL("libcuda.so.1")
    cuda.SetDevice(0)
    def launch(name, *arguments):
        function = c.c_void_p()
        assert not driver.cuModuleGetFunction(c.byref(function), None, name.encode())
        rooms = [c.create_string_buffer(a, max(len(a), 64)) for a in arguments]
        pointers = (c.c_void_p * len(rooms))(*[c.addressof(room) for room in rooms])
        assert not driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, None, pointers, None)
    def put(array):
        at = cuda.malloc(max(array.nbytes, 512))
        cuda.write(at, array.tobytes())
        return at
    def get(at, dtype, count):
        return np.frombuffer(cuda.read(at, np.dtype(dtype).itemsize * count), dtype)
    def integer(value):
        return struct.pack("<i", value)
    def pointers(*at):
        return struct.pack("<%dQ" % len(at), *at)
"""
FILL = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorI{}EESt5arrayIPcLm1EELb0EEEviT0_T1_"
CONVERT = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4EZNS0_27converting_copy_kernel_cudaI{}{}EEvRNS_18TensorIteratorBaseE"
    "EUl{}E_St5arrayIPcLm2EELb0EEEviT0_T1_"
)
CAST = (
    "_ZN2at6native27unrolled_elementwise_kernelIZZZNS0_23direct_copy_kernel_cudaERNS_18TensorIteratorBaseEENKUlvE1_clEvENKU"
    "lvE5_clEvEUlfE_St5arrayIPcLm2EELi4E23TrivialOffsetCalculatorILi1EjES8_NS0_6memory12LoadWithCastILi1EEENSA_13StoreWithCa"
    "stILi1EEEEEviT_T0_T2_T3_T4_T5_"
)
STRIDED = (
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy_kernel_cudaERNS_18Tensor"
    "IteratorBaseEENKUlvE1_clEvENKUlvE5_clEvEUlfE_EEvS4_RKT_EUliE_EEviT1_"
)
RANGE = (
    "_ZN44_GLOBAL__N__27elementwise_kernel_with_indexIiZZZN2at6native15arange_cuda_outERKN3c106ScalarES5_S5_RNS1_6TensorEENKU"
    "lvE_clEvENKUlvE2_clEvEUllE_EEvT_T0_PNS_15function_traitsISB_E11result_typeE"
)


def run(on_device, code):
    done = on_device(LAUNCH + code)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("letter", "dtype", "value"), [("f", "f4", 3.5), ("l", "i8", -7), ("b", "?", 1), ("d", "f8", 0)]
)
def test_a_fill_writes_its_value_and_nothing_else(on_device, letter, dtype, value):
    out = run(
        on_device,
        f"""
    at = put(np.full(3000, 9, "{dtype}"))
    launch("{FILL.format(letter)}", integer(2990), np.array({value}, "{dtype}").tobytes(), pointers(at))
    got = get(at, "{dtype}", 3000)
    print((got[:2990] == np.array({value}, "{dtype}")).all(), (got[2990:] == np.array(9, "{dtype}")).all())
    """,
    )
    assert out == "True True\n"


def test_floats_round_to_half_as_ieee_does(on_device):
    out = run(
        on_device,
        f"""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    edges = [0, 0x80000000, 0x7F800000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x38800000]
    singles = np.concatenate([np.array(edges, np.uint32), bits]).view("f4")
    with np.errstate(all="ignore"):
        expected = singles.astype("f2")
    at, to = put(singles), put(np.zeros(len(singles), "f2"))
    launch("{CONVERT.format("f", "N3c104HalfE", "f")}", integer(len(singles)), b"", pointers(to, at))
    got = get(to, "f2", len(singles))
    both_nan = np.isnan(got) & np.isnan(expected)
    print(((got.view("u2") == expected.view("u2")) | both_nan).all(), both_nan.sum() > 100)
    back = put(np.zeros(len(got), "f4"))
    launch("{CONVERT.format("N3c104HalfE", "f", "N3c104HalfE")}", integer(len(got)), b"", pointers(back, to))
    print(np.array_equal(get(back, "f4", len(got)), got.astype("f4"), equal_nan=True))
    """,
    )
    assert out == "True True\nTrue\n"


def test_a_cast_reads_and_writes_the_types_of_its_arguments(on_device):
    # c10::ScalarType: 3 int32, 6 float32, 11 bool
    out = run(
        on_device,
        f"""
    numbers = np.arange(-50, 50, dtype="i4")
    at = put(numbers)
    for scalar_type, dtype in ((6, "f4"), (4, "i8"), (11, "?")):
        to = put(np.zeros(100, dtype))
        launch("{CAST}", integer(100), b"", pointers(to, at), b"", b"", bytes([3]), bytes([scalar_type]))
        print(np.array_equal(get(to, dtype, 100), numbers.astype(dtype)))
    """,
    )
    assert out == "True\n" * 3


def test_a_strided_copy_gathers_by_its_offset_calculator(on_device):
    # The transpose of 7 x 11 floats, as PyTorch lays out the captures: sizes with magic numbers, strides, pointers.
    out = run(
        on_device,
        f"""
    table = np.arange(77, dtype="f4").reshape(7, 11)
    at, to = put(table), put(np.zeros(77, "f4"))
    captures = struct.pack("<i", 2) + struct.pack("<6I", 7, 0, 0, 11, 0, 0) + bytes(23 * 12)
    captures += struct.pack("<4I", 4, 44, 28, 4) + bytes(23 * 8)
    captures += bytes(-len(captures) % 8) + pointers(to, at)
    launch("{STRIDED}", integer(77), captures)
    print(np.array_equal(get(to, "f4", 77).reshape(11, 7), table.T))
    """,
    )
    assert out == "True\n"


def test_a_strided_copy_of_untouched_memory_is_zero_and_takes_no_page(on_device):
    """A transpose of 1024 x 1024 floats: onto untouched memory, onto ones, and with one float that is no zero."""
    out = run(
        on_device,
        f"""
    def resident():
        found, rows = 0, open("/proc/self/smaps").read().splitlines()
        for at, row in enumerate(rows):
            if "lagom_emulated_gpu" in row:
                found += int(next(one for one in rows[at:] if one.startswith("Rss:")).split()[1])
        return found
    size = 4 << 20
    at, to, ones = cuda.malloc(size), cuda.malloc(size), put(np.ones(1 << 20, "f4"))
    def transpose(to):
        captures = struct.pack("<i", 2) + struct.pack("<6I", 1024, 0, 0, 1024, 0, 0) + bytes(23 * 12)
        captures += struct.pack("<4I", 4, 4096, 4096, 4) + bytes(23 * 8)
        captures += bytes(-len(captures) % 8) + pointers(to, at)
        launch("{STRIDED}", integer(1 << 20), captures)
    before = resident()
    transpose(to)
    cuda.DeviceSynchronize()
    print(resident() - before < 64)
    transpose(ones)
    print(not get(ones, "f4", 1 << 20).any())
    cuda.write(at + 4 * 5, np.ones(1, "f4").tobytes())
    transpose(to)
    found = get(to, "f4", 1 << 20)
    print(found.sum(), found[5 * 1024])
    """,
    )
    assert out == "True\nTrue\n1.0 1.0\n"


def test_a_range_counts_in_steps(on_device):
    out = run(
        on_device,
        f"""
    to = put(np.zeros(40, "i8"))
    launch("{RANGE}", integer(40), struct.pack("<qq", -5, 3), pointers(to))
    print(np.array_equal(get(to, "i8", 40), -5 + 3 * np.arange(40)))
    """,
    )
    assert out == "True\n"


ADD = "_ZN2at6native29vectorized_elementwise_kernelILi2ENS0_21CUDAFunctorOnSelf_addIlEESt5arrayIPcLm2EELb0EEEviT0_T1_"
MULTIPLY = (
    "_ZN2at6native29vectorized_elementwise_kernelILi2ENS0_13AUnaryFunctorIlllNS0_15binary_internal10MulFunctorIlEEEESt5array"
    "IPcLm2EELb0EEEviT0_T1_"
)
EQUAL = (
    "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_13AUnaryFunctorIllbNS0_51_GLOBAL__N__68c48bfe_18_CompareEQKernel_cu"
    "_d8008c9616CompareEqFunctorIlEEEESt5arrayIPcLm2EELb0EEEviT0_T1_"
)


def test_index_arithmetic_is_exact(on_device):
    out = run(
        on_device,
        f"""
    x = np.arange(-20, 20)
    at, to = put(x), put(np.zeros(40, "i8"))
    launch("{ADD}", integer(40), struct.pack("<qq", 7, -3), pointers(to, at))
    print(np.array_equal(get(to, "i8", 40), x - 21))
    launch("{MULTIPLY}", integer(40), struct.pack("<qq", 0, -9), pointers(to, at))
    print(np.array_equal(get(to, "i8", 40), x * -9))
    for is_not in (0, 1):
        launch("{EQUAL}", integer(40), struct.pack("<qq", is_not, 5), pointers(to, at))
        print(np.array_equal(get(to, "?", 40), (x == 5) != is_not))
    """,
    )
    assert out == "True\n" * 4


def test_a_kernel_that_is_not_known_leaves_memory_alone(on_device):
    out = run(
        on_device,
        """
    at = put(np.arange(100, dtype="f4"))
    launch("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_10AbsFunctorIfEEEvi", integer(100), b"", pointers(at))
    print(np.array_equal(get(at, "f4", 100), np.arange(100)))
    """,
    )
    assert out == "True\n"


def test_the_coordinator_is_told_which_kernels_are_run(tmp_path, on_device):
    with Coordinator(tmp_path / "socket") as coordinator:
        code = f"""
    at = put(np.zeros(64, "f4"))
    launch("{FILL.format("f")}", integer(64), np.float32(1).tobytes(), pointers(at))
    launch("_Z5otherv")
    cuda.DeviceSynchronize()
    """
        done = on_device(LAUNCH + code, LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"))
    assert done.stderr == ""
    kernels = [description for description in coordinator.descriptions.values() if "kernel" in description]
    assert [(k["num_elements"], k.get("is_exact", False)) for k in kernels] == [(64, True), (None, False)]
