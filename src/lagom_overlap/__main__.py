"""`python -m lagom_overlap` is `lagom`."""

import sys

from lagom_overlap.cli import main

sys.exit(main())
