"""When settings stay as they are: while a dispatch mode of the job's sees what PyTorch is asked to run."""

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lagom_emulate.hook import Hook, _mode_class  # noqa: E402
from lagom_overlap.online.tuner import why_hold  # noqa: E402

pytestmark = pytest.mark.torch


class Counting(TorchDispatchMode):
    """A user's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_the_job_hold_settings_and_that_of_emulated_gpus_does_not() -> None:
    """Or nothing could be tuned in an emulated job, which has that mode from its import of torch to its end."""
    emulated = _mode_class(Hook(torch, None))()
    assert why_hold() == ""
    with emulated:
        assert why_hold() == ""
        for mode in (Counting(), CommDebugMode()):
            with mode:
                assert "dispatch mode" in why_hold()
        assert why_hold() == ""
