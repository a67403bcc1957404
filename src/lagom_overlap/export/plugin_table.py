"""The table of our own plug-in, `liblagom_tuner.so`: what `LAGOM_TABLE` names."""

import hashlib
from typing import Final

from lagom_overlap.export.deployment import Deployment, Exported, site_words
from lagom_overlap.nccl_plugin.table_writer import encode_table

FILE_NAME: Final = "lagom_table.bin"
FIRST_GENERATION: Final = 1
"""Generation of an exported table; a running job swaps in ever larger ones."""


def plugin_table(deployment: Deployment) -> Exported:
    """The table's bytes; they hold for every process of the job.

    Raises:
        TableError: if the table does not fit the plug-in.
    """
    encoded = encode_table(
        deployment.table,
        generation=FIRST_GENERATION,
        communicators=deployment.communicators,
        calls_per_step=deployment.calls_per_step,
        known_sites=deployment.calls_per_step,
    )
    lost = [f"{left.key.kind} of {left.key.num_bytes} bytes: {left.what}" for left in encoded.left_out]
    lost += [
        f"{site_words(site)}: its channels are NCCL's under NCCL 2.29 and 2.30 where NVLS is not on offer: an uneven "
        "all-gather asks the same and would crash with too many; NCCL_ALLGATHERV_ENABLE=0 in the job lets them be set"
        for site, rows in deployment.sites()
        for config in rows.values()
        if config.num_channels is not None and deployment.safe_channels(site, config.num_channels) is None
    ]
    return Exported(name=FILE_NAME, content=encoded.data, not_carried=tuple(dict.fromkeys(lost)))


def checksum_of(content: bytes) -> str:
    """What tells a table or a plan from any other: its SHA-256."""
    return hashlib.sha256(content).hexdigest()
