"""Steps told apart without a line of the job's code."""

import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.pipelining import PipelineStage  # noqa: E402

from lagom_overlap.online import launch_steps  # noqa: E402
from lagom_overlap.online.launch_steps import TrainingSteps, is_pipelined  # noqa: E402

pytestmark = pytest.mark.torch


class Watched:
    def __init__(self):
        self.models, self.num_steps = [], 0

    def model(self, model):
        self.models.append(model)

    def step(self):
        assert not torch.compiler.is_compiling()
        self.num_steps += 1


@pytest.fixture
def watched():
    seen = Watched()
    steps = TrainingSteps(seen.model, seen.step, lambda module: isinstance(module, torch.nn.Sequential))
    yield seen
    steps.close()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def parts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return model, [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]


def test_a_step_begins_with_the_first_forward_after_an_update(watched):
    model, (optimizer, _) = parts()
    for number in range(3):
        for _ in range(4):  # gradient accumulation
            model(torch.ones(2, 4)).sum().backward()
        assert watched.num_steps == number + 1
        optimizer.step()
        optimizer.zero_grad()
    assert watched.models == [model]


def test_chained_optimizers_count_once_and_a_skipped_update_joins_the_next_step(watched):
    model, optimizers = parts()
    for number in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if number != 1:
            for optimizer in optimizers:
                optimizer.step()
    assert watched.num_steps == 3


def test_an_optimizer_of_something_else_begins_no_step_of_the_model(watched):
    model, (optimizer, _) = parts()
    other = torch.nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(3):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            others.step()
        assert watched.num_steps == number + 1
        optimizer.step()


def test_an_optimizer_of_copies_counts_where_the_model_has_none_of_its_own(watched):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    copies = torch.optim.SGD([parameter.detach().clone() for parameter in model.parameters()], lr=0.1)
    for number in range(3):
        model(torch.ones(2, 4)).sum().backward()
        assert watched.num_steps == number + 1
        copies.step()


def stages_of_megatron(count):
    module = ModuleType("megatron.core.parallel_state")
    module.get_pipeline_model_parallel_world_size = lambda: count
    return module


def test_stages_of_a_pipeline_begin_their_steps_before_they_wait_for_each_other(watched, monkeypatch):
    """A later stage's model is called when the first stage has sent: it must have begun its step by then."""
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", stages_of_megatron(2))
    model, optimizers = parts()
    begun = []
    for _ in range(3):
        begun.append(watched.num_steps)  # what a receive would wait after
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        begun.append(watched.num_steps)
        for optimizer in optimizers:
            optimizer.step()
    assert begun == [0, 1, 2, 2, 3, 3]
    assert watched.num_steps == 4


def test_a_pipeline_is_known_by_its_framework(monkeypatch):
    assert not is_pipelined()
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", stages_of_megatron(1))
    assert not is_pipelined()
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", ModuleType("a newer one"))
    assert not is_pipelined()
    stage = object.__new__(PipelineStage)
    assert is_pipelined()
    del stage
    assert not is_pipelined()


def test_evaluation_is_no_step_and_no_model(watched):
    model, (optimizer, _) = parts()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert watched.models == []
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert watched.num_steps == 1


def test_without_any_update_there_is_one_step(watched):
    model, _ = parts()
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
    assert watched.num_steps == 1


def test_the_search_for_the_model_leaves_no_hook_behind(watched):
    model, _ = parts()
    torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert watched.models == []
    assert torch.nn.modules.module._global_forward_pre_hooks
    model(torch.ones(2, 4))
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_module_is_parallel_if_fsdp_or_ddp_is_in_it():
    class Ddp(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, num_ranks):
            torch.nn.Module.__init__(self)
            self.process_group = SimpleNamespace(size=lambda: num_ranks)

    assert launch_steps.is_trained_in_parallel(Ddp(2))
    assert not launch_steps.is_trained_in_parallel(Ddp(1))  # a model of this rank's own
    assert launch_steps.is_trained(torch.nn.Linear(2, 2))
    assert not launch_steps.is_trained(torch.nn.Linear(2, 2).requires_grad_(requires_grad=False))
    assert not launch_steps.is_trained_in_parallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))


