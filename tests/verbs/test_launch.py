"""`lagom run`: what the command's environment holds, and that it is the command that runs."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.cli import main
from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.errors import BundleError, JobError, LagomError, OutputError, UnknownNameError
from lagom_overlap.export.plugin_table import checksum_of
from lagom_overlap.export.run_variables import RunMode
from lagom_overlap.jobfile.online_settings import read_online_deployment
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.nccl_plugin.table_reader import read_table
from lagom_overlap.nccl_plugin.table_writer import encode_table
from lagom_overlap.online import launch_session
from lagom_overlap.verbs import run as launch
from lagom_overlap.verbs.run import LaunchRequest, command_of, prepare
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

PYTHON = sys.executable
SOURCE = str(Path(launch.__file__).parents[2])
KEY = ConfigKey(
    communicator=CommunicatorId(description="fsdp", ranks=(0, 1)), kind=CollectiveKind.ALL_GATHER, num_bytes=1 << 20
)


@pytest.fixture
def plugin_library(tmp_path, monkeypatch):
    path = tmp_path / "lib" / "liblagom_tuner.so"
    monkeypatch.setattr(launch, "installed_library", lambda: path)
    return path


JOB = """
[job]
name = "toy"
ranks = 8
[cluster]
preset = "a40_nvlink"
[[group]]
name = "g"
op = [{ name = "mm", gemm = [8192, 8192, 8192] }]
comm = [{ name = "ag", kind = "all_gather", bytes = "64 MiB" }]
[tune]
pairs = 3
budget = { measurements = 4 }
"""


@pytest.fixture(scope="module")
def simulated_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "job.toml").write_text(JOB)
    assert main(["tune", str(folder / "job.toml"), "--out", str(folder / "run"), "--json"]) == 0
    return folder / "run"


def run_folder(path, simulated_run, backend):
    """The run as if another backend had measured it."""
    shutil.copytree(simulated_run, path)
    lines = (path / "measurements.jsonl").read_text()
    assert lines.count('"backend":"simulated"') == 1
    (path / "measurements.jsonl").write_text(lines.replace('"backend":"simulated"', f'"backend":"{backend}"'))
    return path


def environment(**more):
    return {"PATH": os.environ["PATH"], **more}


def request(tmp_path, mode=RunMode.OBSERVE, **more):
    return LaunchRequest(command=(PYTHON, "train.py"), mode=mode, out=tmp_path / "run", **more)


def saved_settings(path, route="plugin", **more):
    call = {"description": "fsdp", "num_ranks": 2, "creation_order": 0, "kind": "all_gather", "num_bytes": 1 << 20}
    config = dict.fromkeys(("algorithm", "protocol", "transport", "num_threads", "chunk_bytes"))
    setting = {"site": {"call": call, "occurrence": 1}, "config": config | {"num_channels": 4}}
    role = {name: call[name] for name in ("description", "num_ranks", "creation_order")}
    saved = {
        "format": "lagom-online",
        "version": 3,
        "cycles": [role | {"calls": [["all_gather", 1 << 20]] * 3}],
        "size_octaves": 0,
        "world_size": 2,
        "route": route,
        "is_adopted": True,
    }
    path.write_text(json.dumps(saved | {"settings": [setting], "verdict": "", "date": ""} | more))
    return path


def test_saved_settings_of_a_class_of_sizes_set_all_of_its_sizes(tmp_path, plugin_library):
    path = saved_settings(tmp_path / "lagom.json", size_octaves=1)
    made = prepare(request(tmp_path, RunMode.FIXED, config=path), environment())
    [row] = read_table(Path(made.environment["LAGOM_TABLE"])).decisions
    assert (row.first_bytes, row.last_bytes, row.occurrence) == (1 << 20, (2 << 20) - 1, 1)
    damaged = saved_settings(tmp_path / "damaged.json", size_octaves=3)
    with pytest.raises(BundleError, match="size_octaves is 3"):
        prepare(request(tmp_path, RunMode.FIXED, config=damaged), environment())


TASK = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
"""Of a launcher's task: its siblings may have made the folder."""


