"""Megatron-LM's communicator file (`--nccl-communicator-config-path`): channels per process group.

Megatron (training/config/common_config.py and parallel_state.py at d98e8a64d) takes, per group, cga_cluster_size,
max_ctas, min_ctas, net_name and is_high_priority_stream. Of a configuration only the number of channels fits, as
`max_ctas`: the communicator's cap, which never raises a count above NCCL's own.
"""

from collections.abc import Mapping
from typing import Final

from lagom_overlap.collective import CommunicatorId
from lagom_overlap.errors import JobError
from lagom_overlap.export.deployment import Deployment, Exported

FILE_NAME: Final = "megatron_nccl.yaml"
GROUPS: Final = (
    *(
        "dp",
        "dp_cp",
        "intra_dp_cp",
        "inter_dist_opt_instance",
        "intra_dist_opt_instance",
        "cp",
        "hcp",
        "mp",
        "tp",
        "pp",
    ),
    *("embd", "pos_embd", "tp_dp", "tp_dp_cp", "tp_cp", "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_ep_dp"),
    *("inter_ep_dp",),
)
"""The group names that Megatron knows."""


def check_groups(groups: Mapping[str, str]) -> None:
    """Refuses a mapping of communicators to groups that Megatron does not have.

    Raises:
        JobError: naming the group.
    """
    for communicator, group in groups.items():
        if group not in GROUPS:
            raise JobError(f"Megatron has no group {group!r} (for {communicator!r}); allowed: {', '.join(GROUPS)}")


def megatron_yaml(deployment: Deployment, groups: Mapping[str, str]) -> Exported:
    """The file; `groups` maps the descriptions of communicators to Megatron's names, where they differ.

    Raises:
        JobError: if a group does not exist in Megatron.
    """
    check_groups(groups)
    values: dict[CommunicatorId, set[int | None]] = {}
    left_out = ["only channels fit: algorithm, protocol, chunk and threads are not in this file"]
    left_out.append("max_ctas caps every call on the communicator, also those that were left untouched")
    for key, config in deployment.table:
        values.setdefault(key.communicator, set()).add(config.num_channels)
    caps: dict[str, int] = {}
    for communicator, asked in values.items():
        name = groups.get(communicator.description, communicator.description)
        if name not in GROUPS:
            left_out.append(f"{communicator.description!r} is no group of Megatron's; name it: --group NAME=GROUP")
        elif len(asked) > 1 or None in asked:
            left_out.append(
                f"{communicator.description!r}: its tuned calls differ in channels, a group has one max_ctas"
            )
        elif name in caps and caps[name] not in asked:
            left_out.append(f"{name!r}: two communicators of this run differ in channels; none of the two is written")
            caps[name] = 0
        else:
            caps.setdefault(name, next(number for number in asked if number is not None))
    text = "# Written by lagom export for --nccl-communicator-config-path.\n"
    text += "".join(f"{name}:\n  max_ctas: {cap}\n" for name, cap in caps.items() if cap)
    if not any(caps.values()):
        text += "{}\n"
    return Exported(name=FILE_NAME, content=text.encode(), not_carried=tuple(left_out), is_empty=not any(caps.values()))
