"""An algorithm that NCCL has not connected costs memory for good: it is tried only where that is allowed and free."""

import logging

import pytest
from test_plugin_route import STEP, measured_step, start

from lagom_overlap.backends.fake_nccl import Rehearsal
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigTable, Protocol
from lagom_overlap.errors import BackendError
from lagom_overlap.online.routes.connections import NEW_BYTES, SPARE_BYTES, Connections, connects_at_start
from lagom_overlap.online.routes.plugin import PluginRoute
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, OverlapGroup

__all__ = ["start"]  # the fixture

AR = CollectiveKind.ALL_REDUCE
REDUCING = OverlapGroup(
    name="step",
    computations=STEP.computations,
    comms=(CommOp(name="ar0", collective=Collective(AR, 64 * MIB, 8), communicator="fsdp"),),
)


def opened(start, connections):
    job, _ = start("2.30", REDUCING)
    rehearsal: Rehearsal = job.rehearsal
    route = PluginRoute(rehearsal.plugin, record=rehearsal.record, timer=job, connections=connections)
    (call,) = measured_step(job, route).calls
    return job, route, call.key


def algorithms(route, key):
    return {subspace.algorithm for subspace in route.space(key).subspaces} - {None}


def other_than(algorithm):
    return Algorithm.TREE if algorithm is Algorithm.RING else Algorithm.RING


def test_only_what_nccl_has_chosen_on_the_communicator_is_tried(start):
    job, route, key = opened(start, Connections(lambda: 0))
    assert algorithms(route, key) == {job.effective[0].algorithm}
    _, all_of_it, same = opened(start, Connections(lambda: 0, all_connected=True))
    assert algorithms(all_of_it, same) > algorithms(route, key)


def test_where_it_is_allowed_a_rank_without_room_refuses_the_switch(start):
    room = [NEW_BYTES + SPARE_BYTES - 1]
    job, route, key = opened(start, Connections(lambda: room[0], may_connect=True))
    other = other_than(job.effective[0].algorithm)
    assert other in algorithms(route, key)
    table = ConfigTable({key: CommConfig(algorithm=other, protocol=Protocol.SIMPLE, num_channels=2)})
    with pytest.raises(BackendError, match=r"used for the first time.* must have"):
        route.prepare(table, 1)
    room[0] += 1
    route.prepare(table, 1)


def test_the_memory_it_took_is_told_once(start, caplog):
    room = [8192 * MIB]
    job, route, key = opened(start, Connections(lambda: room[0], may_connect=True))
    other = other_than(job.effective[0].algorithm)
    table = ConfigTable({key: CommConfig(algorithm=other, protocol=Protocol.SIMPLE, num_channels=2)})
    caplog.set_level(logging.INFO)
    for epoch in (1, 2):
        route.prepare(table, epoch)
        route.commit(epoch)
        for _ in range(3):
            measured_step(job, route)
            room[0] = 8192 * MIB - 300 * MIB
    told = [record.getMessage() for record in caplog.records if "first use" in record.getMessage()]
    assert len(told) == 1
    assert "300" in told[0]
    assert str(other) in told[0]


def test_what_was_taken_back_before_its_first_step_was_not_connected(start, caplog):
    room = [8192 * MIB]
    job, route, key = opened(start, Connections(lambda: room[0], may_connect=True))
    table = ConfigTable(
        {key: CommConfig(algorithm=other_than(job.effective[0].algorithm), protocol=Protocol.SIMPLE, num_channels=2)}
    )
    caplog.set_level(logging.INFO)
    route.prepare(table, 1)
    route.commit(1)
    route.take_back(1)
    for _ in range(3):
        measured_step(job, route)
    assert "first use" not in caplog.text
    room[0] = NEW_BYTES
    with pytest.raises(BackendError, match="used for the first time"):
        route.prepare(table, 2)


def test_where_nccl_connects_all_at_the_start_nothing_is_new():
    assert connects_at_start({"NCCL_RUNTIME_CONNECT": "0"})
    assert connects_at_start({"NCCL_CUMEM_ENABLE": "0"})
    assert not connects_at_start({"NCCL_RUNTIME_CONNECT": "1"})
