"""A few random programs on gloo ranks, and defects that this project once had, which random programs find.

More of them: python tests/fuzz/test_random_programs.py RANKS FIRST NUMBER [KIND]
"""

import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the command above

from forked_python import ForkedPython

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(240)]
RANK = Path(__file__).with_name("fuzz_rank.py")


def fuzz(folder: Path, num_ranks: int, first: int, number: int, *more: str) -> list[dict[str, Any]]:
    """What each rank found of each program; all ends with the first that differs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
            what = [str(rank), str(num_ranks), str(port), str(first), str(number), *(more or ("",))]
            ranks.append(ForkedPython(RANK, what, stdout=out, stderr=err))
    try:
        ranks[0].wait()
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * num_ranks, "\n".join((folder / f"err{rank}").read_text()[-4000:] for rank in range(num_ranks))
    return [json.loads(line) for rank in range(num_ranks) for line in (folder / f"out{rank}").read_text().splitlines()]


@pytest.mark.parametrize(("num_ranks", "first"), [(2, 0), (3, 1000)])
def test_a_few_random_programs_compute_the_same_bits(tmp_path: Path, num_ranks: int, first: int) -> None:
    found = fuzz(tmp_path, num_ranks, first, 12)
    assert [one for one in found if not one["equal"]] == []
    assert len(found) == 12 * num_ranks
    assert sum(one["num_set"] > 0 for one in found) > 6


@pytest.mark.parametrize(("defect", "num_ranks", "kind"), [("D1", 2, "fsdp2"), ("D3", 3, "ddp"), ("D4", 2, "calls")])
def test_defects_that_were_mended_are_found_again(tmp_path: Path, defect: str, num_ranks: int, kind: str) -> None:
    found = fuzz(tmp_path, num_ranks, 0, 60, defect, kind)
    assert not all(one["equal"] for one in found), "60 programs found nothing"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        programs = fuzz(Path(folder), *map(int, sys.argv[1:4]), "", *sys.argv[4:])
    differ = [one for one in programs if not one["equal"]]
    print(f"{len(programs)} programs times ranks, {sum(one['num_set'] > 0 for one in programs)} with settings")  # noqa: T201
    for one in differ:
        print(json.dumps(one, indent=1))  # noqa: T201
    sys.exit(bool(differ))
