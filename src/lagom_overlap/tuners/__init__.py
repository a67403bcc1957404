"""Search by ask and tell: the tuners of the papers, the guard, and the study that runs them."""

from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entries_from_json, entry_to_json
from lagom_overlap.tuners.study import Study, StudyPhase
from lagom_overlap.tuners.verdict import PairedRatio, Verdict

__all__ = [
    "Entry",
    "GroupwiseTuner",
    "Guarded",
    "PairedRatio",
    "Probe",
    "Problems",
    "Search",
    "Step",
    "StepKind",
    "Study",
    "StudyPhase",
    "Trial",
    "Tuner",
    "Verdict",
    "entries_from_json",
    "entry_to_json",
]
