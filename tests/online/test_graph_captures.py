"""Collectives in a CUDA graph keep NCCL's own choice, whatever is tried when they are captured."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from played_profiler import PlayedComm
from test_plugin_route import measured_step, start

from lagom_overlap.collective import CommConfig, ConfigTable
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.online.graph_captures import GraphCaptures

__all__ = ["start"]  # the fixture


def graph_class():
    class Graph:
        """As torch.cuda.CUDAGraph: a capture is what runs between the two."""

        def capture_begin(self, *, fails=False):
            if fails:
                raise RuntimeError("CUDA says no")

        def capture_end(self, *, fails=False):
            if fails:
                raise RuntimeError("the capture was invalidated")

    return Graph


def trial(route, keys, epoch, channels):
    rows = {key: CommConfig(num_channels=channels) for key in keys}
    route.prepare(ConfigTable(rows, cycles=cycles_of(keys)), epoch)
    route.commit(epoch)


@pytest.fixture
def tuned(start):
    """A job under a trial of two channels, its captures watched."""
    job, route = start()
    keys = [call.key for call in measured_step(job, route).calls]
    default = job.effective
    trial(route, keys, 1, 2)
    graph = graph_class()
    captures = GraphCaptures(graph)
    captures.watch(route.begin_capture, route.end_capture)
    return job, route, keys, default, graph(), captures


def test_a_captured_collective_has_nccls_own_choice_and_the_next_one_the_trials(tuned):
    job, route, _, default, graph, captures = tuned
    route.begin_step(is_measured=False)
    graph.capture_begin()
    job.step()
    graph.capture_end()
    assert job.effective == default
    assert "CUDA graph holds collectives" in captures.why_not()
    route.begin_step(is_measured=False)
    job.step()
    assert {config.num_channels for config in job.effective} == {2}


def test_ranks_that_capture_under_different_trials_capture_the_same(tuned):
    """What would hang: one rank's graph with the first trial's settings, another's with the next one's."""
    job, route, keys, _, graph, _ = tuned
    captured = []
    for epoch in (2, 3):
        route.begin_step(is_measured=False)
        graph.capture_begin()
        job.step()
        graph.capture_end()
        captured.append(job.effective)
        trial(route, keys, epoch, epoch + 4)
    assert captured[0] == captured[1]


def test_a_graph_of_computation_alone_changes_nothing(tuned):
    job, route, _, _, graph, captures = tuned
    graph.capture_begin()
    graph.capture_end()
    assert captures.why_not() == ""
    route.begin_step(is_measured=False)
    job.step()
    assert {config.num_channels for config in job.effective} == {2}


def test_a_capture_that_fails_is_over(tuned):
    job, route, _, _, graph, _ = tuned
    with pytest.raises(RuntimeError, match="CUDA says no"):
        graph.capture_begin(fails=True)
    route.begin_step(is_measured=False)
    job.step()
    assert {config.num_channels for config in job.effective} == {2}


def test_a_capture_that_cannot_be_ended_is_over(tuned):
    job, route, _, default, graph, captures = tuned
    graph.capture_begin()
    job.step()
    with pytest.raises(RuntimeError, match="was invalidated"):
        graph.capture_end(fails=True)
    assert job.effective == default
    assert captures.why_not()  # what was issued may be in a graph
    route.begin_step(is_measured=False)
    job.step()
    assert {config.num_channels for config in job.effective} == {2}


def test_captures_of_two_threads_end_with_the_last_of_them(tuned):
    job, route, _, default, graph, captures = tuned
    other = type(graph)()
    graph.capture_begin()
    job.step()
    other.capture_begin()
    other.capture_end()
    assert captures.why_not() == ""  # the first one is still open
    route.begin_step(is_measured=False)
    job.step()
    assert job.effective == default
    graph.capture_end()
    assert captures.why_not()  # of the first one's collectives, which came before the second began
    route.begin_step(is_measured=False)
    job.step()
    assert {config.num_channels for config in job.effective} == {2}


def test_a_second_graph_forgets_nothing_of_the_first(tuned):
    """Captured under the first one's collectives: a graph of computation alone that begins meanwhile counts from 0."""
    job, _, _, _, graph, captures = tuned
    other = type(graph)()
    graph.capture_begin()
    job.step()
    other.capture_begin()
    graph.capture_end()
    other.capture_end()
    assert captures.why_not()


