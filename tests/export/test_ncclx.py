"""The files of NCCLX's built-in tuner, read back as its README says: what each call of a job is told."""

import json
import re

from test_exporters import AG, AR, FSDP, RING, RS, TP, deployment, said

from lagom_overlap.collective import Algorithm, CommunicatorId, Protocol
from lagom_overlap.export.ncclx import ncclx_csv, ncclx_json
from lagom_overlap.units import KIB, MIB

ROWS = {
    (FSDP, AG, 8 * MIB, 0): {**RING, "num_channels": 16, "chunk_bytes": 256 * KIB},
    (FSDP, RS, 8 * MIB, 0): {"algorithm": Algorithm.TREE, "protocol": Protocol.LL128, "num_channels": 4},
    (TP, AR, MIB, 0): RING,
}
CALLS = {(FSDP, AG, 8 * MIB): 1, (FSDP, AG, 64 * MIB): 1, (FSDP, RS, 8 * MIB): 1, (TP, AR, MIB): 1}


def rules(content):
    """Each row as its columns; a comma within brackets is part of an interval, `#` begins a comment."""
    found = []
    for line in content.decode().splitlines():
        if line.strip() and not line.startswith("#"):
            columns = re.split(r",(?![^\[(]*[\])])", line)
            assert 7 <= len(columns) <= 8
            found.append(columns)
    return found


def told(found, kind, num_bytes, num_nodes, num_ranks):
    """The first rule that matches a call: algorithm, protocol, channels and chunk; None keeps NCCL's choice."""
    for collective, interval, algorithm, protocol, channels, nodes, local, chunk in found:
        first, last = map(int, re.fullmatch(r"\[(\d+),(\d+)\]", interval).groups())
        is_size = first <= num_bytes // num_ranks <= last
        if (collective, int(nodes), int(local)) == (kind, num_nodes, num_ranks // num_nodes) and is_size:
            return algorithm, protocol, int(channels), int(chunk)
    return None


def test_each_call_is_told_what_was_found_for_it_and_no_other_call_is():
    exported = ncclx_csv(deployment(ROWS, calls=CALLS, num_nodes=2, max_channels=8))
    found = rules(exported.content)
    assert told(found, "allgather", 8 * MIB, 2, 8) == ("ring", "simple", -1, 256 * KIB), (
        "uneven all-gathers ask the same"
    )
    assert told(found, "reducescatter", 8 * MIB, 2, 8) == ("tree", "ll128", 4, 0)
    assert told(found, "allreduce", MIB, 2, 4) == ("ring", "simple", -1, 0)
    assert told(found, "allgather", 64 * MIB, 2, 8) is None, "it was called in the step, and left to NCCL"
    assert told(found, "allgather", 8 * MIB, 1, 8) is None
    assert told(found, "allgather", 8 * MIB, 2, 16) is None
    assert said(exported, "NCCL 2.30")


def test_the_json_has_the_rules_of_the_csv():
    job = deployment(ROWS, calls=CALLS, num_nodes=2, max_channels=8)
    read = json.loads(ncclx_json(job).content)
    rows = [
        [
            rule["filter"]["collective"],
            rule["filter"]["bytesPerRank"],
            rule["config"]["algorithm"],
            rule["config"]["protocol"],
            str(rule["config"].get("channels", -1)),
            str(rule["filter"]["nNodes"]),
            str(rule["filter"]["nLocalRanks"]),
            str(rule["config"].get("chunkSize", 0)),
        ]
        for rule in read["rules"]
    ]
    assert rows == rules(ncclx_csv(job).content)


def test_a_size_that_the_ranks_do_not_divide_is_found_as_ncclx_divides_it():
    three = CommunicatorId(description="dp", ranks=(0, 1, 2))
    rows = {(three, AR, 10 * MIB + 1, 0): RING}
    found = rules(ncclx_csv(deployment(rows, calls={(three, AR, 10 * MIB + 1): 1}, num_nodes=3)).content)
    assert told(found, "allreduce", 10 * MIB + 1, 3, 3) == ("ring", "simple", -1, 0)


def test_without_the_number_of_nodes_nothing_is_written_and_the_reason_is_said():
    exported = ncclx_csv(deployment(ROWS, calls=CALLS, num_nodes=None, max_channels=8))
    assert rules(exported.content) == []
    assert said(exported, "a row needs the ranks per node")
    assert json.loads(ncclx_json(deployment(ROWS, num_nodes=None)).content) == {"rules": []}
