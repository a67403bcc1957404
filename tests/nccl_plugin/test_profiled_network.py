"""What the network did for a collective: the proxy thread's events, told in NCCL's order (`src/transport/net.cc`)."""

import ctypes
from pathlib import Path

import pytest
from c_build import CSRC, compile_c
from own_rings import profile_ring, read_profile
from played_profiler import (
    IN_PROGRESS,
    PROXY_OP,
    PROXY_STEP,
    RECV_FLUSH_WAIT,
    RECV_GPU_WAIT,
    RECV_WAIT,
    SEND_GPU_WAIT,
    SEND_PEER_WAIT,
    SEND_WAIT,
    PlayedComm,
)

from lagom_overlap.nccl_plugin.profile_log import ProfileFlag

VERSIONS = (4, 5, 6, 7)
NUM_OPERATIONS = 1 << 14
every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    path = tmp_path / "profile.bin"
    for name in ("LAGOM_PROFILE_ENTRIES", "LAGOM_PROFILE_CHANNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAGOM_PROFILE", str(path))
    monkeypatch.setenv("LAGOM_PROFILE_NETWORK", "1")
    return path


@pytest.fixture
def make_comm(plugin_path):
    return lambda version=6, comm_id=7, **options: PlayedComm(plugin_path, version, comm_id, **options)


@every_version
def test_a_collective_has_what_its_channels_sent_and_received(make_comm, profile, version):
    comm = make_comm(version)
    handle = comm.launch("AllReduce", 1000, "ncclBfloat16", 2)
    ops = [(comm.start_op(handle, channel, is_send=s), s) for channel in (0, 1) for s in (True, False)]
    for op, is_send in ops:
        comm.move(op, [100] * 9 + [3] if is_send else [70, 7], is_send=is_send)
    comm.run(handle, {0: (1, 9), 1: (2, 8)})
    (found,) = read_profile(profile).collectives
    network = found.network
    assert (network.num_sends, network.sent_bytes) == (20, 2 * 903)
    assert (network.num_receipts, network.received_bytes) == (4, 2 * 77)
    assert found.launched_ns <= network.start_ns <= network.end_ns <= found.seen_ns
    waits = (network.send_gpu_wait_s, network.send_peer_wait_s, network.send_network_s, network.receive_network_s)
    assert 0 < sum(waits) <= (network.end_ns - network.start_ns) * 1e-9 * (1 + 1e-12)  # one after another here
    assert 0 < network.busy_s <= network.send_network_s
    assert found.flags == ProfileFlag(0)


def test_nccl_is_asked_for_the_network_on_request_and_not_while_events_are_off(make_comm, plugin, profile):
    comm = make_comm()
    network = PROXY_OP | PROXY_STEP
    assert comm.mask.value & network == network
    plugin.profile(is_enabled=False)
    assert comm.mask.value & network == 0


def test_a_collective_on_one_node_has_no_network(make_comm, profile):
    comm = make_comm()
    comm.run(comm.launch("AllReduce", 1000, "ncclBfloat16", 1), {0: (1, 9)})
    assert read_profile(profile).collectives[0].network is None


def test_sends_that_outlive_the_kernel_are_waited_for_and_then_it_is_written(make_comm, profile):
    comm = make_comm()
    handle = comm.launch("AllReduce", 4, "ncclInt8", 1)
    op = comm.start_op(handle, 0, is_send=True)
    comm.state(op, IN_PROGRESS)
    step = comm.start_step(op, 0)
    comm.state(step, SEND_GPU_WAIT)
    comm.state(step, SEND_WAIT, 4)
    comm.run(handle, {0: (1, 9)})
    ring = profile_ring(profile)
    assert (ring.take().collectives, ring.num_open) == ((), 1)
    comm.stop(step)
    assert ring.take().collectives == ()
    comm.stop(op)
    (found,) = ring.take().collectives
    assert (found.is_complete, found.network.sent_bytes, ring.num_open) == (True, 4, 0)


