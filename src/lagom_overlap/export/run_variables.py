"""What `lagom run` tells the job's Python processes by their environment: the names, and what is done with the job."""

from enum import StrEnum
from typing import Final

MODE_VARIABLE: Final = "LAGOM_RUN_MODE"
"""The `RunMode`; `online/boot` looks for it by name, because it imports nothing of ours before."""
FOLDER_VARIABLE: Final = "LAGOM_RUN_FOLDER"
"""The run's folder; in a job that is not the run's first, the folder below it with that job's files."""
RUN_VARIABLE: Final = "LAGOM_RUN_ID"
"""A random word, the same in all that one `lagom run` started."""
COMMAND_VARIABLE: Final = "LAGOM_RUN_COMMAND"
"""The job's own command, a JSON list of words."""
CONFIG_VARIABLE: Final = "LAGOM_RUN_CONFIG"
"""What --config or --prove names."""
TUNER_VARIABLE: Final = "LAGOM_RUN_TUNER"
JOB_STEPS_VARIABLE: Final = "LAGOM_RUN_JOB_STEPS"
PAIRS_VARIABLE: Final = "LAGOM_RUN_PAIRS"
"""The most pairs of a proof inside the job."""
COMPARE_VARIABLE: Final = "LAGOM_RUN_COMPARE"
"""Tuners by comma."""
ADAPTERS_VARIABLE: Final = "LAGOM_RUN_ADAPTERS"
"""Adapters on gloo by comma; without it those that fit the model."""
ENGINE_VARIABLE: Final = "LAGOM_RUN_ENGINE"
"""The engine under which the settings were found; from the launcher, so that all ranks decide by the same value."""
WORLD_VARIABLE: Final = "LAGOM_RUN_WORLD"
"""The number of ranks with which they were found."""
PLAN_VARIABLE: Final = "LAGOM_RUN_PLAN"
"""The file in which the launcher left the plan's settings."""
PLAN_CHECKSUM_VARIABLE: Final = "LAGOM_RUN_PLAN_CHECKSUM"
"""Its checksum, by which a rank knows that it has read what the others have."""
TABLE_CHECKSUM_VARIABLE: Final = "LAGOM_RUN_TABLE"
"""The checksum of the table that the launcher wrote, for the same reason."""
PART_VARIABLE: Final = "LAGOM_RUN_PART"
"""Set in each run of a proof by restarts, which says at its own end what came of them."""
FIRST_WORLD_VARIABLE: Final = "LAGOM_RUN_FIRST_WORLD"
"""The number of ranks of the run's first job; the hooks set it in the ranks of its other jobs."""


class RunMode(StrEnum):
    """What is done with the job.

    FIXED decides by a table; HELD sets what online tuning saved on gloo; PLANNED runs it as it is started, with an
    environment file's variables or FSDP2 told a plan, and times its steps. OBSERVE changes nothing, ONLINE tunes, PROVE
    judges saved settings.
    """

    FIXED = "fixed"
    HELD = "held"
    PLANNED = "planned"
    OBSERVE = "observe"
    ONLINE = "online"
    PROVE = "prove"
