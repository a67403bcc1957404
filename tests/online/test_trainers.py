"""Tuning in loops of Hugging Face's Trainer, Lightning and accelerate: one step an update, each library's own loop."""

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.errors import MissingDependencyError, OutputError  # noqa: E402
from lagom_overlap.online import trainers  # noqa: E402
from lagom_overlap.online.trainers import TunedTraining, lightning_callback, trainer_callback  # noqa: E402

pytestmark = pytest.mark.torch
NUM_UPDATES, ACCUMULATED = 5, 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": self.inner(x).square().mean()}


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2 * NUM_UPDATES * ACCUMULATED

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.ones(4), "labels": torch.zeros(1)}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an online tuner is told in a job that looks like one of two ranks."""
    told: list[str] = []

    class Tuner:
        def __init__(self, model: torch.nn.Module, **options: Any) -> None:
            told.append(f"model {type(model).__name__} {options}")

        @contextlib.contextmanager
        def step(self) -> Any:
            told.append("(")
            yield
            told.append(")")

        def updated(self) -> None:
            told.append("update")

        def save(self, path: Path) -> None:
            told.append(f"save {path}")

        def close(self) -> None:
            told.append("close")

    two = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(trainers, "dist", two)
    monkeypatch.setattr(trainers, "nccl_in_use", lambda: "any module with parameters is the model")
    monkeypatch.setattr(trainers, "OnlineTuner", Tuner)
    return told


def by_hand(model: Net, callback: TunedTraining, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with callback:
        for _ in range(NUM_UPDATES):
            for _ in range(ACCUMULATED):
                model(torch.ones(4))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


def by_trainer(model: Net, callback: Any, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=NUM_UPDATES, per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATED, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=[callback]).train()


def by_lightning(model: Net, callback: Any, folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=NUM_UPDATES, accumulate_grad_batches=ACCUMULATED, callbacks=[callback],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=1))


def by_accelerate(model: Net, callback: TunedTraining, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Data(), batch_size=1))
    num_updates = 0
    with callback:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"])["loss"])
                optimizer.step()
                optimizer.zero_grad()
            num_updates += accelerator.sync_gradients
            if num_updates == NUM_UPDATES:
                break


LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "by hand": (TunedTraining, by_hand),
    "transformers": (trainer_callback, by_trainer),
    "lightning": (lightning_callback, by_lightning),
    "accelerate": (TunedTraining, by_accelerate),
}


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_is_one_update_however_many_batches_it_accumulates(name: str, told: list[str], tmp_path: Path) -> None:
    make, train = LOOPS[name]
    for package in {"transformers": ("accelerate", "transformers"), "by hand": ()}.get(name, (name,)):
        pytest.importorskip(package)
    train(Net(), make(save="found.json", max_steps=50), tmp_path)
    step = ["(", "update", ")"]
    # Lightning trains its own module's part; the last step has no next one that would end it.
    assert told == ["model Net {'max_steps': 50}", *step * (NUM_UPDATES - 1), "(", "update", "save found.json", "close"]


def test_nothing_of_ours_is_left_after_the_end(told: list[str], tmp_path: Path) -> None:
    model = Net()
    by_hand(model, TunedTraining(), tmp_path)
    num_told = len(told)
    by_hand(model, TunedTraining(), tmp_path)
    assert told[num_told:] == told[:num_told]
    assert not model._forward_pre_hooks


def test_settings_that_cannot_be_saved_do_not_end_the_job(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, path: Path) -> None:
        raise OutputError("cannot write 'found.json': No space left on device")

    monkeypatch.setattr(trainers.OnlineTuner, "save", refuse)
    by_hand(Net(), TunedTraining(save="found.json"), tmp_path)
    assert "No space left on device" in caplog.text
    assert told[-1] == "close"


def test_one_process_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, caplog_level = Net(), logging.INFO
    with caplog.at_level(caplog_level):
        by_hand(model, TunedTraining(), tmp_path)
    assert "one rank has no collectives to tune" in caplog.text
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("make", "package"), [(trainer_callback, "transformers"), (lightning_callback, "lightning")])
def test_a_library_that_is_missing_is_named(
    make: Callable[[], Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=f"needs the package '{package}': pip install {package}"):
        make()


def test_of_lightnings_two_names_the_one_that_the_job_has_imported_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("pytorch_lightning")
    old.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", old)
    assert isinstance(lightning_callback(), old.Callback)  # type: ignore[attr-defined]
