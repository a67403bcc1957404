"""What a backend's contenders are, in words for people, and what may not be concluded from its figures."""

from lagom_overlap.job.spec import JobSpec

_SIMULATED = ("Simulated: no hardware was measured. The times come from the contention model under the named profile.",)
_PAPER_SCALE = (
    "Profile paper_scale is fitted to the published end-to-end range of the Lagom paper; it is not physical.",
)
_GLOO = (
    "Measured on CPU ranks of one machine over gloo. This shows neither GPU contention nor a cluster's network.",
    "The ratio over the native call is engine and tuning together: sliced collectives avoid gloo's temporary buffers. "
    "Only the ratio over the engine's own whole-message setting is tuning.",
)
_EMULATED = ("The link is emulated by a rate limit on the loopback of a network namespace: it is no cluster.",)
_RECORDED = ("Replayed from a recording: nothing was measured in this run.",)


def arm_words(backend: str) -> dict[str, str]:
    """What the contenders of the verdict are, in words, by arm name."""
    if backend == "gloo":
        return {"default": "the native PyTorch call", "engine_default": "the engine's whole-message setting"}
    if backend == "simulated":
        return {"default": "NCCL's default (simulated)"}
    return {}


def notes_of(spec: JobSpec, backend: str) -> tuple[str, ...]:
    """The caveats that belong beside every figure of this backend."""
    match backend:
        case "simulated":
            return _SIMULATED + (_PAPER_SCALE if spec.cost.profile == "paper_scale" else ())
        case "gloo":
            return _GLOO + (() if spec.job.link == "loopback" else _EMULATED)
        case "recorded":
            return _RECORDED
        case _:
            return ()
