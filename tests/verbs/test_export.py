"""`lagom export`: from a run folder to files, through the command line."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from lagom_overlap.cli import main
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.export.env_file import env_file
from lagom_overlap.nccl_plugin.table_reader import read_table
from lagom_overlap.verbs.export import read_deployment

PHI2 = """
[job]
name = "toy"
[model]
name = "phi-2"
seq_len = 2048
[cluster]
preset = "a40_nvlink"
[parallel]
fsdp = 8
micro_batch = 2
[tune]
pairs = 3
budget = { measurements = 40 }
[tune.space]
algorithm = ["ring"]
protocol = ["simple"]
num_channels = [1, 2, 4, 8, 16]
chunk_bytes = ["128 KiB", "512 KiB", "2 MiB"]
"""
SHAPES = """
[job]
name = "shapes"
ranks = 8
[cluster]
preset = "a40_nvlink"
[[group]]
name = "block"
count = 3
op = [{ name = "mm", gemm = [8192, 8192, 8192] }]
comm = [
    { name = "ag", kind = "all_gather", bytes = "64 MiB", communicator = "dp" },
    { name = "rs", kind = "reduce_scatter", bytes = "64 MiB", communicator = "dp" },
]
[tune]
pairs = 3
budget = { measurements = 30 }
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, text in {"model": PHI2, "shapes": SHAPES}.items():
        (folder / f"{name}.toml").write_text(text)
        assert main(["tune", str(folder / f"{name}.toml"), "--out", str(folder / name)]) == 0
    return folder


