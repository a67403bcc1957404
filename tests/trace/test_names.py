import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.trace.names import (
    dtype_bytes,
    function_name,
    is_communication,
    kind_of,
    op_of,
    reach_of,
    whole_bytes,
)

COMMUNICATES = [
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)",
    "ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymDevArgs)",
    "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int, unsigned long, int, int)",
    "triton_symm_mem_all_reduce",
    "void deep_ep::internode::dispatch<false, 8, false, 16384>(int4*, float*)",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)",
    "void deep_ep::internode_ll::dispatch<true, 7168>(void*)",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16>(c10::BFloat16**)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(AllReduceParams)",
    "mscclpp::allreduce::allreduce8<__half>(void*)",
    "mscclKernel_Sum_half_LL(ncclDevComm*)",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop(int, int, int)",
    "nvshmemi_proxy_kernel(void*)",
    "Memcpy PtoP (Device -> Device)",
]
COMPUTES = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)",
    "void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float>>(float*)",
    "softmax_warp_forward<float, WarpAllReduce>(float*)",
    "void blockAllReduceSum<float>(float*)",
    "void warp_all_reduce_norm<float>(float*)",
    "sm80_xmma_gemm_f16f16_tn_n",
    "void at::native::index_put_kernel_impl<4>(int)",
    "Memcpy DtoD (Device -> Device)",
    "Memset (Device)",
    "void at::native::vectorized_gather_kernel<16, long>(char*)",
]


@pytest.mark.parametrize("name", COMMUNICATES)
def test_kernels_that_communicate_are_known(name):
    assert is_communication(name)


@pytest.mark.parametrize("name", COMPUTES)
def test_kernels_that_compute_are_left_alone(name):
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("words", "op"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("nccl:all_to_all", "all_to_all"),
        ("broadcast", "broadcast"),
        ("_broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("_reduce_oop", "reduce"),
        ("nccl:send 0->1", "send_recv"),
        ("recv", "send_recv"),
        ("nccl2:_allgather_base", "all_gather"),
        ("nccl2:barrier", "barrier"),
        ("gloo:barrier", "barrier"),
        ("gloo:all_reduce", "all_reduce"),
        ("barrier", "barrier"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("coalesced", "unknown"),
        ("", "unknown"),
    ],
)
def test_words_of_pytorch_and_nccl_become_ours(words, op):
    assert op_of(words) == op
    assert (kind_of(words) is None) == (op in ("barrier", "gather", "scatter", "unknown"))


def test_reach_follows_the_kind_and_the_library():
    assert reach_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", CollectiveKind.ALL_REDUCE) is KnobReach.TUNER
    assert reach_of("ncclDevKernel_SendRecv(x)", CollectiveKind.ALL_TO_ALL) is KnobReach.P2P_CHANNELS
    assert reach_of("ncclSymkDevKernel_AllGather_LL(x)", CollectiveKind.ALL_GATHER) is KnobReach.NONE
    assert reach_of("void deep_ep::intranode::dispatch<8>()", CollectiveKind.ALL_TO_ALL) is KnobReach.NONE


def test_function_names_lose_types_templates_and_parameters():
    assert function_name("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>(x*)") == (
        "multimem_all_reduce_kernel"
    )
    assert (
        function_name("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)")
        == "ncclKernel_AllReduce_RING_LL_Sum_float"
    )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("Float", 4), ("c10::BFloat16", 2), ("long int", 8), ("Byte", 1), ("Float8_e4m3fn", 1), ("?", 0)],
)
def test_types_have_sizes(dtype, size):
    assert dtype_bytes(dtype) == size


def test_the_whole_tensor_is_the_larger_side():
    assert whole_bytes(CollectiveKind.ALL_GATHER, 10, 80, 8) == 80
    assert whole_bytes(CollectiveKind.ALL_GATHER, 10, 0, 8) == 80
    assert whole_bytes(CollectiveKind.ALL_GATHER, 80, 10, 8) == 80  # into a list, under torch 2.15
    assert whole_bytes(CollectiveKind.REDUCE_SCATTER, 80, 10, 8) == 80
    assert whole_bytes(CollectiveKind.REDUCE_SCATTER, 0, 10, 8) == 80
    assert whole_bytes(CollectiveKind.ALL_REDUCE, 7, 7, 8) == 7
