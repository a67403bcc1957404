"""What starting `lagom` loads: reading the flags of every verb needs neither torch nor scipy's solvers."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
def test_reading_the_flags_of_all_verbs_loads_no_torch_and_no_solver():
    code = (
        "import sys\n"
        "from lagom_overlap.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'scipy.optimize', 'ortools') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