@pytest.mark.parametrize("kind", ["link", "open", "sticky", "file", "nobody's"])
@pytest.mark.parametrize("named", [True, False])
def test_tasks_share_no_folder_that_is_not_theirs(tmp_path, plugin_library, monkeypatch, kind, named):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("run" if named else "lagom-runs")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    match kind:
        case "link":
            folder.symlink_to(other)
        case "file":
            folder.touch()
        case "nobody's":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            folder.mkdir(mode=0o700)
            os.chown(folder, 65_534, 65_534)
        case _:
            folder.mkdir()
            folder.chmod(0o777 if kind == "open" else 0o1777)
    asked = LaunchRequest(command=(PYTHON, "train.py"), mode=RunMode.ONLINE, out=folder if named else None)
    with pytest.raises(OutputError, match="output folder") as refusal:
        prepare(asked, environment(**TASK))
    assert "\n" not in str(refusal.value)
    with pytest.raises(OutputError, match="output folder"):
        prepare(asked, environment())
    assert not any(other.iterdir())


def test_tasks_share_the_folder_that_the_first_of_them_makes(tmp_path, plugin_library):
    folders = {prepare(request(tmp_path, RunMode.ONLINE), environment(**TASK)).folder for _ in range(2)}
    assert folders == {tmp_path / "run"}


def test_a_communicator_keeps_its_place_though_nothing_is_known_of_those_before_it(tmp_path, plugin_library):
    path = saved_settings(tmp_path / "lagom.json")
    text = path.read_text().replace('"creation_order": 0', '"creation_order": 2')
    path.write_text(text)
    made = prepare(request(tmp_path, RunMode.FIXED, config=path), environment())
    table = read_table(Path(made.environment["LAGOM_TABLE"]))
    assert [known.creation_order for known in table.communicators] == [0, 1, 2]
    assert {row.communicator.creation_order for row in (*table.decisions, *table.calls)} == {2}
    path.write_text(text.replace('"creation_order": 2', '"creation_order": 99999'))
    with pytest.raises(JobError, match="more than the 1024 communicators"):
        prepare(request(tmp_path, RunMode.FIXED, config=path), environment())


def test_observing_loads_the_plug_in_with_a_record_and_no_table(tmp_path, plugin_library):
    made = prepare(request(tmp_path), environment(KEPT="1", PYTHONPATH="/theirs"))
    added = dict(made.environment)
    assert added.pop("KEPT") == "1"
    assert added["NCCL_TUNER_PLUGIN"] == str(plugin_library)
    assert added["LAGOM_RECORD"] == str(tmp_path / "run" / "record.%r.bin")
    assert "LAGOM_TABLE" not in added
    assert added["LAGOM_RUN_MODE"] == "observe"
    boot, theirs = added["PYTHONPATH"].split(os.pathsep)
    assert theirs == "/theirs"
    assert (Path(boot) / "sitecustomize.py").is_file()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_online_tuning_starts_from_the_untouched_job(tmp_path, plugin_library):
    for mode, config in ((RunMode.ONLINE, None), (RunMode.PROVE, saved_settings(tmp_path / "lagom.json"))):
        asked = LaunchRequest(command=(PYTHON, "train.py"), mode=mode, config=config, out=tmp_path / mode)
        made = prepare(asked, environment(LAGOM_TABLE="/somebodys/table.bin"))
        assert made.environment["LAGOM_TABLE"] == ""
        assert "LAGOM_TABLE of the environment is left out: the job begins untouched" in made.warnings
        assert made.environment["LAGOM_RECORD"] == str(tmp_path / mode / "record.%r.bin")


def test_online_tuning_loads_the_profiler_plug_in_and_the_other_modes_do_not(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.ONLINE), environment())
    assert made.environment["NCCL_PROFILER_PLUGIN"] == str(plugin_library)
    assert made.environment["LAGOM_PROFILE"] == str(tmp_path / "run" / "profile.%r.bin")
    (tmp_path / "again").mkdir()
    observed = prepare(request(tmp_path / "again"), environment()).environment
    assert not {"NCCL_PROFILER_PLUGIN", "LAGOM_PROFILE"} & set(observed)


@pytest.mark.parametrize("named", ["inspector", "none", "/site/libprofiler.so"])
def test_the_users_own_profiler_stays_and_that_is_said_in_a_line(tmp_path, plugin_library, named):
    made = prepare(request(tmp_path, RunMode.ONLINE), environment(NCCL_PROFILER_PLUGIN=named))
    assert made.environment["NCCL_PROFILER_PLUGIN"] == named
    assert "LAGOM_PROFILE" not in made.environment
    (line,) = made.warnings
    assert "measured steps are timed by PyTorch's" in line


def test_a_profiler_that_nccl_would_find_by_its_name_stays_too(tmp_path, plugin_library):
    (tmp_path / "libnccl-profiler.so").touch()
    searched = os.pathsep.join(("/nowhere", str(tmp_path)))
    made = prepare(request(tmp_path, RunMode.ONLINE), environment(LD_LIBRARY_PATH=searched))
    assert "NCCL_PROFILER_PLUGIN" not in made.environment
    (line,) = made.warnings
    assert line.startswith("libnccl-profiler.so of LD_LIBRARY_PATH stays")