def test_a_capture_does_not_bring_a_closed_route_back(tuned):
    job, route, _, default, graph, _ = tuned
    route.close()
    graph.capture_begin()
    graph.capture_end()
    job.step()
    assert job.effective == default


def test_the_methods_are_put_back(tuned):
    _, route, _, _, graph, captures = tuned
    kind = type(graph)
    assert kind.capture_begin.__wrapped__
    captures.unwatch()
    captures.unwatch()
    assert not hasattr(kind.capture_begin, "__wrapped__")
    assert route is not None


# Other threads communicate while a graph is captured. ---------------------------------------------------------------


@pytest.fixture
def told(tuned, monkeypatch):
    """The same job under NCCL's profiler: what it says of a call before it asks about it, and one collective."""
    job, route, _, default, graph, captures = tuned
    folder = job.rehearsal.record.parent
    monkeypatch.setenv("LAGOM_PROFILE", str(folder / "profile.bin"))
    library = folder / "liblagom_tuner.so"

    def step(version, *, is_captured):
        comm = PlayedComm(library, version, 7)
        ran = []
        for op in job.comms:
            comm.call(str(op.collective.kind), 1, is_captured=is_captured)
            ran.append(job.rehearsal.run(op))
        comm.finalize()
        return tuple(ran)

    return route, default, graph, captures, step


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize(("version", "channels"), [(4, None), (5, 2), (6, 2), (7, 2)])
def test_a_call_outside_of_a_capture_is_decided_like_any_other_where_nccl_tells(told, version, channels):
    """Another rank may make it while it captures nothing: under two settings it would hang."""
    route, default, graph, captures, step = told
    route.begin_step(is_measured=False)
    graph.capture_begin()
    ran = in_thread(lambda: step(version, is_captured=False))
    assert ran == default if channels is None else {config.num_channels for config in ran} == {channels}
    graph.capture_end()
    assert bool(captures.why_not()) == (channels is None)  # what is known to be outside is in no graph


@pytest.mark.parametrize("version", [5, 6, 7])
def test_a_captured_call_of_any_thread_keeps_nccls_choice(told, version):
    """The collectives of a captured backward come from autograd's threads."""
    route, default, graph, captures, step = told
    route.begin_step(is_measured=False)
    graph.capture_begin()
    assert in_thread(lambda: step(version, is_captured=True)) == default
    assert {config.num_channels for config in step(version, is_captured=False)} == {2}
    assert in_thread(lambda: step(version, is_captured=True)) == default
    graph.capture_end()
    assert captures.why_not()


@pytest.mark.parametrize("version", [5, 6, 7])
def test_a_capture_that_only_nccl_knows_of_keeps_nccls_choice(told, version):
    """Begun in C++, or by another library: no method of `torch.cuda.CUDAGraph` was called."""
    route, default, _, _, step = told
    route.begin_step(is_measured=False)
    assert step(version, is_captured=True) == default
    assert {config.num_channels for config in step(version, is_captured=False)} == {2}


@pytest.mark.parametrize("version", [5, 6, 7])
def test_what_other_threads_say_of_their_calls_is_never_taken_for_this_ones(tuned, monkeypatch, version):
    """The plug-in has a place for some threads only; one whose place another has taken knows nothing."""
    job, route, _, default, graph, _ = tuned
    folder = job.rehearsal.record.parent
    monkeypatch.setenv("LAGOM_PROFILE", str(folder / "profile.bin"))
    comm, num_threads = PlayedComm(folder / "liblagom_tuner.so", version, 7), 512
    op = job.comms[0]
    route.begin_step(is_measured=False)
    graph.capture_begin()
    comm.call(str(op.collective.kind), 1, is_captured=True)
    all_are_there = threading.Barrier(num_threads)  # or a thread could have the number of one that has ended

    def outside():
        all_are_there.wait(30)
        comm.call(str(op.collective.kind), 1, is_captured=False)
        all_are_there.wait(30)

    before = threading.stack_size(256 * 1024)
    try:
        threads = [threading.Thread(target=outside) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    assert job.rehearsal.run(op) == default[0]
    graph.capture_end()
    comm.finalize()
