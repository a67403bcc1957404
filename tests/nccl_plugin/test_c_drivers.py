"""The C drivers of csrc/, in short versions; `csrc/sanitize.sh` and docs/formats.md name the long ones."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from c_build import CSRC, LINK, NCCL_HOST, compile_c
from played_profiler import CHANNEL, COLLECTIVE, COLLECTIVE_CALL, PROXY_OP, PROXY_STEP

PROFILER = ("start_event", "record_event_state", "stop_event")


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def test_a_swap_between_two_reads_of_a_decision_never_tears_it(tmp_path):
    result = run(compile_c(tmp_path / "swap_under_read", CSRC / "swap_under_read.c", shared=False))
    assert result.returncode == 0, result.stderr
    assert "2000 swaps inside them, none torn" in result.stdout


@pytest.mark.parametrize("num_keys", [1, 256])
def test_decisions_of_many_threads_under_swaps_come_whole_and_in_turn(tmp_path, plugin_library, num_keys):
    driver = compile_c(tmp_path / "stress", CSRC / "stress.c", *NCCL_HOST, shared=False)
    plugin = shutil.copy(plugin_library, tmp_path)
    result = run(driver, plugin, 400_000, 4, num_keys)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {name: int(n) for name, n in re.findall(r"([a-z ]+?) (\d+)", result.stdout)}
    assert counts["decisions"] == 400_000
    assert sum(counts[k] for k in counts if k.strip() in ("torn", "missing", "touched without a row")) == 0


def test_mutated_tables_are_refused_or_decide_safely(tmp_path):
    result = run(compile_c(tmp_path / "fuzz", CSRC / "fuzz_table.c", shared=False), 30_000, 5)
    assert result.returncode == 0, result.stderr
    num_taken = int(re.search(r"tables taken (\d+)", result.stdout)[1])
    assert 1_000 < num_taken < 29_000  # both ways are exercised


def test_a_fuzzer_that_is_guided_by_coverage_finds_its_way_into_the_reader(tmp_path):
    """Without a single sound table to begin with: past the magic number by the operands of comparisons."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc, whose coverage the driver reads")
    for flags in (
        ["-fsanitize-coverage=trace-pc,trace-cmp", "-DLAGOM_LIBFUZZER", "-c", CSRC / "fuzz_table.c", "-o", "table.o"],
        [CSRC / "cover.c", "table.o", "-o", "cover", *LINK],
    ):
        subprocess.run([compiler, "-std=c11", "-O1", *map(str, flags)], check=True, cwd=tmp_path)
    result = subprocess.run([tmp_path / "cover", "1"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(re.search(r"(\d+) inputs kept", result.stdout)[1]) > 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps by x86-64's trap flag")
def test_no_thread_of_nccl_ever_finds_an_event_mask_that_was_not_meant(tmp_path, plugin_library, monkeypatch):
    """Two communicators start, events go off and on, both end: between a start and its stop there is no other mask."""
    monkeypatch.setenv("LAGOM_PROFILE", str(tmp_path / "profile"))
    monkeypatch.setenv("LAGOM_PROFILE_NETWORK", "1")
    driver = compile_c(tmp_path / "watched", Path(__file__).with_name("watched_mask.c"), shared=False)
    result = run(driver, shutil.copy(plugin_library, tmp_path))
    assert result.returncode == 0, result.stderr
    on = COLLECTIVE | CHANNEL | PROXY_OP | PROXY_STEP | COLLECTIVE_CALL
    # One for each communicator's start, and one for each of the two at either switch.
    assert list(map(int, result.stdout.split())) == [on, on, *[COLLECTIVE_CALL] * 2, on, on]


def test_only_tuners_profilers_and_our_own_calls_are_exported(plugin_library):
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("no nm")
    names = {line.split()[-1] for line in run(tool, "-D", "--defined-only", plugin_library).stdout.splitlines()}
    calls = (
        "step",
        "swap",
        "install",
        "prepare",
        "commit",
        "take_back",
        "error_text",
        "generation",
        "enable",
        "bind",
        "restart",
        "counts",
        "calls",
        "num_large",
        "capture",
        "profile_enable",
        "record_flush",
        "profile_flush",
    )
    own = {f"lagom_{n}" for n in calls} | {f"ncclProfiler_v{v}" for v in range(4, 8)}
    assert names == {f"ncclTunerPlugin_v{v}" for v in range(2, 8)} | own


def test_the_plugin_has_no_thread_local_storage(plugin_library):
    """A process may have none left: "cannot allocate memory in static TLS block", and NCCL goes on without a tuner."""
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("no readelf")
    text = run(tool, "-lWd", plugin_library).stdout
    assert re.search(r"^ +LOAD ", text, re.MULTILINE)
    assert "(SONAME)" in text or "(NEEDED)" in text  # the flags are of the dynamic section
    assert not re.search(r"^ +TLS |STATIC_TLS", text, re.MULTILINE)


def test_collectives_of_many_threads_are_profiled_once_and_whole(tmp_path, plugin_library):
    driver = compile_c(tmp_path / "stress_profiler", CSRC / "stress_profiler.c", shared=False)
    result = run(driver, shutil.copy(plugin_library, tmp_path), tmp_path / "profile.bin", 60_000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "collectives 60000 of 60000, dropped 0, wrong 0, twice 0, late 0" in result.stdout


def test_what_nccl_waits_for_makes_no_system_call_and_allocates_nothing(plugin_library):
    """Calls of the C library in the callbacks' disassembly: memory, strings and the clock, which the vDSO answers."""
    tool = shutil.which("objdump")
    if tool is None:
        pytest.skip("no objdump")
    text = run(tool, "-d", "--no-show-raw-insn", plugin_library).stdout
    functions = dict(re.findall(r"^[0-9a-f]+ <([\w.]+)>:\n((?:.+\n)+)", text, re.MULTILINE))
    seen, queue = set(), [n for n in functions if n.startswith(("get_coll_info", "get_chunk_size", *PROFILER))]
    assert {"start_event", "record_event_state", "stop_event"} <= set(queue)
    outside = set()
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for target in re.findall(r"(?:call|jmp)\s+[0-9a-f]+ <([\w.@]+)>", functions[name]):
            if target.endswith("@plt"):
                outside.add(target)
            elif target in functions:
                queue.append(target)
    copies, reads = {"memcpy@plt", "memset@plt", "strcmp@plt"}, {"clock_gettime@plt", "pthread_self@plt"}
    assert outside <= copies | reads | {"__stack_chk_fail@plt"}, outside


def test_random_groups_are_searched_to_answers_that_hold(tmp_path):
    sources = sorted(CSRC.glob("lagom_search_*.c"))
    result = run(compile_c(tmp_path / "stress_search", CSRC / "stress_search.c", *sources, shared=False), 500, 3)
    assert result.returncode == 0, result.stderr
    assert "500 searches" in result.stdout