@pytest.mark.parametrize(
    ("before", "chained"),
    [
        ({"NCCL_TUNER_PLUGIN": "site"}, "site"),
        ({"NCCL_TUNER_PLUGIN": "none"}, "none"),
        ({}, None),
        ({"NCCL_TUNER_PLUGIN": "/old/liblagom_tuner.so"}, None),
        ({"NCCL_TUNER_PLUGIN": "site", "LAGOM_CHAIN_TUNER": "other"}, "other"),
    ],
)
def test_the_tuner_that_was_named_before_is_chained_to(tmp_path, plugin_library, before, chained):
    made = prepare(request(tmp_path), environment(**before))
    assert made.environment.get("LAGOM_CHAIN_TUNER") == chained


def test_conflicting_variables_are_said_and_left_alone(tmp_path, plugin_library):
    before = environment(NCCL_ALGO="Ring", NCCL_MAX_CTAS="8", CUDA_DEVICE_MAX_CONNECTIONS="8", NCCL_DEBUG="INFO")
    made = prepare(request(tmp_path), before)
    assert [warning.split("=")[0] for warning in made.warnings] == ["NCCL_ALGO", "NCCL_MAX_CTAS"]
    assert made.environment["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_tuner_that_nccls_configuration_file_names_is_chained_to(tmp_path, plugin_library, is_named):
    """NCCL does not overwrite what is set: the file's tuner would be lost behind ours."""
    conf = tmp_path / (".nccl.conf" if not is_named else "site.conf")
    conf.write_text("# the site's\n#NCCL_TUNER_PLUGIN=older\nNCCL_TUNER_PLUGIN=libcloud.so\r\nNCCL_ALGO=Ring\n")
    own = {"NCCL_CONF_FILE": str(conf)} if is_named else {"HOME": str(tmp_path)}
    made = prepare(request(tmp_path), environment(**own))
    assert made.environment["LAGOM_CHAIN_TUNER"] == "libcloud.so"
    assert made.environment["NCCL_TUNER_PLUGIN"] == str(plugin_library)
    assert any(warning.startswith("NCCL_ALGO=Ring") for warning in made.warnings)
    assert "NCCL_ALGO" not in made.environment  # NCCL reads its files itself
    (tmp_path / "again").mkdir()
    set_here = prepare(request(tmp_path / "again"), environment(**own, NCCL_TUNER_PLUGIN="mine"))
    assert set_here.environment["LAGOM_CHAIN_TUNER"] == "mine"


def test_disabled_the_environment_is_the_users_own(tmp_path):
    before = environment(LAGOM_DISABLE="1", NCCL_TUNER_PLUGIN="site")
    made = prepare(request(tmp_path), before)
    assert made.environment == before
    assert not (tmp_path / "run").exists()
    assert len(made.warnings) == 1


def test_a_table_file_is_checked_and_copied_with_private_permissions(tmp_path, plugin_library):
    table = tmp_path / "table.bin"
    table.write_bytes(encode_table(ConfigTable({KEY: CommConfig(num_channels=2)}), generation=7).data)
    made = prepare(request(tmp_path, RunMode.FIXED, config=table), environment())
    held = Path(made.environment["LAGOM_TABLE"])
    assert held.parent == tmp_path / "run"
    assert read_table(held).generation == 7
    assert held.stat().st_mode & 0o777 == 0o600


def test_the_launcher_says_which_table_it_wrote(tmp_path, plugin_library):
    """Ranks take the file by what it holds, whoever owns it there."""
    made = prepare(request(tmp_path, RunMode.FIXED, config=saved_settings(tmp_path / "s.json")), environment())
    data = Path(made.environment["LAGOM_TABLE"]).read_bytes()
    assert made.environment["LAGOM_RUN_TABLE"] == hashlib.sha256(data).hexdigest()
    (tmp_path / "again").mkdir()
    assert "LAGOM_RUN_TABLE" not in prepare(request(tmp_path / "again", RunMode.ONLINE), environment()).environment


def of_another_user(descriptor):
    os.fchown(descriptor, 65534, -1)


def writable_by_all(descriptor):
    os.fchmod(descriptor, 0o666)


@pytest.mark.parametrize(("mode", "variable"), [(RunMode.FIXED, "LAGOM_TABLE"), (RunMode.ONLINE, "LAGOM_RECORD")])
@pytest.mark.parametrize(("harm", "words"), [(of_another_user, "belongs to user 65534"), (writable_by_all, "others")])
def test_where_files_are_not_this_users_own_the_plug_ins_are_kept_on_this_machine(
    tmp_path, plugin_library, monkeypatch, *, mode, variable, harm, words
):
    """Root-squashed NFS, EFS, CIFS: the plug-in would refuse its table, and each rank its record."""
    if harm is of_another_user and os.geteuid() != 0:
        pytest.skip("needs root: gives a file to another user")
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    made_in = tempfile.NamedTemporaryFile

    def shared(**options):
        file = made_in(**options)
        harm(file.fileno())
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", shared)
    config = saved_settings(tmp_path / "s.json") if mode is RunMode.FIXED else None
    made = prepare(request(tmp_path, mode, config=config), environment())
    path = Path(made.environment[variable])
    assert path.parent.parent == local
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert made.folder == tmp_path / "run"  # reports and saved settings stay where the user wants them
    assert not list(made.folder.glob("*.bin"))
    (line,) = [warning for warning in made.warnings if str(path.parent) in warning]
    assert words in line


def test_settings_that_online_tuning_saved_become_a_table_with_the_steps_calls(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.FIXED, config=saved_settings(tmp_path / "s.json")), environment())
    table = read_table(Path(made.environment["LAGOM_TABLE"]))
    (decision,) = table.decisions
    assert (decision.occurrence, decision.config.num_channels) == (1, 4)
    assert [(call.communicator.description, call.num_bytes) for call in table.calls] == [("fsdp", 1 << 20)] * 3
    assert made.environment["LAGOM_RUN_ENGINE"] == ""  # the file notes none; ranks refuse it


