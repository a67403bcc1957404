"""A profile of this machine's operators for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import Fitted
from lagom_overlap.results.profile import ProfileResult
from lagom_overlap.units import US


def profile_summary(profile: ProfileResult) -> RenderableType:
    """Operators with their errors, the constants with theirs, and the held-out error in one line."""
    operators = Table(title=f"Operators of {profile.job} on this machine", title_justify="left")
    for name in ("operator", "pieces", "measured us", "fit", "held out"):
        operators.add_column(
            name, justify="left" if name == "operator" else "right", overflow="fold", no_wrap=name != "operator"
        )
    for row in profile.operators:
        held = "-" if row.held_out_error is None else f"{row.held_out_error:+.1%}"
        operators.add_row(row.work, str(row.pieces), f"{row.measured_s / US:.0f}", f"{row.fit_error:+.1%}", held)
    constants = Table(title="Fitted constants (FP32)", title_justify="left")
    for name in ("constant", "value", "known to"):
        constants.add_column(name, justify="left" if name == "constant" else "right", no_wrap=name != "constant")
    for constant in profile.constants:
        known = f"{constant.error:.0%}" if constant.identified else "not identified"
        constants.add_row(constant.name, f"{constant.value:.4g}", known)
    return Group(Fitted(operators), Text(), Fitted(constants), Text(), Text(profile.summary()))
