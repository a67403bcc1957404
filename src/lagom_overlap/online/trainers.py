"""Online tuning in training loops that are not written by hand: Hugging Face's Trainer, Lightning, accelerate.

    Trainer(..., callbacks=[trainer_callback(save="settings.json")])          # transformers
    lightning.Trainer(..., callbacks=[lightning_callback()])                  # lightning or pytorch_lightning
    with TunedTraining():                                                     # accelerate, or any loop
        train()

Each on every rank. None of the libraries is imported before its function is called. They wrap the model after their
callbacks are made, and say of accumulated gradients only what their own loop does; so the model and its steps are found
as in a job under `lagom run --online` (`launch_steps`), in all of them alike. Not together with `lagom run --online`,
which does the same.
"""

import contextlib
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from torch import distributed as dist
from torch import nn

from lagom_overlap.errors import MissingDependencyError, OutputError
from lagom_overlap.online.device import nccl_in_use
from lagom_overlap.online.launch_steps import TrainingSteps, is_trained, is_trained_in_parallel
from lagom_overlap.online.tuner import OnlineTuner

_log = logging.getLogger(__name__)

_LIGHTNING: Final = ("lightning.pytorch", "pytorch_lightning")
"""One library under two names, whose classes are not each other's: the one that the job has imported is meant."""


class TunedTraining:
    """Tunes whatever trains between `begin` and `end`; a context that does both.

    `save` is where rank 0 writes what was found, at the end, if a verdict adopted something. The rest is
    `OnlineTuner`'s. Where there is one rank, or none, nothing is done.
    """

    def __init__(self, *, save: str | Path | None = None, **tuner: Any) -> None:
        self._save, self._options = save, tuner
        self._steps: TrainingSteps | None = None
        self._open: contextlib.AbstractContextManager[None] | None = None
        self.tuner: OnlineTuner | None = None
        """Made at the first call of the model; None before, and where nothing is tuned."""

    def begin(self) -> None:
        """Looks for the model from now on; after the process group, on all ranks."""
        self.end()
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            _log.info("online tuning: one rank has no collectives to tune")
            return
        # On gloo an adapter has to fit the model; below NCCL any framework will do.
        accepts = is_trained_in_parallel if nccl_in_use() is None else is_trained
        self._steps = TrainingSteps(self._on_model, self._on_step, accepts, self._on_update)

    def end(self) -> None:
        """Takes every hook away and saves what was found; safe to call twice."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        self._open = None  # a step that the end cuts off does not count
        tuner, self.tuner = self.tuner, None
        if tuner is None:
            return
        try:
            if self._save is not None:
                tuner.save(self._save)
        except OutputError as error:  # what was trained is worth more
            _log.warning("the settings are not saved: %s", error)
        finally:
            tuner.close()

    def _on_model(self, model: nn.Module) -> None:
        self.tuner = OnlineTuner(model, **self._options)

    def _on_step(self) -> None:
        if self.tuner is None:
            return
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
        entered = self.tuner.step()
        entered.__enter__()
        self._open = entered

    def _on_update(self) -> None:
        if self.tuner is not None:
            self.tuner.updated()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def trainer_callback(*, save: str | Path | None = None, **tuner: Any) -> Any:
    """A `transformers.TrainerCallback` that tunes between the begin of training and its end; see `TunedTraining`.

    Raises:
        MissingDependencyError: if transformers is not installed.
    """
    training = TunedTraining(save=save, **tuner)
    base = _imported(("transformers",)).TrainerCallback

    class LagomCallback(base):  # type: ignore[misc, valid-type]  # known when it runs
        """Begins and ends online tuning with training."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            training.begin()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            training.end()

    return LagomCallback()


def lightning_callback(*, save: str | Path | None = None, **tuner: Any) -> Any:
    """A `Callback` of Lightning that tunes between the begin of training and its end; see `TunedTraining`.

    Raises:
        MissingDependencyError: if neither lightning nor pytorch_lightning is installed.
    """
    training = TunedTraining(save=save, **tuner)
    base = _imported(_LIGHTNING).Callback

    class LagomCallback(base):  # type: ignore[misc, valid-type]  # known when it runs
        """Begins and ends online tuning with training."""

        def on_train_start(self, *_: Any, **__: Any) -> None:
            training.begin()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            training.end()

        def on_exception(self, *_: Any, **__: Any) -> None:
            training.end()

    return LagomCallback()


def _imported(names: tuple[str, ...]) -> Any:
    """The first of the modules that is loaded already, else the first that can be."""
    for name in sorted(names, key=lambda name: sys.modules.get(name) is None):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    package = names[0].partition(".")[0]
    raise MissingDependencyError(f"this callback needs the package {package!r}: pip install {package}")
