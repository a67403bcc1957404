"""A cluster or a GPU in a file of one's own: the keys of a preset, nothing else."""

from importlib import resources
from pathlib import Path

import pytest

from lagom_overlap.cost.operators import load_operators
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload.models import load_model


def text_of(package: str, name: str) -> str:
    return (resources.files(package) / f"{name}.toml").read_text(encoding="utf-8")


def test_a_file_of_one_s_own_is_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    hardware = text_of("lagom_overlap.gpus", "h100").partition("# [operators")[0]
    hardware = hardware.replace("num_sms = 132", "num_sms = 114").replace("[8, 18,", "[8,").replace("[0, 2,", "[0,")
    text = text_of("lagom_overlap.clusters", "h100_dgx").replace('gpu = "h100"\n', "")
    path.write_text(text + hardware.replace('names = ["H100"]\n', ""))
    cluster = load_preset(str(path), 4)
    assert (cluster.gpu.num_sms, cluster.num_nodes) == (114, 4)
    assert cluster.gpu.own is None
    assert load_operators(cluster.gpu) == load_operators(load_preset("h100_dgx").gpu)


def test_a_model_file_of_one_s_own_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text_of("lagom_overlap.workload", "data/phi-2").replace("num_layers = 32", "num_layers = 30"))
    assert load_model(str(path)).num_layers == 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "is not TOML"),
        ('name = "x"', "missing key"),
        ("", "missing key"),
    ],
)
def test_files_that_describe_no_cluster_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=words):
        load_preset(str(path))


def test_unknown_keys_missing_files_and_broken_operators_are_named(tmp_path: Path) -> None:
    good = text_of("lagom_overlap.clusters", "h200")
    path = tmp_path / "extra.toml"
    path.write_text("speed = 3\n" + good)
    with pytest.raises(JobError, match="unknown key 'speed'"):
        load_preset(str(path))
    with pytest.raises(JobError, match="cannot be read"):
        load_preset(str(tmp_path / "none.toml"))
    path.write_text(good + '\n[operators]\nname = "x"\n')
    with pytest.raises(JobError, match=r"missing key 'operators\.fitted_on'"):
        load_operators(load_preset(str(path)).gpu)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="is not TOML"):
        load_preset(str(path))
    path.write_text("name = 3")
    with pytest.raises(JobError, match="name is 3, must be text"):
        load_model(str(path))
    path.write_text("layers = 3")
    with pytest.raises(JobError, match="unknown key 'layers'"):
        load_model(str(path))
    with pytest.raises(JobError, match="cannot be read"):
        load_model(str(tmp_path / "none.toml"))
