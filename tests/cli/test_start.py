"""What starting `lagom` loads before a verb runs: the flags, and nothing that a verb needs."""

import subprocess
import sys

import pytest

from lagom_overlap.cli import flags
from lagom_overlap.tuners.sequential import pairs_of_large_bet
from lagom_overlap.verbs import prove
from lagom_overlap.verbs.compare import DEFAULT_TUNERS
from lagom_overlap.verbs.export import Format

HEAVY = ("torch", "numpy", "scipy", "ortools", "rich", "plotly", "jinja2", "msgspec")
OURS = {
    "lagom_overlap",
    "lagom_overlap.cli",
    "lagom_overlap.cli.flags",
    "lagom_overlap.cli.main",
    "lagom_overlap.cli.stdout",
    "lagom_overlap.errors",
    "lagom_overlap.interrupts",
    "lagom_overlap.papers",
    "lagom_overlap.papers.flags",
    "lagom_overlap.planners",
    "lagom_overlap.planners.carriers",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("tune", "--help"), ("tune", "--nonesuch"), ()])
def test_what_runs_no_verb_loads_the_flags_alone(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from lagom_overlap.cli import main\n"
        f"try:\n    main({list(arguments)})\n"
        "except SystemExit:\n    pass\n"
        "print(' '.join(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.splitlines()[-1].split()
    assert [name for name in HEAVY if name in loaded] == []
    assert {name for name in loaded if name.partition(".")[0] == "lagom_overlap"} <= OURS


def test_the_flags_offer_what_the_verbs_take() -> None:
    assert flags.TUNERS == DEFAULT_TUNERS
    assert tuple(Format) == flags.FORMATS
    assert (pairs_of_large_bet(prove.FEW_ALPHA), prove.MOST_PAIRS) == (flags.LEAST_RESTARTS, flags.MOST_RESTARTS)
