"""What `lagom doctor` found. Format of its JSON: docs/formats.md."""

from dataclasses import dataclass

from lagom_overlap.results.base import Result, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """One finding: does it work, what was found, and what to do where it does not."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSupport:
    """By which route a knob can be set, how far, and with what caveats."""

    route: str | None
    reach: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRow:
    """One release of NCCL: the PyTorch releases that bring it, whether it is the one found here, each knob."""

    nccl: str
    torch: tuple[str, ...]
    is_here: bool
    knobs: dict[str, KnobSupport]


@dataclass(frozen=True, kw_only=True)
class DoctorResult(Result):
    """All findings."""

    tool: str = "lagom doctor"
    machine: dict[str, str]
    versions: dict[str, str]
    tuners: tuple[str, ...]
    backends: tuple[str, ...]
    presets: tuple[str, ...]
    models: tuple[str, ...]
    checks: tuple[DoctorCheck, ...]
    support: tuple[SupportRow, ...]

    def summary(self) -> str:
        """One line per check."""
        return "\n".join(
            f"{'ok' if check.ok else '--'} {check.name}: {check.found}" + (f" ({check.remedy})" if check.remedy else "")
            for check in self.checks
        )

    def table(self) -> list[Row]:
        """One row per check."""
        return [
            {"name": check.name, "ok": check.ok, "found": check.found, "remedy": check.remedy} for check in self.checks
        ]