def test_a_run_that_was_not_adopted_sets_nothing_and_it_is_said(tmp_path, plugin_library, simulated_run):
    refused = run_folder(tmp_path / "tuned", simulated_run, "simulated")
    (refused / "configs.toml").write_text("adopted = false\n[groups.g.ag]\n")
    made = prepare(request(tmp_path, RunMode.FIXED, config=refused), environment())
    assert read_table(Path(made.environment["LAGOM_TABLE"])).decisions == ()
    assert any("nothing is set" in warning for warning in made.warnings)


def test_settings_of_gloo_that_set_nothing_are_no_line_to_type(tmp_path):
    saved = saved_settings(tmp_path / "s.json", route="gloo", settings=[], is_adopted=False)
    with pytest.raises(JobError, match="sets nothing: the default was not beaten"):
        read_online_deployment(saved)


def test_online_tuning_starts_from_saved_settings(tmp_path, plugin_library):
    saved = saved_settings(tmp_path / "s.json", route="gloo")
    made = prepare(request(tmp_path, RunMode.ONLINE, config=saved), environment())
    assert made.environment["LAGOM_RUN_CONFIG"] == str(saved)


def test_online_tuning_searches_with_the_tuner_that_is_named(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.ONLINE, tuner="lagom"), environment())
    assert made.environment["LAGOM_RUN_TUNER"] == "lagom"
    with pytest.raises(UnknownNameError, match="unknown tuner 'lagon'"):
        prepare(request(tmp_path, RunMode.ONLINE, tuner="lagon"), environment())
    with pytest.raises(JobError, match="--tuner has no meaning without --online"):
        request(tmp_path, RunMode.OBSERVE, tuner="lagom")


def test_adapters_that_are_named_reach_the_ranks_and_those_of_saved_settings_do_with_them(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.ONLINE, adapters=("calls",)), environment())
    assert made.environment["LAGOM_RUN_ADAPTERS"] == "calls"
    saved = saved_settings(tmp_path / "saved.json", route="gloo", adapters=("calls",))
    for mode in (RunMode.FIXED, RunMode.ONLINE, RunMode.PROVE):
        (tmp_path / mode).mkdir()
        made = prepare(request(tmp_path / mode, mode, config=saved), environment())
        assert made.environment["LAGOM_RUN_ADAPTERS"] == "calls"
    with pytest.raises(UnknownNameError, match=r"adapter.*'call'.*calls"):
        request(tmp_path, RunMode.ONLINE, adapters=("call",))
    with pytest.raises(JobError, match="--adapters has no meaning without --online"):
        request(tmp_path, RunMode.OBSERVE, adapters=("calls",))


