"""analysis/anonymous.py: nothing that may tell whose job it is, and every figure as it was."""

import json
import re

import pytest
from kineto_traces import KinetoFile

from lagom_overlap.analysis.anonymous import KERNEL_WORDS, Anonymiser
from lagom_overlap.analysis.hta import hta_kind
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.cli.main import main
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.verbs.analyze import AnalyzeRequest, Compat, run_analyze

SECRETS = ("acme", "alice", "node17", "10.1.2.3", "projectx", "secretmodel", "/home", "titan_moe")


def hostile(rank: int = 0) -> KinetoFile:
    """Host names, users and paths wherever a trace has room for text."""
    file = KinetoFile(
        deviceProperties=[{"id": 0, "name": "NVIDIA H100 acme-node17 SXM5-80GB", "numSms": 132}],
        distributedInfo={
            "backend": "nccl", "rank": rank, "world_size": 2, "nccl_version": "2.27.5-alice@node17.acme.corp",
            "hostname": "node17.acme.corp", "pg_config": [{"pg_name": "projectx", "pg_desc": "acme_secretmodel"}],
        },
        traceName="/home/alice/projectx/node17.json", user="alice",
    )  # fmt: skip
    for step in range(6):
        at = step * 1000.0
        file.step(step, at, 1000.0)
        for n, name in enumerate(("secretmodel_gemm<128>", "titan_moe_attention", "acme::fusedNorm", "projectxSync")):
            file.kernel(f"void {name}(/home/alice/x.cu)", at + 10 + 50 * n, 40, grid=[264, 1, 1])
            file.kernel(f"void {name}(/home/alice/x.cu)", at + 300 + 60 * n, 55 + n, grid=[264, 1, 1])
        fields = {"Process Group Description": "acme_secretmodel_dp", "Process Group Name": "projectx"}
        file.nccl("AllGather_RING_LL", at + 290, 260, op="_allgather_base", nelems=1 << 20, **fields)
        file.nccl("SendRecv", at + 600, 90, op="send", nelems=1 << 20, **{"Process Group Description": "alice_pp"})
        file.kernel("deep_ep::acme_dispatch(node17)", at + 720, 30, stream=33)
        file.kernel("Memcpy DtoH (alice@node17 -> /home/alice)", at + 800, 10, cat="gpu_memcpy", bytes=4)
    file.kernel("gemm", 7000, -5)
    file.add(ph="X", cat="cpu_op", name="FSDP::/home/alice/projectx", pid=1, tid="alice", ts=1, dur=1, args={})
    return file


def figures(value: object) -> object:
    """Everything but text."""
    if isinstance(value, dict):
        return {key: figures(held) for key, held in value.items() if not isinstance(held, str) and key != "warnings"}
    return [figures(held) for held in value] if isinstance(value, list) else value


@pytest.fixture
def folder(tmp_path):
    held = tmp_path / "alice_acme"
    held.mkdir()
    for rank in (0, 1):
        hostile(rank).write(held / f"node17.acme.corp_alice_rank{rank}.json.gz")
    return held


def test_a_hostile_trace_leaves_no_name_in_anything_written(folder, tmp_path, capsys):
    out = tmp_path / "projectx"
    for more in ([], ["--json"]):
        target = ["--out", str(out / ("j" if more else "t"))]
        out.mkdir(exist_ok=True)
        arguments = ["analyze", str(folder), "--against", str(folder), "--anonymise", "--pattern", "alice", *target]
        assert main([*arguments, *more]) == 0
    printed = capsys.readouterr()
    written = [path.read_text() for path in out.rglob("*") if path.is_file()]
    assert len(written) == 6
    for text in (printed.out, printed.err, *written):
        for secret in SECRETS:
            assert secret not in text.lower()


def test_every_figure_stays(folder):
    for compat in (None, Compat.HTA):
        named = run_analyze(AnalyzeRequest(traces=(folder,), compat=compat)).to_dict()
        bare = run_analyze(AnalyzeRequest(traces=(folder,), compat=compat, is_anonymous=True)).to_dict()
        assert figures(bare) == figures(named)
        assert [row["kind"] for row in bare["collectives"]] == [row["kind"] for row in named["collectives"]]
        assert [row["rule"] for row in bare["advice"]] == [row["rule"] for row in named["advice"]]


def test_a_name_keeps_its_class_its_kind_for_hta_and_its_difference_from_others(folder):
    trace = read_traces([folder])[0]
    bare = Anonymiser().trace(trace)
    assert len(set(bare.events.names)) == len(set(trace.events.names))
    for real, number in zip(trace.events.names, bare.events.names, strict=True):
        assert hta_kind(number) is hta_kind(real)
        if real.startswith("void"):
            assert kernel_class(number) is kernel_class(real)
    assert bare.gpu_name == "NVIDIA H100 SXM5 80GB"
    assert bare.nccl_version == "2.27.5"
    assert {call.communicator for call in bare.calls} == {"group 1", "pp group 2", "stream 33"}


def test_every_class_has_a_word_that_it_knows_again():
    for found in KernelClass:
        assert kernel_class(f"{KERNEL_WORDS[found]} kernel 7") is found
        assert kernel_class(f"{KERNEL_WORDS[found]} Sync 7") is found


def test_equal_names_get_equal_numbers_on_all_ranks(folder):
    anonymiser = Anonymiser()
    first, second = (anonymiser.trace(trace) for trace in read_traces([folder]))
    assert first.events.names == second.events.names
    assert [call.communicator for call in first.calls] == [call.communicator for call in second.calls]
    assert (first.file, second.file) == ("rank 0", "rank 1")


def test_the_record_says_that_names_were_taken_away(folder, tmp_path):
    run_analyze(AnalyzeRequest(traces=(folder,), is_anonymous=True, out=tmp_path / "o"))
    record = json.loads((tmp_path / "o" / "run.json").read_bytes())
    assert record["request"]["anonymise"] is True
    assert record["machine"] == {}
    assert re.fullmatch(r"trace \d+", record["request"]["traces"][0])
