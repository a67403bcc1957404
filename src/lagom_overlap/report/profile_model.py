"""What `lagom simulate --profile` prints with --json: SI units, errors as shares of the measured time."""

import msgspec


class OperatorJson(msgspec.Struct, frozen=True, kw_only=True):
    """A measured operator, or one of `pieces` equal chunks of it; `held_out_error` is null where nothing is like it."""

    work: str
    pieces: int
    measured_s: float
    spread_s: float
    fit_error: float
    held_out_error: float | None


class ConstantJson(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted constant with its relative standard error; null where the profile says nothing about it."""

    name: str
    value: float
    error: float | None
    identified: bool


class ProfileJson(msgspec.Struct, frozen=True, kw_only=True):
    """A profile, the fit and its errors."""

    tool: str
    version: str
    job: str
    machine: dict[str, str]
    versions: dict[str, str]
    date: str
    repeats: int
    operators: list[OperatorJson]
    constants: list[ConstantJson]
    fit_mean_abs_error: float
    held_out_mean_abs_error: float | None
    num_not_held_out: int
    files: list[str]
