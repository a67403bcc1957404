"""What a backend's contenders are, in words for people, and what may not be concluded from its figures."""

from lagom_overlap.backends.base import Backend
from lagom_overlap.jobfile.spec import JobSpec

_SIMULATED = ("Simulated: no hardware was measured. The times come from the contention model under the named profile.",)
_PAPER_SCALE = (
    "Profile paper_scale is fitted to the published end-to-end range of the Lagom paper; it is not physical.",
)
_GLOO = (
    "Measured on CPU ranks of one machine over gloo. This shows neither GPU contention nor a cluster's network.",
    "The ratio over the native call is engine and tuning together: sliced collectives avoid gloo's temporary buffers. "
    "Only the ratio over the engine's own whole-message setting is tuning.",
)
_BLOCKED = (
    "Computation Y runs from the group's start to the end of its last computation. The native PyTorch call may block "
    "its caller before the first one starts; that time counts too, and is no contention.",
)
_EMULATED = ("The link is emulated by a rate limit on the loopback of a network namespace: it is no cluster.",)
_RECORDED = ("Replayed from a recording: nothing was measured in this run.",)


ONE_SIDED = (
    "The computation's side ({keys}) was not searched: tuner {tuner!r} knows the collectives only, "
    "'both_sides' searches both."
)
ENDED_BY_ITSELF = "Tuner {tuner} stopped by itself after {done} of the {asked} measurements of [tune] budget."
OUT_OF_BUDGET = "The search was ended by its budget, not by the tuner: more measurements may find more."


def arm_words(backend_name: str, backend: Backend) -> dict[str, str]:
    """What the contenders of the verdict are, in words, by arm name; a replay keeps the recording's."""
    if backend_name == "gloo":
        return {"default": "the native PyTorch call", "engine_default": "the engine's whole-message setting"}
    if backend_name == "simulated":
        return {"default": "NCCL's default (simulated)"}
    return dict(getattr(backend, "arm_words", {}))


def notes_of(spec: JobSpec, backend_name: str, backend: Backend) -> tuple[str, ...]:
    """The caveats that belong with every figure of this backend; a replay keeps the recording's."""
    match backend_name:
        case "simulated":
            return _SIMULATED + (_PAPER_SCALE if spec.cost.profile == "paper_scale" else ())
        case "gloo":
            return _GLOO + _BLOCKED + (() if spec.job.link == "loopback" else _EMULATED)
        case _:
            recorded = tuple(getattr(backend, "notes", ()))
            return (*_RECORDED, *recorded) if backend_name == "recorded" else recorded
