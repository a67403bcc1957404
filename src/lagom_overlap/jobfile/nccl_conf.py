"""NCCL's configuration files, which set environment variables that nobody sees in the environment.

NCCL reads the file that NCCL_CONF_FILE names, else `~/.nccl.conf`, and then `/etc/nccl.conf`; each line is NAME=value,
a line that begins with # is a comment, and what is set already stays (param.cc, 2.30.7). So a tuner that such a file
names would be lost in silence behind the NCCL_TUNER_PLUGIN of ours.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lagom_overlap.record import read_regular

_MAX_BYTES: Final = 1 << 20
SYSTEM_FILE: Final = Path("/etc/nccl.conf")


def with_conf_files(environment: Mapping[str, str], system: Path = SYSTEM_FILE) -> dict[str, str]:
    """The environment as NCCL has it once it has read its files; a file that cannot be read sets nothing."""
    if named := environment.get("NCCL_CONF_FILE"):
        files = [Path(named), system]
    else:
        home = environment.get("HOME")
        files = [*([Path(home) / ".nccl.conf"] if home else []), system]
    variables = dict(environment)
    for path in files:
        try:
            lines = read_regular(path, _MAX_BYTES).decode(errors="replace").split("\n")
        except OSError:
            continue
        for line in lines:
            name, is_set, value = line.removesuffix("\r").partition("=")
            if is_set and name and not name.startswith("#"):
                variables.setdefault(name, value)
    return variables
