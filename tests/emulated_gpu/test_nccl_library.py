"""The stand-in libnccl.so.2: values across processes, groups, splits, and ends of all kinds."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from c_build import CSRC, NCCL_HOST, compile_c

from lagom_emulate.nccl_tables import write_tables
from lagom_overlap.hardware import load_preset

Run = Callable[..., list[str]]


def leftovers() -> set[Path]:
    return set(Path("/dev/shm").glob("lagom_nccl_*"))


def wait_until_gone(before: set[Path]) -> None:
    """Other tests that run at the same time have files there too, which also go."""
    for path in leftovers() - before:
        while path.exists():  # ends by pytest's timeout where it stays
            time.sleep(0.05)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_small_collectives_are_exact(on_ranks, num_ranks):
    on_ranks("collectives", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_groups_of_sends_receives_and_collectives_are_exact_and_large_ones_untouched(on_ranks, num_ranks):
    on_ranks("groups", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_splits_shrinks_and_operators(on_ranks, num_ranks):
    on_ranks("splits", num_ranks)


@pytest.mark.parametrize(
    ("function", "num_ranks"),
    [("collectives", 2), ("collectives", 3), ("exchanges", 3), ("groups", 2), ("refusals", 2)],
)
def test_ranks_of_hosts_that_are_not_started_do_what_the_first_hosts_do(on_ranks, function, num_ranks):
    on_ranks(function, num_ranks, "symmetric_ranks.py", LAGOM_EMULATION_SYMMETRIC_HOSTS="4")


def test_calls_of_a_communicator_run_one_after_another_on_any_stream(on_ranks):
    on_ranks("two_streams", 2)


@pytest.fixture(scope="module")
def sanitized(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that loads the library compiled with the sanitizers, and their own libraries."""
    found = [
        subprocess.run(
            ["cc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(Path(path).is_file() for path in found):
        pytest.skip("the compiler has no shared sanitizers")
    library = tmp_path_factory.mktemp("sanitized") / "libnccl.so.2"
    sources = [*sorted((CSRC.parent / "emulate" / "csrc").glob("nccl_*.c")), *NCCL_HOST]
    flags = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-Wno-unused-parameter")
    compile_c(library, *sources, link=(*flags, f"-L{libraries}", "-l:libcuda.so.1"))
    return {
        "LAGOM_TEST_NCCL": str(library),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("nccl_ranks.py", "collectives", 3),
        ("nccl_ranks.py", "groups", 3),
        ("nccl_ranks.py", "splits", 3),
        ("symmetric_ranks.py", "collectives", 2),
        ("symmetric_ranks.py", "exchanges", 2),
        ("symmetric_ranks.py", "groups", 2),
        ("symmetric_ranks.py", "refusals", 2),
    ],
)
def test_ranks_under_the_address_and_undefined_behaviour_sanitizers(on_ranks, sanitized, case):
    program, function, num_ranks = case
    hosts = {"LAGOM_EMULATION_SYMMETRIC_HOSTS": "4"} if program == "symmetric_ranks.py" else {}
    on_ranks(function, num_ranks, program, **hosts, **sanitized)


def test_communicators_come_and_go(on_ranks):
    before = leftovers()
    on_ranks("many_inits", 2)
    wait_until_gone(before)


def test_a_lost_rank_is_an_error_and_not_a_hang(on_ranks):
    on_ranks("a_rank_goes", 3)


def test_a_rank_that_nobody_joins_gives_up(on_ranks):
    before = leftovers()
    on_ranks("nobody_comes", 1, LAGOM_NCCL_TIMEOUT_S="0.3")
    wait_until_gone(before)


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("2.30.7", "AllReduce: 16 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"),
        ("2.21.5", "16 Bytes -> Algo 1 proto 0 time 7.80"),
    ],
)
def test_decisions_are_logged_as_nccl_logs_them(on_ranks, tmp_path, release, line):
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), release)
    logs = on_ranks("collectives", 2, LAGOM_EMULATION_NCCL=str(tables), NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING")
    first = logs[0].splitlines()[0]
    assert re.match(r"\S+:\d+:\d+ \[0\] NCCL INFO ", first)
    assert line in first
    assert logs[1] == ""


CHOICE = re.compile(r"(\w+): \d+ Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")


@pytest.mark.parametrize(
    ("environment", "obeyed"),
    [
        ({"NCCL_MAX_NCHANNELS": "3"}, lambda _, algorithm, __, channels: channels <= 3 or algorithm == "NVLS"),
        ({"NCCL_MAX_CTAS": "3"}, lambda *found: found[3] <= 3),
        ({"NCCL_PROTO": "Simple"}, lambda *found: found[2] == "SIMPLE"),
        ({"NCCL_ALGO": "^NVLS"}, lambda *found: found[1] in ("RING", "TREE")),
        ({"NCCL_ALGO": "allreduce:tree"}, lambda kind, algorithm, *_: kind != "AllReduce" or algorithm == "TREE"),
        ({"NCCL_MAX_NCHANNELS": "many"}, lambda _, algorithm, __, channels: channels == 1 or algorithm == "NVLS"),
        ({"NCCL_MAX_NRINGS": "0x2"}, lambda _, algorithm, __, channels: channels <= 2 or algorithm == "NVLS"),
        ({"NCCL_MAX_NCHANNELS": "4294967299"}, lambda _, algorithm, __, channels: channels <= 3 or algorithm == "NVLS"),
        ({"NCCL_ALGO": ":ring"}, lambda _, algorithm, *__: algorithm == "RING"),
        ({"NCCL_ALGO": "allreduce:tree:ring"}, lambda kind, algorithm, *_: kind != "AllReduce" or algorithm == "TREE"),
    ],
    ids=[
        "channels", "ctas", "protocol", "without", "by kind", "no number", "old name", "too large", "no kind",
        "two colons",
    ],
)  # fmt: skip
def test_a_jobs_environment_bounds_what_is_chosen(on_ranks, tmp_path, environment, obeyed):
    """As NCCL's documentation of its environment variables has it; the real library beside it: test_real_nccl.py."""
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), "2.30.7")
    given = {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"} | environment
    found = CHOICE.findall(on_ranks("decisions", 4, **given)[0])
    assert len(found) > 190
    for kind, algorithm, protocol, low, high in found:
        assert obeyed(kind, algorithm, protocol, int(high) - int(low) + 1), (kind, algorithm, protocol, low, high)


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_ALGO": "rign"}, {"NCCL_PROTO": "allreduce:LL;Simple"}, {"NCCL_ALGO": "allredcue:ring"},
        {"NCCL_ALGO": "allreduce:"}, {"NCCL_ALGO": ";ring"}, {"NCCL_ALGO": "ring;tree"}, {"NCCL_PROTO": " LL"},
    ],
    ids=str,
)  # fmt: skip
def test_an_unknown_name_in_the_environment_is_refused(on_ranks, environment):
    """A list's kind without a list is taken for a list, as NCCL does (graph/tuning.cc: parseList, 2.24 to 2.30)."""
    on_ranks("refused_settings", 2, **environment)


