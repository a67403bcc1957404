"""Search by ask and tell: the tuners of the papers, the guard, and the study that runs them."""

from lagom_overlap.tune.base import Problems, Trial, Tuner
from lagom_overlap.tune.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tune.guard import Guarded
from lagom_overlap.tune.journal import Entry, Step, StepKind, entries_from_json, entry_to_json
from lagom_overlap.tune.study import Phase, Study
from lagom_overlap.tune.verdict import PairedRatio, Verdict

__all__ = [
    "Entry",
    "GroupwiseTuner",
    "Guarded",
    "PairedRatio",
    "Phase",
    "Probe",
    "Problems",
    "Search",
    "Step",
    "StepKind",
    "Study",
    "Trial",
    "Tuner",
    "Verdict",
    "entries_from_json",
    "entry_to_json",
]
