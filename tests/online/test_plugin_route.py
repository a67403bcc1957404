"""The route over the plug-in: the real shared object under a fake NCCL, the real leader and member, simulated times."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from c_build import build_libraries
from plugin_job import STEP, Job, stands_for, tuned

from lagom_overlap.backends.fake_nccl import Rehearsal, communicator_of
from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    Protocol,
)
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import BackendError, TableError
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.capability import BoxMaps, CapabilityMap, Knobs, MapKey, MapRow, SettingOutcome
from lagom_overlap.nccl_plugin.fake_host import WITH_CHUNKS
from lagom_overlap.nccl_plugin.table_writer import EncodedTable, encode_table
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.routes import plugin
from lagom_overlap.online.routes.connections import Connections
from lagom_overlap.online.routes.plugin import PluginRoute
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, OverlapGroup

AG, RS, AR = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE


@pytest.fixture
def start(tmp_path_factory):
    opened = []
    library, fake = build_libraries(tmp_path_factory)

    def start_release(release="2.30", group=STEP, maps=None, **options):
        model = ContentionModel(load_preset("a40_nvlink", 1), load_profile("plausible"))
        rehearsal = Rehearsal(model, fake_library=fake, plugin_library=library, release=release)
        opened.append(rehearsal)
        job = Job(rehearsal, model, group)
        connections = Connections(lambda: 0, all_connected=True)
        route = PluginRoute(
            rehearsal.plugin, record=rehearsal.record, timer=job, connections=connections, maps=maps, **options
        )
        return job, route

    yield start_release
    for rehearsal in opened:
        rehearsal.close()


def measured_step(job, route):
    route.begin_step(is_measured=True)
    job.step()
    return route.end_step()


def table_of(keys, channels, **options):
    """Channels by the place of the call in the step."""
    rows = {keys[place]: CommConfig(num_channels=n) for place, n in channels.items()}
    return ConfigTable(rows, cycles=cycles_of(keys), **options)


def test_the_keys_of_a_step_are_what_nccl_asked_for_in_its_order(start):
    job, route = start()
    record = measured_step(job, route)
    assert [(call.key.kind, call.key.num_bytes, call.key.occurrence) for call in record.calls] == [
        (AG, 64 * MIB, 0),
        (RS, 64 * MIB, 0),
        (AG, 64 * MIB, 1),
    ]
    assert record.is_timed
    assert record.duration_s == job.makespan_s
    assert [call.num_channels for call in record.calls] == [config.num_channels for config in job.effective]
    (name,) = route.communicators()
    assert (name.description, len(name.ranks), name.creation_order) == ("nccl on 1 node", 8, 0)


def test_calls_of_less_than_a_mebibyte_are_no_part_of_a_step(start):
    """Scalars, a loss: launched and over in tens of microseconds, left alone by every table."""
    small = CommOp(name="loss", collective=Collective(AR, 256 * KIB, 8), communicator="fsdp")
    job, route = start(group=OverlapGroup(name="step", computations=STEP.computations, comms=(*STEP.comms, small)))
    calls = measured_step(job, route).calls
    assert [call.key.num_bytes for call in calls] == [op.collective.num_bytes for op in STEP.comms]
    assert all(call.ended_s > call.begun_s for call in calls)


@pytest.mark.parametrize("release", ["2.29", "2.30"])
def test_gathers_that_may_be_uneven_are_tried_without_channels(start, release):
    job, route = start(release, runs_uneven_gathers=True)
    keys = [call.key for call in measured_step(job, route).calls]
    gather, scatter = route.space(keys[0]), route.space(keys[1])
    assert {count for part in gather.subspaces for count in part.num_channels} == {None}
    assert all(part.algorithm or part.chunk_bytes != (None,) for part in gather.subspaces)  # something to set in each
    assert {count for part in scatter.subspaces for count in part.num_channels} > {1, 2}


def test_communicators_of_equal_size_are_told_apart_in_their_order(start):
    job, route = start()
    other = CommOp(name="other", collective=Collective(AR, MIB, 8), communicator="other")
    small = CommOp(name="small", collective=Collective(AR, MIB, 2), communicator="small")
    for op in (other, small, STEP.comms[0]):
        job.rehearsal.run(op)
    assert [(len(name.ranks), name.creation_order) for name in route.communicators()] == [(8, 0), (2, 0), (8, 1)]


def test_a_committed_table_is_decided_by_from_the_next_step_on_and_a_prepared_one_is_not(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    untouched = job.effective
    route.prepare(table_of(keys, {0: 3, 1: 5, 2: 2}), 1)
    measured_step(job, route)
    assert job.effective == untouched
    route.commit(1)
    record = measured_step(job, route)
    assert [call.num_channels for call in record.calls] == [3, 5, 2]
    assert job.rehearsal.plugin.generation == 1
    assert not job.rehearsal.table.exists()  # a file could be refused when the ranks have agreed (root-squashed NFS)


def test_calls_that_are_none_of_a_steps_shift_no_later_step_however_steps_are_marked(start):
    """An evaluation, a step cut short, a rank that marks more or fewer steps than the others."""
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    default = job.effective[1].num_channels
    route.prepare(table_of(keys, {0: 3, 2: 2}), 1)
    route.commit(1)
    for extra in ((), (0,), (0, 1), (1, 0), (0, 0, 1)):
        for place in extra:
            job.rehearsal.run(job.comms[place])
        job.step()  # by its reduction, which is alone in the step, the place is found again
        for _ in range(3):
            if len(extra) == 2:
                route.begin_step(is_measured=False)
            job.step()
            assert [config.num_channels for config in job.effective] == [3, default, 2]


def test_a_trial_ends_by_itself_at_one_call_and_goes_on_to_it_when_the_route_is_closed(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    untouched = job.effective
    route.prepare(table_of(keys, {0: 3, 1: 5, 2: 2}, lease_steps=3), 1)
    route.commit(1)
    ran = []
    for step in range(5):
        if step == 1:
            route.close()
        job.step()
        ran.append([config.num_channels for config in job.effective])
    assert ran == [[3, 5, 2]] * 3 + [[config.num_channels for config in untouched]] * 2


def test_what_is_set_for_good_ends_with_the_route(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    untouched = job.effective
    route.prepare(table_of(keys, {0: 3, 1: 5, 2: 2}), 1)
    route.commit(1)
    route.close()
    job.step()
    assert job.effective == untouched


@pytest.mark.parametrize("release", ["2.21", "2.28", "2.30"])
def test_calls_are_counted_by_what_all_ranks_call_the_communicator(start, release):
    job, route = start(release)
    assert route.counts() == {}
    for _ in range(2):
        measured_step(job, route)
    ((name, count),) = route.counts().items()
    assert (route.communicators(), count.num_calls) == ((name,), 6)
    (wire,) = {known.comm_id for known in route._known.values()}
    assert count.wire == (f"{wire:016x}" if release != "2.21" else "8/1/0")
    route.begin_step(is_measured=False)
    job.rehearsal.run(CommOp(name="small", collective=Collective(AR, 256 * KIB, 8), communicator="fsdp"))
    assert route.counts()[name].num_calls == 6


def test_a_communicator_that_the_record_has_lost_is_found_before_anything_is_set(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    known = route._known
    route._known = {}
    with pytest.raises(BackendError, match="does not tell of 1 communicators"):
        route.prepare(table_of(keys, {0: 3}), 1)
    route._known = {comm_id: replace(one, creation_order=1) for comm_id, one in known.items()}
    with pytest.raises(BackendError, match="does not tell of 1 communicators"):
        route.prepare(table_of(keys, {0: 3}), 1)


def test_a_commit_without_its_prepare_is_refused(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    with pytest.raises(TableError, match="was not prepared"):
        route.commit(1)
    route.prepare(table_of(keys, {0: 3}), 1)
    with pytest.raises(TableError, match="another generation"):
        route.commit(2)


def test_a_table_that_the_plug_in_refuses_is_found_out_when_it_is_prepared_and_the_old_one_stays(start, monkeypatch):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    route.prepare(table_of(keys, {1: 3}), 1)
    route.commit(1)
    with monkeypatch.context() as patched:
        patched.setattr(plugin, "encode_table", lambda *_, **__: EncodedTable(b"half a table", ()))
        with pytest.raises(TableError, match="another size"):
            route.prepare(table_of(keys, {1: 5}), 2)
    with pytest.raises(TableError, match="was not prepared"):
        route.commit(2)
    assert measured_step(job, route).calls[1].num_channels == 3
    route.prepare(table_of(keys, {1: 4}), 3)
    route.commit(3)
    assert measured_step(job, route).calls[1].num_channels == 4


def test_a_commit_that_is_taken_back_leaves_what_was_in_force_before(start, monkeypatch):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    untouched = job.effective
    tables = [table_of(keys, {1: channels}) for channels in (3, 5, 4)]
    route.prepare(tables[0], 1)
    route.take_back(1)  # not committed: nothing to do
    route.commit(1)
    route.take_back(1)
    measured_step(job, route)
    assert job.effective == untouched
    route.prepare(tables[1], 2)
    route.commit(2)
    route.prepare(tables[2], 3)
    with monkeypatch.context() as patched:
        patched.setattr(route._connections, "committed", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            route.commit(3)
    route.take_back(3)
    route.take_back(2 + 7)  # of another epoch
    assert measured_step(job, route).calls[1].num_channels == 5
    route.prepare(tables[0], 4)
    route.commit(4)
    assert measured_step(job, route).calls[1].num_channels == 3


def test_a_prepared_table_that_no_rank_commits_is_dropped_by_the_next(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    for epoch, channels in ((1, 2), (2, 3)):
        route.prepare(table_of(keys, {1: channels}), epoch)
    with pytest.raises(TableError, match="another generation"):
        route.commit(1)
    route.commit(2)
    assert measured_step(job, route).calls[1].num_channels == 3


def test_no_more_channels_are_tried_than_the_call_had_by_nccls_own_choice(start):
    """24 and 64 would be one setting where a communicator has 24, and crash where NCCL does not check."""
    job, route = start()
    record = measured_step(job, route)
    for call in record.calls:
        assert {max(s.num_channels) for s in route.space(call.key).subspaces} == {call.num_channels}
    default = record.calls[0].num_channels
    keys = [call.key for call in record.calls]
    key = keys[0]
    route.prepare(table_of(keys, {0: 2}), 1)
    route.commit(1)
    assert measured_step(job, route).calls[0].num_channels == 2
    assert max(route.space(key).subspaces[0].num_channels) == default  # a trial is no proof
    assert route.space(key).default == CommConfig(num_channels=default)


def test_a_call_that_was_never_seen_to_run_is_left_alone(start):
    job, route = start()
    route.begin_step(is_measured=False)
    job.step()
    keys = [call.key for call in route.end_step().calls]
    assert keys
    assert all(route.space(key) is None for key in keys)


def test_all_ranks_make_one_table_whatever_each_saw_last(start, monkeypatch):
    """A rank whose last measured step was another (an evaluation, a dropped one) must not decide otherwise."""
    made = []
    monkeypatch.setattr(
        plugin, "encode_table", lambda *args, **how: made.append(encode_table(*args, **how)) or made[-1]
    )
    for has_more in (False, True):
        job, route = start()
        keys = [call.key for call in measured_step(job, route).calls]
        if has_more:
            route.begin_step(is_measured=True)
            for _ in range(2):
                job.step()
            route.end_step()
        route.prepare(ConfigTable({key: CommConfig(num_channels=2) for key in keys}), 1)
    assert made[0].data == made[1].data


@pytest.mark.parametrize("release", ["2.22", "2.28", "2.30", "2.31"])
def test_the_space_is_what_nccl_offers_with_chunks_where_it_asks_for_them(start, release):
    job, route = start(release)
    key = measured_step(job, route).calls[0].key
    space = route.space(key)
    ways = {(s.algorithm, s.protocol) for s in space.subspaces}
    assert ways == {(None, None), *((Algorithm.RING, protocol) for protocol in (Protocol.LL, Protocol.SIMPLE))} | (
        {(Algorithm.RING, Protocol.LL128)} if (Algorithm.RING, Protocol.LL128) in ways else set()
    )
    assert all((s.chunk_bytes == (None,)) == (release not in WITH_CHUNKS) for s in space.subspaces)
    never = ConfigKey(communicator=key.communicator, kind=AR, num_bytes=KIB)
    assert route.space(never) is None


class OneMap(BoxMaps):
    """A box whose every communicator has this map."""

    def __init__(self, max_channels, wrong=()):
        super().__init__(None, None)
        rows = [MapRow(kind=AG, num_bytes=MIB, asked=each, ran=each, outcome=SettingOutcome.WRONG) for each in wrong]
        key = MapKey(nccl=(2, 30, 7), gpu="A40", num_gpus=8, ranks_per_gpu=1, topology="0" * 16)
        self.map = CapabilityMap(key=key, measured_on="2026-11-22", max_channels=max_channels, rows=tuple(rows))

    def of(self, *, num_ranks, num_nodes):
        return self.map if num_nodes == 1 else None


def test_a_map_of_the_box_narrows_the_space_and_may_leave_a_call_alone(start, caplog):
    job, route = start()
    key = measured_step(job, route).calls[0].key
    ways = [Knobs(each.algorithm, each.protocol) for each in route.space(key).subspaces]
    job, route = start(maps=OneMap(4))
    measured_step(job, route)
    assert {each.num_channels for each in route.space(key).subspaces} == {(1, 2, 3, 4)}
    job, route = start(maps=OneMap(4, wrong=ways[1:]))
    measured_step(job, route)
    assert [(each.algorithm, each.protocol) for each in route.space(key).subspaces] == [(None, None)]
    job, route = start(maps=OneMap(4, wrong=ways))
    measured_step(job, route)
    assert route.space(key) is None
    assert "left alone" in caplog.text


def test_only_what_moves_bytes_is_exact(start):
    _, route = start()
    name = CommunicatorId(description="x", ranks=(0, 1))
    exact = {kind for kind in CollectiveKind if route.is_exact(ConfigKey(communicator=name, kind=kind, num_bytes=1))}
    moves = (CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST, CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV)
    assert exact == set(moves)


def test_a_step_whose_kernels_do_not_match_its_calls_is_not_timed(start):
    job, route = start()
    measured_step(job, route)
    route.begin_step(is_measured=True)
    job.step()
    job.rehearsal.run(CommOp(name="more", collective=Collective(AR, MIB, 8), communicator="fsdp"))
    record = route.end_step()
    assert not record.is_timed
    assert len(record.calls) == 4


@pytest.mark.parametrize("release", ["2.21", "2.28", "2.30", "2.32.6"])
def test_a_table_of_classes_sets_calls_of_any_size_within_by_their_place_in_the_step(start, release):
    job, route = start(release)
    keys = [call.key for call in measured_step(job, route).calls]
    class_keys = [replace(keys[1], num_bytes=32 * MIB, occurrence=n) for n in (0, 1)]
    class_keys.append(replace(keys[1], num_bytes=64 * MIB, occurrence=0))
    route.prepare(table_of(class_keys, {0: 1, 1: 2}, size_octaves=1), 1)
    route.commit(1)
    for sizes in ((40, 33), (63, 32), (50, 50)):
        job.comms = tuple(
            CommOp(name=f"rs{n}", collective=Collective(RS, size * MIB, 8), communicator="fsdp")
            for n, size in enumerate((*sizes, 64))
        )
        route.begin_step(is_measured=False)
        job.step()
        assert [config.num_channels for config in job.effective[:2]] == [1, 2]
        assert job.effective[2].num_channels > 2  # of the next class: NCCL's own


def test_a_closed_route_leaves_every_call_to_nccl(start):
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    untouched = job.effective
    route.prepare(ConfigTable({key: CommConfig(num_channels=1) for key in keys}), 1)
    route.commit(1)
    route.close()
    job.step()
    assert job.effective == untouched


@pytest.mark.torch
@pytest.mark.parametrize("release", ["2.21", "2.24", "2.28", "2.30", "2.31", "2.32.6"])
def test_a_running_job_goes_from_default_to_tuned_through_the_plug_in(start, release):
    """Recorded, searched, judged and settled by the code that a real job runs; the setting is seen in the grid."""
    job, route = start(release)
    member, makespans = tuned(job, route)
    assert member.plan.state is SwitchState.DONE, member.plan.reason
    assert member.settings, member.plan.reason
    member.begin_step()
    job.step()
    assert job.makespan_s < makespans[0]
    asked = {(s.site.call.kind, s.site.occurrence): s.config.num_channels for s in member.settings}
    ran = zip(((AG, 0), (RS, 0), (AG, 1)), job.effective, strict=True)
    for site, config in ran:
        if asked.get(site) is not None and not (release >= "2.31" and asked[site] > config.num_channels):
            assert config.num_channels == asked[site]
    assert communicator_of(STEP.comms[0]).description == "fsdp"


@pytest.mark.torch
def test_two_ranks_with_plug_ins_of_their_own_run_every_step_alike(start):
    """What NCCL would hang on: one rank deciding by a table that the other does not have."""
    store = pytest.importorskip("torch.distributed").HashStore()
    options = OnlineOptions(window_steps=4, num_pairs=3, watch_steps=0, max_steps=400)

    def make_study(problems, warm, steps_left):
        return Study(problems, Guarded(Lagom(problems, seed=1), problems), seed=1, num_pairs=3)

    jobs = [start() for _ in range(2)]

    def run(rank):
        job, route = jobs[rank]
        stands_for(route, 8)  # each plays a communicator of its own
        leader = Leader(options, make_study, num_ranks=2, route_name=route.name) if rank == 0 else None
        member = Member(Exchange(store, rank=rank, num_ranks=2, timeout_s=20.0), route, leader=leader)
        ran = []
        for _ in range(300):
            member.begin_step()
            job.step()
            ran.append(job.effective)
            member.end_step()
        return ran

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert len(set(first)) > 3
