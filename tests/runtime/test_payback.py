"""What tuning cost and gave, in words."""

import pytest

from lagom_overlap.runtime.payback import Payback
from lagom_overlap.tune.verdict import Verdict