def test_limits_of_channels_that_contradict_each_other_are_refused(on_ranks):
    on_ranks("refused_limits", 2)


def test_before_2_24_an_unknown_name_is_passed_over(on_ranks, tmp_path):
    """graph/tuning.cc: parseList of 2.21.5 and 2.23.4 compares names and minds none that it does not know."""
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), "2.23.4")
    given = {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
    logs = on_ranks("collectives", 2, **given, NCCL_ALGO="ring,allreduce:tree,x")[0]
    found = re.findall(r"Algo (\d+) proto", logs)
    assert set(found) == {"1"}  # ring


def test_a_configurations_limits_of_channels_count_and_go_to_splits(on_ranks, tmp_path):
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), "2.30.7")
    given = {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
    found = CHOICE.findall(on_ranks("limited", 2, **given)[0])
    assert [int(high) + 1 for *_, high in found] == [2, 2]


def test_a_collective_takes_a_configuration_of_its_own(on_ranks, tmp_path):
    """NCCL 2.32's `nccl*Config` calls: the same values, its own limit of channels, and what it refuses."""
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), "2.30.7")
    given = {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
    *_, limited, free = CHOICE.findall(on_ranks("configured", 2, **given)[0])
    assert int(limited[4]) + 1 == 3
    assert int(free[4]) + 1 > 3


def test_a_configuration_says_how_many_channels_the_switch_has(on_ranks, tmp_path):
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), "2.30.7")
    given = {"LAGOM_EMULATION_NCCL": str(tables), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
    logs = on_ranks("limited_by_switch", 8, **given, NCCL_ALGO="NVLS")
    ((_, algorithm, _, low, high),) = CHOICE.findall(logs[0])
    assert (algorithm, int(high) - int(low) + 1) == ("NVLS", 5)


def test_the_library_exports_nccl_only(libraries):
    names = subprocess.run(
        ["nm", "-D", "--defined-only", libraries / "libnccl.so.2"], capture_output=True, text=True, check=True
    )
    found = {line.split()[-1].split("@")[0] for line in names.stdout.splitlines()}
    assert {"ncclAllReduce", "ncclCommSplit", "ncclGroupSimulateEnd", "ncclCommInitRankScalable"} <= found
    assert all(name.startswith("nccl") for name in found)
