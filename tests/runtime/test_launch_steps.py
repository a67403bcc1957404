"""Steps told apart without a line of the job's code."""

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.runtime import launch_steps  # noqa: E402
from lagom_overlap.runtime.launch_steps import TrainingSteps  # noqa: E402

pytestmark = pytest.mark.torch


class Watched:
    def __init__(self):
        self.models, self.num_steps = [], 0

    def model(self, model):
        self.models.append(model)

    def step(self):
        self.num_steps += 1


@pytest.fixture
def watched():
    seen = Watched()
    steps = TrainingSteps(seen.model, seen.step, lambda module: isinstance(module, torch.nn.Sequential))
    yield seen
    steps.close()
    assert not torch.nn.modules.module._global_forward_pre_hooks


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
        def __init__(self):
            torch.nn.Module.__init__(self)

    assert launch_steps.is_trained_in_parallel(Ddp())
    assert launch_steps.is_trained(torch.nn.Linear(2, 2))
    assert not launch_steps.is_trained(torch.nn.Linear(2, 2).requires_grad_(requires_grad=False))
    assert not launch_steps.is_trained_in_parallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
