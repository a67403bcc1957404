"""What rank 0 tells the other ranks: one JSON object, strictly typed, never pickled."""

import msgspec

from lagom_overlap.collective import CommConfig
from lagom_overlap.engines.messages import GroupMessage
from lagom_overlap.errors import BackendError, LagomError


class MeasureNccl(msgspec.Struct, frozen=True, tag="measure", forbid_unknown_fields=True):
    """Run the group `repeats` times under the assignment."""

    group: GroupMessage
    assignment: tuple[CommConfig, ...]
    repeats: int


class StopNccl(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End."""


Command = MeasureNccl | StopNccl
_DECODER: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode(command: Command) -> bytes:
    """The command as bytes."""
    return msgspec.json.encode(command)


def decode(data: bytes) -> Command:
    """The command in some bytes.

    Raises:
        BackendError: if it is none.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, LagomError, ValueError) as error:
        raise BackendError(f"rank 0 sent what is no command: {error}") from None