def export(capsys, *arguments):
    code = main(["export", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else captured.err


@pytest.mark.parametrize("name", ["model", "shapes"])
def test_every_form_is_written_beside_the_run_and_says_what_it_lacks(runs, capsys, name):
    fit = []
    for form in ("plugin", "nvidia_csv", "env", "megatron_yaml", "perfetto"):
        code, said = export(capsys, runs / name, "--format", form, "--group", "fsdp=dp_cp", "--group", "dp=dp")
        fit += ["--format", form] if code == 0 else []
        assert code == 0 or f"fits {form}: " in said
    assert {"plugin", "perfetto"} < set(fit[1::2])
    code, result = export(capsys, runs / name, *fit, "--group", "fsdp=dp_cp", "--group", "dp=dp")
    assert code == 0
    assert [file["format"] for file in result["files"]] == fit[1::2]
    for file in result["files"]:
        assert (runs / name) in type(runs)(file["path"]).parents
        assert file["not_carried"]
    assert result["num_rows"] > 0


def test_the_table_holds_what_configs_toml_says(runs, capsys):
    export(capsys, runs / "shapes", "--format", "plugin")
    table = read_table(runs / "shapes" / "lagom_table.bin")
    run = json.loads((runs / "shapes" / "run.json").read_text())["result"]
    tuned = run["configs"]["block"]
    assert {d.kind.value for d in table.decisions} <= {"all_gather", "reduce_scatter"}
    for decision in table.decisions:
        asked = tuned["ag" if decision.kind == "all_gather" else "rs"]
        assert decision.occurrence is None  # the job does not say how often: every call
        assert (decision.config.num_channels, decision.config.chunk_bytes) == (
            asked["num_channels"],
            asked["chunk_bytes"],
        )
        assert decision.communicator.num_ranks == 8
        assert decision.communicator.num_nodes == 1


def test_calls_of_a_model_are_told_apart_by_occurrence(runs, capsys):
    _, result = export(capsys, runs / "model", "--format", "plugin")
    table = read_table(runs / "model" / "lagom_table.bin")
    assert any(decision.occurrence is not None for decision in table.decisions)
    assert result["num_rows"] >= len(
        [d for d in table.decisions if d.occurrence is not None and not d.config.is_untouched]
    )


def test_a_run_that_was_not_adopted_sets_nothing(runs, capsys, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(SHAPES.replace("budget", 'tuner = "default"\nbudget'))
    assert main(["tune", str(job), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    code, result = export(capsys, tmp_path / "run", "--format", "plugin")
    assert code == 0
    assert result["num_rows"] == 0
    assert any("did not adopt" in note for note in result["files"][0]["not_carried"])


def test_files_go_where_they_are_asked_to(runs, capsys, tmp_path):
    code, result = export(capsys, runs / "shapes", "--format", "env", "--out", tmp_path)
    assert code == 0
    assert result["files"][0]["path"] == str(tmp_path / "nccl.env")
    assert (tmp_path / "nccl.env").stat().st_mode & 0o777 == 0o600


def test_a_new_output_folder_is_made_and_private_but_not_for_a_form_that_is_refused(runs, capsys, tmp_path):
    new = tmp_path / "new"
    refused = ("--format", "env", "--format", "megatron_yaml", "--group", "fsdp=nope")
    assert main(["export", str(runs / "model"), *refused, "--out", str(new)]) == 2
    assert not new.exists()
    capsys.readouterr()
    code, _ = export(capsys, runs / "shapes", "--format", "env", "--out", new)
    assert code == 0
    assert new.stat().st_mode & 0o777 == 0o700
    assert [held.name for held in new.iterdir()] == ["nccl.env"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing", "--format", "env"], "does not exist"),
        ([".", "--format", "env"], "no run folder"),
        (["shapes", "--format", "env", "--out", "nowhere/deeper"], "output folder"),
        (["model", "--format", "megatron_yaml", "--group", "fsdp=nope"], "no group 'nope'"),
        (["model", "--format", "megatron_yaml"], "nothing that 'model' set fits megatron_yaml: "),
        (["model", "--format", "sql"], "invalid choice"),
        (["model", "--format", "megatron_yaml", "--group", "fsdp"], "is not NAME=GROUP"),
        (["model"], "required"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(runs)
    try:
        code = main(["export", *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert words in error
    assert error.count("\n") == 1


def test_a_damaged_configs_file_is_named(runs, capsys, tmp_path):
    import shutil

    copy = shutil.copytree(runs / "shapes", tmp_path / "run")
    (copy / "configs.toml").write_text('adopted = true\n[groups.block.ag]\nnum_channels = "many"\n[groups.block.rs]\n')
    code, error = export(capsys, copy, "--format", "plugin")
    assert code == 2
    assert "configs.toml" in error
    assert "num_channels" in error


def test_saved_settings_of_an_online_run_are_exported_like_a_run(tmp_path, capsys):
    call = {"description": "nccl on 1 node", "num_ranks": 8, "creation_order": 0, "kind": "all_gather"}
    config = {"algorithm": "ring", "protocol": "simple", "transport": None, "num_channels": 4, "num_threads": None}
    settings = [
        {"site": {"call": call | {"num_bytes": 1 << 20}, "occurrence": n}, "config": config | {"chunk_bytes": None}}
        for n in range(2)
    ]
    saved = {
        "format": "lagom-online",
        "version": 3,
        "cycles": [
            {
                "description": "nccl on 1 node",
                "num_ranks": 8,
                "creation_order": 0,
                "calls": [["all_gather", 1 << 20], ["reduce_scatter", 1 << 21], ["all_gather", 1 << 20]],
            }
        ],
        "size_octaves": 0,
        "world_size": 8,
        "route": "plugin",
        "is_adopted": True,
    }
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(saved | {"settings": settings, "verdict": "", "date": ""}))
    code, result = export(capsys, path, "--format", "plugin", "--format", "env")
    assert (code, result["num_rows"]) == (0, 2)
    table = read_table(tmp_path / "lagom_table.bin")
    assert [(d.num_bytes, d.kind) for d in table.calls] == [
        (1 << 20, CollectiveKind.ALL_GATHER),
        (1 << 21, CollectiveKind.REDUCE_SCATTER),
        (1 << 20, CollectiveKind.ALL_GATHER),
    ]
    assert [(d.occurrence, d.config.num_channels) for d in table.decisions] == [(None, 4), (None, None)]
    assert [known.max_channels for known in table.communicators] == [4]
    assert "NCCL_MAX_CTAS=4" in (tmp_path / "nccl.env").read_text()
    path.write_text(json.dumps(saved | {"settings": settings, "version": 9}))
    code, error = export(capsys, path, "--format", "plugin")
    assert code == 2
    assert "version 9" in error


def test_the_line_that_says_how_to_use_the_variables_sets_them_in_a_shell(runs, capsys, tmp_path):
    out = tmp_path / "with a space"
    _, result = export(capsys, runs / "shapes", "--format", "env", "--format", "plugin", "--out", out)
    env, plugin = result["files"]
    assert plugin["use"] == f"lagom run --config '{out / 'lagom_table.bin'}' -- COMMAND"
    wanted = dict(row.split("=", 1) for row in (out / "nccl.env").read_text().splitlines() if not row.startswith("#"))
    line = env["use"].replace("COMMAND", f"printenv {' '.join(wanted)}")
    shown = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True).stdout.split()
    assert shown == list(wanted.values())
    assert wanted


def test_variables_of_a_whole_process_name_no_knob_that_the_run_left_as_it_was(runs):
    deployment = read_deployment(runs / "shapes").deployment
    rows = dict(deployment.table)
    default = next(iter(rows.values()))
    # One kind of collective is told fewer channels; algorithm and protocol are what NCCL chose by itself.
    assert deployment.changed is not None
    assert not {"algorithm", "protocol"} & deployment.changed
    written = env_file(deployment).content.decode()
    assert "NCCL_ALGO" not in written
    assert "NCCL_PROTO" not in written
    known = env_file(replace(deployment, changed=None)).content.decode()
    assert (default.algorithm is not None) is ("NCCL_ALGO" in known)


def test_a_count_that_no_table_holds_is_told_in_words(runs, capsys, tmp_path):
    shutil.copytree(runs / "shapes", tmp_path / "run")
    path = tmp_path / "run" / "configs.toml"
    path.write_text(re.sub("num_channels = [0-9]+", "num_channels = 999999999999", path.read_text()))
    code, error = export(capsys, tmp_path / "run", "--format", "plugin")
    assert code == 2
    assert "of 67108864 bytes on 'dp': num_channels is 999999999999, at most " in error