def test_operations_that_the_network_never_takes_up_are_not_waited_for(make_comm, profile):
    """As of shared memory by copy engines and of switches that reduce: NCCL starts them and never tells their end."""
    comm = make_comm()
    handle = comm.launch("AllReduce", 4, "ncclInt8", 1)
    comm.start_op(handle, 0, is_send=True)
    comm.run(handle, {0: (1, 9)})
    (found,) = read_profile(profile).collectives
    assert (found.is_complete, found.network, found.flags) == (True, None, ProfileFlag(0))


def test_a_communicator_that_goes_leaves_what_was_under_way_as_incomplete(make_comm, profile):
    comm = make_comm()
    handle = comm.launch("AllReduce", 4, "ncclInt8", 1)
    comm.move(comm.start_op(handle, 0, is_send=True), [5], is_send=True)
    op = comm.start_op(handle, 0, is_send=False)
    comm.state(op, IN_PROGRESS)
    comm.run(handle, {0: (1, 9)})
    comm.finalize()
    (found,) = read_profile(profile).collectives
    assert (found.network.sent_bytes, found.flags) == (5, ProfileFlag.NETWORK_INCOMPLETE)
    assert found.is_complete  # its kernel was
    comm.stop(op)  # harmless
    assert profile_ring(profile).num_late == 0


@every_version
def test_nothing_of_another_process_is_followed(make_comm, profile, version):
    """PXN: the proxy of a process near the network card is passed another process's context and handle."""
    comm = make_comm(version)
    handle = comm.launch("AllReduce", 4, "ncclInt8", 1)
    nowhere = 0xDEAD0000
    op = comm.start_op(handle, 0, is_send=True, pid=1, context=nowhere)
    assert op is None
    assert (
        comm.start_step(op, 0, context=nowhere) is None
    )  # NCCL starts steps whether or not their operation has a handle
    comm.run(handle, {0: (1, 9)})
    assert read_profile(profile).collectives[0].network is None


def test_more_operations_than_there_is_room_for_are_said_and_those_of_the_past_make_room(make_comm, profile):
    comm = make_comm()
    old = comm.launch("AllReduce", 4, "ncclInt8", 1)
    for _ in range(NUM_OPERATIONS):
        assert comm.start_op(old, 0, is_send=True) is not None
    assert comm.start_op(old, 0, is_send=True) is None
    comm.run(old, {0: (1, 9)})
    new = comm.launch("AllReduce", 4, "ncclInt8", 1)
    comm.move(comm.start_op(new, 0, is_send=True), [8], is_send=True)
    comm.run(new, {0: (1, 9)})
    full, found = read_profile(profile).collectives
    assert (full.network, full.flags) == (None, ProfileFlag.NETWORK_INCOMPLETE)
    assert (found.network.sent_bytes, found.flags) == (8, ProfileFlag(0))


class _Network(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("sent_bytes", "received_bytes", "num_sends", "num_receipts", "send_gpu", "send_peer", "send_network"),
            *("receive_network", "receive_flush", "receive_gpu", "busy", "first", "last"),
        )
    )


@pytest.fixture
def network(tmp_path):
    """The operations alone, told the time."""
    stub = tmp_path / "stub.c"
    stub.write_text(
        "#include <stdbool.h>\n#include <stdint.h>\nbool lagom_is_under_way(uint64_t c) { return c != 0; }\n"
    )
    source = CSRC / "lagom_profiler_network.c"
    built: Path = compile_c(tmp_path / "network.so", source, stub, link=("-fvisibility=default",))
    library, word = ctypes.CDLL(str(built)), ctypes.c_uint64
    library.lagom_network_start.argtypes, library.lagom_network_start.restype = [word], word
    library.lagom_network_begin.argtypes = [word, ctypes.POINTER(word)]
    library.lagom_network_begin.restype = library.lagom_network_end.restype = ctypes.c_bool
    library.lagom_network_end.argtypes = [word, ctypes.POINTER(word), ctypes.POINTER(_Network)]
    library.lagom_network_start_step.argtypes, library.lagom_network_start_step.restype = [word, ctypes.c_int], word
    library.lagom_network_set_state.argtypes = [word, ctypes.c_int, ctypes.c_size_t, word]
    library.lagom_network_end_step.argtypes = [word, word]
    return library


