"""Lets the tests import the programs next to them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