class Block(torch.nn.Sequential):
    """A forward of its own: those of torch.nn are compiled only from outside."""

    def forward(self, batch):
        return self[0](batch).tanh()


def compiled_in_place(model):
    model.compile(fullgraph=True, backend="eager")
    return model


def compiled_around(model):
    return torch.compile(lambda batch: model(batch).tanh(), fullgraph=True, backend="eager")


@pytest.fixture
def _without_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_without_compiled_code")
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_a_model_in_one_graph_trains_on_and_its_steps_are_counted(watched, compiled):
    """The hooks are traced into the graph; anything that dynamo cannot trace would end the job."""
    model, (optimizer, other) = parts()
    call = compiled(model)
    for number in range(4):
        for _ in range(3):  # gradient accumulation
            call(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            call(torch.ones(2, 4))
        assert watched.num_steps == number
        optimizer.step()
        assert watched.num_steps == number + 1  # the forward cannot tell: the update before it does
        other.step()
        optimizer.zero_grad()
    assert watched.models == [model]
    assert watched.num_steps == 4


@pytest.mark.usefixtures("_without_compiled_code")
def test_a_model_that_is_compiled_after_its_first_steps_keeps_its_count(watched):
    model, (optimizer, _) = parts()
    for number in range(6):
        if number == 2:
            compiled_in_place(model)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert watched.models == [model]
    # Two steps begun by their forwards, four by the update after a compiled one.
    assert watched.num_steps == 6


@pytest.mark.usefixtures("_without_compiled_code")
def test_compiled_parts_of_an_eager_model_begin_no_steps(watched):
    model, (optimizer, _) = parts()
    inner = Block(torch.nn.Linear(4, 4))
    whole = torch.nn.Sequential(compiled_in_place(inner), model)
    inner(torch.ones(2, 4)).sum()  # compiled while the model is still looked for
    for number in range(3):
        whole(torch.ones(2, 4)).sum().backward()
        assert watched.num_steps == number + 1
        optimizer.step()
    assert watched.models == [whole]
    assert watched.num_steps == 3


@pytest.mark.usefixtures("_without_compiled_code")
def test_torch_compile_warns_of_hooks_on_all_modules_if_they_are_the_jobs(watched):
    """A job that makes warnings errors would end."""
    other = torch.compile(Block(torch.nn.Linear(4, 4))[0], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(torch.ones(2, 4))
    assert watched.models == []
    registered = torch.nn.modules.module.register_module_parameter_registration_hook(lambda *_: None)
    assert not torch.nn.modules.module._has_any_global_hook()  # of what modules register, torch warns of none
    registered.remove()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="global hooks on modules"):
        other(torch.ones(2, 4))
    parts()[0](torch.ones(2, 4))  # the model is known, our hooks are gone
    assert torch.nn.modules.module._has_any_global_hook.__module__ == "torch.nn.modules.module"
    hook.remove()
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_model_that_the_job_drops_is_gone_and_an_update_of_another_one_begins_no_step(watched):
    model, (optimizer, _) = parts()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    watched.models.clear()
    living = weakref.ref(model)
    del model, optimizer, _
    gc.collect()
    assert living() is None
    other, (optimizer, _) = parts()
    other(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert watched.num_steps == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_a_hook_that_does_nothing_and_needs_nothing_of_ours(watched, copied):
    model, (optimizer, _) = parts()
    watched.lock = threading.Lock()  # as in a session: it can be neither copied nor pickled
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    other = copied(model)
    assert b"lagom" not in pickle.dumps(model)
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert watched.num_steps == 2  # not the copy's
