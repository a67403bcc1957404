"""NCCL's model in Python and the C host that decides with it choose alike; and as real NCCL, where that was logged."""

import os
import random
from pathlib import Path

import pytest
from c_build import compile_c
from nccl_golden import judged, judged_asked, library

from lagom_emulate.nccl_tables import SHAPE, encode_tables, shape_record, tuner_constants, write_tables
from lagom_overlap.collective import Collective
from lagom_overlap.cost.nccl import Topology, choose
from lagom_overlap.cost.nccl.constants import load_constants
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library
from lagom_overlap.nccl_plugin.table_layout import KINDS

RELEASES = ("2.18.3", "2.21.5", "2.22.3", "2.24.3", "2.27.5", "2.29.7", "2.30.7", "2.31.0")
CLUSTERS = ("a40_pcie", "a40_bridged", "a100_dgx", "h100_dgx")


def topologies() -> list[Topology]:
    shapes = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (2, 2), (8, 8)]
    found = []
    for name in CLUSTERS:
        for ranks, nodes in shapes:
            cluster = load_preset(name, num_nodes=nodes)
            found.append(topology_of(cluster, ranks, nodes))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_c_and_python_choose_alike_on_random_sizes(release):
    numbers, constants = random.Random(release), load_constants(release)
    nccl = FakeNccl(load_fake_library(library()), constants.release)
    for topology in topologies():
        comm = nccl.comm_of(shape_record(topology, release).tobytes())
        for kind in KINDS:
            for _ in range(8):
                num_bytes = 4 * topology.num_ranks * numbers.randint(1, 2 ** numbers.randint(1, 25))
                expected = choose(Collective(kind, num_bytes, topology.num_ranks), topology, constants)
                outcome = comm.run(kind, num_bytes)
                found = (outcome.algorithm, outcome.protocol, outcome.max_channels, outcome.num_threads)
                config = expected.config
                wanted = (config.algorithm, config.protocol, config.num_channels, config.num_threads)
                assert found == wanted, (topology.name, kind, num_bytes)
                assert outcome.predicted_us == pytest.approx(expected.seconds * 1e6, rel=1e-5)


def test_the_record_is_as_long_as_the_c_struct():
    assert SHAPE.itemsize == 1344
    assert tuner_constants().size == 21 + 63 + 75


def test_a_file_holds_every_number_of_ranks_of_a_cluster(tmp_path):
    path = tmp_path / "tables"
    write_tables(path, load_preset("h100_dgx", num_nodes=2), "2.29.7")
    content = path.read_bytes()
    assert content[:8] == b"LAGOMNCC"
    assert int.from_bytes(content[12:16], "little") == 22907
    assert int.from_bytes(content[16:20], "little") == 15  # 2 to 8 on one node, 1 to 8 on each of two
    assert len(content) == 24 + 8 * 159 + 15 * SHAPE.itemsize
    assert encode_tables([]) == encode_tables([], "2.30.7")


def test_a_release_that_the_model_does_not_know_is_refused():
    for wrong in ("2.17.1", "new", "2", "2.30.7.1"):
        with pytest.raises(ValueError, match=r"NCCL release"):
            load_constants(wrong)


def shared_data() -> Path:
    folder = Path(os.environ.get("LAGOM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "nccl_golden"
    if not folder.is_dir():
        folder = Path(__file__).parents[4] / "shared" / "data" / "nccl_golden"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/nccl_golden: decisions logged from real NCCL")
    return folder


NOT_DERIVED = {
    # Two sockets of PCIe, 2.24 and before: the search found three rings; the graphs used here are those of 2.27 on.
    ("2.21.5", "pcie"),
    ("2.24.3", "pcie"),
    # One reduce-scatter of 32 KiB over 8 nodes: NCCL 2.27.5 launched 2 channels, its rules here give 1.
    ("2.27.5", "net8"),
}


def test_default_decisions_agree_with_those_that_real_nccl_logged():
    wrong, num_rows = set(), 0
    for group, _, fields in judged(shared_data()):
        num_rows += 1
        if any(logged != found for logged, found in fields.values()):
            wrong.add((group.nccl, group.topology))
    assert num_rows > 1000
    assert wrong <= NOT_DERIVED


def test_what_a_tuner_asked_ran_as_on_real_nccl(tmp_path):
    data = shared_data()
    tuner = compile_c(tmp_path / "asking.so", Path(__file__).parent / "asking_tuner.c")
    rows = [fields for _, _, fields in judged_asked(data, tuner)]
    num_wrong = sum(any(logged != found for logged, found in fields.values()) for fields in rows)
    assert len(rows) > 1000
    assert num_wrong <= 1  # 2.21.5, a reduce-scatter of 16 MiB: LL128 asked, the default taken