def _told(network, op: int) -> dict[str, int]:
    collective, done = ctypes.c_uint64(), _Network()
    assert network.lagom_network_end(op, ctypes.byref(collective), ctypes.byref(done))
    assert collective.value == 77
    return {name: getattr(done, name) for name, _ in _Network._fields_}


def _begun(network) -> int:
    op, collective = network.lagom_network_start(77), ctypes.c_uint64()
    assert network.lagom_network_begin(op, ctypes.byref(collective))
    assert not network.lagom_network_begin(op, ctypes.byref(collective))  # NCCL may tell it again
    return op


def test_two_sends_at_once_by_hand(network):
    """Step 0: posted 100, data 150, taken 170 after three polls, done 300; step 1: posted 110, 160, 250, done 400."""
    op = _begun(network)
    a, b = (network.lagom_network_start_step(op, step) for step in (0, 1))
    told = [(a, SEND_GPU_WAIT, 0, 100), (b, SEND_GPU_WAIT, 0, 110), (a, SEND_PEER_WAIT, 0, 150)]
    told += [(a, SEND_PEER_WAIT, 0, 155), (b, SEND_PEER_WAIT, 9, 160), (a, SEND_PEER_WAIT, 9, 165)]
    told += [(a, SEND_WAIT, 64, 170), (b, SEND_WAIT, 32, 250)]
    for step, state, num_bytes, at in told:
        network.lagom_network_set_state(step, state, num_bytes, at)
    network.lagom_network_end_step(a, 300)
    network.lagom_network_end_step(b, 400)
    found = _told(network, op)
    assert {name: n for name, n in found.items() if n} == {
        "sent_bytes": 96,
        "num_sends": 2,
        "send_gpu": 50 + 50,
        "send_peer": 20 + 90,
        "send_network": 130 + 150,
        "busy": 230,  # 170 to 400
        "first": 100,
        "last": 400,
    }


def test_the_network_is_not_busy_between_two_sends(network):
    op = _begun(network)
    for step, (start, end) in enumerate([(100, 130), (200, 250)]):
        handle = network.lagom_network_start_step(op, step)
        network.lagom_network_set_state(handle, SEND_WAIT, 1, start)
        network.lagom_network_end_step(handle, end)
    assert _told(network, op)["busy"] == 30 + 50


def test_a_receipt_by_hand(network):
    op = _begun(network)
    handle = network.lagom_network_start_step(op, 8)  # the place of step 0
    for state, num_bytes, at in [(RECV_WAIT, 5, 10), (RECV_FLUSH_WAIT, 48, 40), (RECV_GPU_WAIT, 48, 47)]:
        network.lagom_network_set_state(handle, state, num_bytes, at)
    network.lagom_network_end_step(handle, 60)
    found = _told(network, op)
    expected = {"received_bytes": 48, "num_receipts": 1, "receive_network": 30, "receive_flush": 7, "receive_gpu": 13}
    assert {name: n for name, n in found.items() if n} == {**expected, "first": 10, "last": 60}


def test_a_dead_handle_tells_nothing(network):
    op = _begun(network)
    step = network.lagom_network_start_step(op, 0)
    _told(network, op)
    network.lagom_network_set_state(step, SEND_WAIT, 9, 5)
    network.lagom_network_end_step(step, 7)
    collective, done = ctypes.c_uint64(), _Network()
    assert not network.lagom_network_end(op, ctypes.byref(collective), ctypes.byref(done))
    assert network.lagom_network_start_step(op, 0) == 0