def test_online_tuning_compares_the_tuners_that_are_named(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.ONLINE, compare=("lagom", "autoccl")), environment())
    assert launch_session.options_of("online", made.environment).compare == ("lagom", "autoccl")
    assert json.loads((made.folder / "run.json").read_text())["request"]["compare"] == ["lagom", "autoccl"]
    assert launch_session.options_of("online", environment()).compare == ()
    with pytest.raises(UnknownNameError, match="unknown tuner 'lagon'"):
        prepare(request(tmp_path, RunMode.ONLINE, compare=("lagon",)), environment())
    with pytest.raises(JobError, match="--compare has no meaning without --online"):
        request(tmp_path, RunMode.OBSERVE, compare=("lagom",))
    for names in (("ours",), ("lagom", "lagom"), ("default",)):
        with pytest.raises(JobError, match="allowed: different tuners other than default and ours"):
            request(tmp_path, RunMode.ONLINE, compare=names)


def test_online_tuning_is_told_how_long_the_job_is(tmp_path, plugin_library):
    made = prepare(request(tmp_path, RunMode.ONLINE, job_steps=70_000), environment())
    assert launch_session.options_of("online", made.environment).job_steps == 70_000
    assert launch_session.options_of("online", environment()).job_steps == 0
    with pytest.raises(JobError, match="--job-steps has no meaning without --online"):
        request(tmp_path, RunMode.OBSERVE, job_steps=70_000)


def test_a_proof_in_the_job_has_as_many_pairs_as_are_asked_for(tmp_path):
    saved_settings(tmp_path / "lagom.json", route="gloo")
    made = prepare(request(tmp_path, RunMode.PROVE, config=tmp_path / "lagom.json", num_pairs=60), environment())
    assert launch_session.options_of("prove", made.environment).num_pairs == 60
    assert launch_session.options_of("prove", environment()).num_pairs == 25


def test_without_the_plug_in_the_job_runs_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("lagom_overlap.nccl_plugin.library.lagom_overlap.__path__", [str(tmp_path)])
    monkeypatch.setattr(launch, "boot_folder", lambda: tmp_path)
    made = prepare(request(tmp_path), environment())
    assert "NCCL_TUNER_PLUGIN" not in made.environment
    assert "out of reach" in made.warnings[0]


