"""A profile of this machine's operators for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.profile_model import ProfileJson
from lagom_overlap.units import US


def profile_summary(profile: ProfileJson) -> RenderableType:
    """Operators with their errors, the constants with theirs, and the held-out error in one line."""
    operators = Table(title=f"Operators of {profile.job} on this machine", title_justify="left")
    for name in ("operator", "pieces", "measured us", "fit", "held out"):
        operators.add_column(name, justify="left" if name == "operator" else "right", overflow="fold")
    for row in profile.operators:
        held = "-" if row.held_out_error is None else f"{row.held_out_error:+.1%}"
        operators.add_row(row.work, str(row.pieces), f"{row.measured_s / US:.0f}", f"{row.fit_error:+.1%}", held)
    constants = Table(title="Fitted constants (FP32)", title_justify="left")
    for name in ("constant", "value", "known to"):
        constants.add_column(name, justify="left" if name == "constant" else "right")
    for constant in profile.constants:
        known = f"{constant.error:.0%}" if constant.identified and constant.error is not None else "not identified"
        constants.add_row(constant.name, f"{constant.value:.4g}", known)
    return Group(operators, Text(), constants, Text(), Text(headline(profile)))


def headline(profile: ProfileJson) -> str:
    """The errors in one line."""
    words = f"Mean error: {profile.fit_mean_abs_error:.1%} on what was fitted"
    if profile.held_out_mean_abs_error is None:
        return f"{words}; nothing could be held out: one operator of each kind."
    left = f" ({profile.num_not_held_out} rows have no operator of their kind to learn from)"
    return (
        f"{words}, {profile.held_out_mean_abs_error:.1%} on operators held out with their chunks"
        f"{left if profile.num_not_held_out else ''}."
    )