def test_tasks_that_a_launcher_starts_at_once_share_one_folder(tmp_path, plugin_library, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slurm = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    made = {
        prepare(
            LaunchRequest(command=(PYTHON,), mode=RunMode.OBSERVE), environment(**slurm, SLURM_PROCID=str(task))
        ).folder
        for task in range(4)
    }
    assert made == {tmp_path / "lagom-runs" / "observe-job12.3"}
    for _ in range(2):
        named = prepare(request(tmp_path), environment(OMPI_COMM_WORLD_SIZE="2"))
        assert named.folder == tmp_path / "run"
    with pytest.raises(LagomError, match="--out"):
        prepare(LaunchRequest(command=(PYTHON,), mode=RunMode.OBSERVE), environment(WORLD_SIZE="2"))
    with pytest.raises(LagomError, match="cannot create"):
        prepare(
            LaunchRequest(command=(PYTHON,), mode=RunMode.OBSERVE, out=tmp_path / "no" / "run"),
            environment(WORLD_SIZE="2"),
        )


@pytest.mark.parametrize("words", [("--nnodes", "2"), ("--nnodes=1:4",), ()])
def test_machines_that_each_start_a_torchrun_of_one_job_share_the_folder_that_is_named(
    tmp_path, plugin_library, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    named = LaunchRequest(command=(PYTHON, *words, "train.py"), mode=RunMode.OBSERVE, out=tmp_path / "run")
    world = environment(**({} if words else {"PET_NNODES": "2"}))
    assert {prepare(named, world).folder for _ in range(2)} == {tmp_path / "run"}
    own = LaunchRequest(command=named.command, mode=RunMode.OBSERVE)
    assert prepare(own, world).folder != prepare(own, world).folder
    alone = LaunchRequest(command=(PYTHON, "--nnodes", "1", "train.py"), mode=RunMode.OBSERVE, out=tmp_path / "run")
    with pytest.raises(LagomError, match="exists"):
        prepare(alone, environment())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--observe"], "no command"),
        (["--observe", "--"], "no command"),
        (["--", PYTHON], "nothing to do"),
        (["--observe", "--config", "x", "--", PYTHON], "no meaning with --observe"),
        (["--observe", "--online", "--", PYTHON], "not allowed with"),
        (["--observe", "--", "no-such-program"], "'no-such-program' does not exist"),
        (["--config", "missing", "--", PYTHON], "does not exist"),
        (["--config", "damaged.json", "--", PYTHON], "damaged"),
        (["--config", "not_adopted.json", "--", PYTHON], "is_adopted is false, but it has 1 settings"),
        (["--online", "--config", "not_adopted.json", "--", PYTHON], "is_adopted is false, but it has 1 settings"),
        (["--config", "twice.json", "--", PYTHON], "settings[1] is for the same call as settings[0]"),
        (["--config", "two_cycles.json", "--", PYTHON], "cycles[1] is for the same communicator as cycles[0]"),
        (["--config", "no_route.json", "--", PYTHON], "on the route 'pigeon'; allowed: gloo, plugin, sibling"),
        (["--prove", "no_route.json", "--", PYTHON], "on the route 'pigeon'; allowed: gloo, plugin, sibling"),
        (["--config", "no_cycle.json", "--", PYTHON], "sets call 1 of all_gather, 1048576 bytes, on 'fsdp', but its"),
        (["--config", "few_calls.json", "--", PYTHON], "sets call 1 of all_gather, 1048576 bytes, on 'fsdp', but its"),
        (["--config", "threads.json", "--", PYTHON], "settings[0]: num_threads is 64, but gloo has no such knob"),
        (
            ["--online", "--config", "threads.json", "--", PYTHON],
            "settings[0]: num_threads is 64, but gloo has no such",
        ),
        (["--config", "nul.env", "--", PYTHON], "line 2: NCCL_ALGO holds a NUL, which no value can"),
        (["--prove", "missing", "--", PYTHON], "does not exist"),
        (["--prove", "empty.json", "--", PYTHON], "nothing can be proven"),
        (["--prove", "gloo.json", "--config", "gloo.json", "--", PYTHON], "--config has no meaning with --prove"),
        (["--restarts", "7", "--config", "gloo.json", "--", PYTHON], "--restarts has no meaning without --prove"),
        (["--prove", "gloo.json", "--restarts", "5", "--", PYTHON], "allowed: 6 to 50"),
        (["--prove", "gloo.json", "--pairs", "102", "--", PYTHON], "'102' is not a number of pairs; allowed: 8 to 101"),
        (["--pairs", "50", "--observe", "--", PYTHON], "--pairs has no meaning without --prove"),
        (
            ["--prove", "gloo.json", "--restarts", "7", "--pairs", "50", "--", PYTHON],
            "by restarts, which has --restarts",
        ),
        (["--online", "--job-steps", "0", "--", PYTHON], "'0' is no number of steps; allowed: 1 to 1000000000000"),
        (["--config", "bad.env", "--", PYTHON], "line 2: 'NCCL_ALGO' is not NAME=value"),
        (["--config", "ours.env", "--", PYTHON], "PYTHONPATH is lagom run's own"),
        (["--config", "empty.toml", "--", PYTHON], "'empty.toml' is no plan"),
        (["--config", "observed", "--", PYTHON], "saved no settings"),
        (["--config", "run_on_workers", "--", PYTHON], "tuned on workers"),
        (["--config", "run_on_gloo", "--", PYTHON], "tuned on gloo"),
        (["--config", "no_table.bin", "--", PYTHON], "plug-in table"),
        (["--online", "--config", "missing", "--", PYTHON], "does not exist"),
        (["--online", "--config", "no_table.bin", "--", PYTHON], "settings that online tuning saved"),
        (["--config", ".", "--", PYTHON], "no run folder"),
        (["--observe", "--out", "taken", "--", PYTHON], "exists already"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_starts_nothing(
    tmp_path, monkeypatch, capsys, *, simulated_run, arguments, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "replace_process", lambda _: pytest.fail("started"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "no_table.bin").write_bytes(b"nothing")
    saved_settings(tmp_path / "gloo.json", route="gloo")
    saved_settings(tmp_path / "empty.json", settings=[], is_adopted=False)
    (setting,) = json.loads((tmp_path / "gloo.json").read_text())["settings"]
    (cycle,) = json.loads((tmp_path / "gloo.json").read_text())["cycles"]
    saved_settings(tmp_path / "not_adopted.json", is_adopted=False)
    saved_settings(tmp_path / "twice.json", settings=[setting, setting])
    saved_settings(tmp_path / "two_cycles.json", cycles=[cycle, cycle])
    saved_settings(tmp_path / "no_route.json", route="pigeon")
    saved_settings(tmp_path / "no_cycle.json", cycles=[])
    saved_settings(tmp_path / "few_calls.json", cycles=[cycle | {"calls": cycle["calls"][:1]}])
    threads = setting | {"config": setting["config"] | {"num_threads": 64}}
    saved_settings(tmp_path / "threads.json", route="gloo", settings=[threads])
    (tmp_path / "nul.env").write_text("# first\nNCCL_ALGO=a\0b\n")
    (tmp_path / "bad.env").write_text("# first\nNCCL_ALGO\n")
    (tmp_path / "ours.env").write_text("PYTHONPATH=x\n")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "observed").mkdir()
    RunFolder(tmp_path / "observed").write(RunRecord.now(RunKind.RUN, seed=None))
    for backend in ("workers", "gloo"):
        run_folder(tmp_path / f"run_on_{backend}", simulated_run, backend)
    before = sorted(tmp_path.iterdir())
    try:
        code = main(["run", *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert words in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_request_without_anything_to_do_is_refused():
    with pytest.raises(LagomError):
        LaunchRequest(command=(), mode=RunMode.OBSERVE)
    assert command_of(["--", "a", "--", "b"]) == ("a", "--", "b")
    assert command_of(["a"]) == ("a",)


def lagom_run(tmp_path, *arguments, program, cwd=None, **more):
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [PYTHON, "-m", "lagom_overlap", "run", *arguments, "--", PYTHON, str(script)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM", "NCCL"))}
    return subprocess.Popen(
        command,
        cwd=cwd or tmp_path,
        env={**own, "PYTHONPATH": SOURCE, **more},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_commands_streams_arguments_and_exit_code_are_its_own(tmp_path):
    program = "import sys; print(sys.stdin.read().upper(), end=''); sys.exit(17)"
    process = lagom_run(tmp_path, "--observe", program=program)
    out, error = process.communicate("hello")
    assert (process.returncode, out) == (17, "HELLO")
    assert all(line.startswith("lagom run:") for line in error.splitlines())


def test_disabled_the_command_runs_as_if_we_were_not_there(tmp_path):
    program = "import os, sys; print([n for n in os.environ if n.startswith(('LAGOM_', 'NCCL_'))], len(sys.path))"
    process = lagom_run(tmp_path, "--online", program=program, LAGOM_DISABLE="1")
    out, error = process.communicate()
    assert (process.returncode, out.split(" ")[0]) == (0, "['LAGOM_DISABLE']")
    assert error.count("\n") == 1
    assert not (tmp_path / "lagom-runs").exists()


def test_a_signal_reaches_the_command_because_it_took_our_place(tmp_path):
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(43))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    process = lagom_run(tmp_path, "--observe", program=program)
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 43


def test_a_process_without_process_groups_is_left_as_it_was(tmp_path):
    program = (
        "import sys, json, os\n"
        "import sitecustomize\n"
        "print(json.dumps({'path': sys.path, 'torch': 'torch' in sys.modules, 'own': sitecustomize.__file__,\n"
        "  'numpy': 'numpy' in sys.modules}))\n"
    )
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys; sys.stderr.write('theirs ran\\n')\n")
    process = lagom_run(tmp_path, "--observe", program=program, PYTHONPATH=os.pathsep.join((SOURCE, str(site))))
    out, error = process.communicate()
    found = json.loads(out)
    assert error.count("theirs ran") == 2  # once in lagom run itself, once in the command
    assert found["own"] == str(site / "sitecustomize.py")
    assert not found["torch"]
    assert not found["numpy"]
    assert not any(folder.endswith("online/boot") for folder in found["path"])


def booted(*folders: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python without the site's packages that our sitecustomize starts in."""
    boot = str(Path(SOURCE) / "lagom_overlap" / "online" / "boot")
    code = f"import sys; sys.path[:0] = {[boot, *folders]!r}; import sitecustomize; print('ran')"
    return subprocess.run(
        [PYTHON, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_hooks_of_other_distributions_are_armed_in_turn(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}_hook.py").write_text(f"def arm():\n    print('{name} armed')\n")
    result = booted(str(tmp_path), LAGOM_HOOKS="first_hook,second_hook")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n") == ["first armed", "second armed", "ran", ""]


def test_a_python_without_a_distribution_that_has_hooks_runs_the_job_and_says_so():
    result = booted(LAGOM_HOOKS="lagom_emulate.hook")
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert f"install lagom-emulate for {PYTHON}, which runs the command" in result.stderr


def test_a_python_without_lagom_runs_the_job_and_says_so():
    result = booted(LAGOM_RUN_MODE="observe")
    assert result.returncode == 0
    assert result.stdout == "ran\n"
    assert "the job runs without us: ModuleNotFoundError" in result.stderr
    assert f"install lagom-overlap for {PYTHON}, which runs the command" in result.stderr


@pytest.mark.parametrize(("words", "nodes"), [("2", 2), ("1:4", 4), ("²", 1), ("", 1), ("-3", 1), ("0", 1)])
def test_what_is_no_number_of_nodes_counts_as_one(words: str, nodes: int) -> None:
    """Superscripts are digits to Python, and no number."""
    assert launch.nodes_named(("torchrun", "--nnodes", words, "train.py"), {}) == nodes
    assert launch.nodes_named(("torchrun", "train.py"), {"PET_NNODES": words}) == nodes


def test_a_record_that_cannot_be_written_keeps_no_job_from_starting(tmp_path, plugin_library, monkeypatch, caplog):
    strange = os.fsdecode(b"--name=\xff")
    asked = LaunchRequest(command=(PYTHON, "train.py", strange), mode=RunMode.OBSERVE, out=tmp_path / "first")
    launch = prepare(asked, environment())
    assert launch.command[-1] == strange
    assert json.loads((tmp_path / "first" / "run.json").read_text())["request"]["command"][-1] == "--name=?"

    def full(path: Path, content: bytes) -> None:
        raise OutputError(f"cannot write {str(path)!r}: No space left on device")

    monkeypatch.setattr("lagom_overlap.jobfile.run_folder.write_private", full)
    assert prepare(request(tmp_path), environment()).folder == tmp_path / "run"
    assert "No space left on device" in caplog.text


def test_a_folder_of_online_tuning_is_what_its_settings_file_is(tmp_path, plugin_library):
    folder = tmp_path / "tuned"
    folder.mkdir()
    saved_settings(folder / "settings.json")
    made = prepare(request(tmp_path, RunMode.FIXED, config=folder), environment())
    [row] = read_table(Path(made.environment["LAGOM_TABLE"])).decisions
    assert (row.occurrence, made.environment["LAGOM_RUN_WORLD"]) == (1, "2")
    for mode in (RunMode.ONLINE, RunMode.PROVE):
        asked = LaunchRequest(command=(PYTHON, "train.py"), mode=mode, config=folder, out=tmp_path / mode)
        made = prepare(asked, environment())
        assert made.environment["LAGOM_RUN_CONFIG"] == str(folder / "settings.json")
        assert made.environment["LAGOM_RUN_MODE"] == mode
        assert json.loads(made.environment["LAGOM_RUN_COMMAND"]) == [PYTHON, "train.py"]


def test_settings_of_gloo_are_held_by_the_ranks_without_the_plugin(tmp_path, plugin_library):
    made = prepare(
        request(tmp_path, RunMode.FIXED, config=saved_settings(tmp_path / "gloo.json", route="gloo")), environment()
    )
    assert made.environment["LAGOM_RUN_MODE"] == "held"
    assert not {"NCCL_TUNER_PLUGIN", "LAGOM_TABLE", "LAGOM_RECORD"} & made.environment.keys()


def test_an_environment_file_is_taken_literally_and_leaves_the_plugin_out(tmp_path, plugin_library):
    path = tmp_path / "try.env"
    path.write_text("# two channels\nNCCL_MAX_CTAS=2\n\nWORDS=a b = $HOME\n")
    made = prepare(request(tmp_path, RunMode.FIXED, config=path), environment(NCCL_MAX_CTAS="8"))
    assert (made.environment["NCCL_MAX_CTAS"], made.environment["WORDS"]) == ("2", "a b = $HOME")
    assert made.environment["LAGOM_RUN_MODE"] == "planned"
    assert "NCCL_TUNER_PLUGIN" not in made.environment


PLAN = """
[plan]
version = 2
planner = "fsdp2"
graph = "0"
num_ranks = 2
carrier = "fsdp2"
[fsdp2]
units = ["0", "1"]
kept = ["1"]
forward_prefetch = 2
"""


def test_a_plan_for_fsdp2_reaches_the_ranks_as_data(tmp_path, plugin_library):
    settings = Fsdp2Settings(units=("0", "1"), kept=("1",), forward_prefetch=2)
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    made = prepare(request(tmp_path, RunMode.FIXED, config=path), environment())
    assert msgspec.json.decode(Path(made.environment["LAGOM_RUN_PLAN"]).read_bytes(), type=Fsdp2Settings) == settings
    assert (made.environment["LAGOM_RUN_WORLD"], made.environment["LAGOM_RUN_MODE"]) == ("2", "planned")
    assert made.environment["LAGOM_RUN_PLAN_CHECKSUM"] == checksum_of(
        Path(made.environment["LAGOM_RUN_PLAN"]).read_bytes()
    )
