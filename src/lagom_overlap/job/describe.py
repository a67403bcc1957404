"""What a backend is, in words for people, and what may not be concluded from its figures."""

from lagom_overlap.job.build import cluster_of
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


def describe_backend(spec: JobSpec, backend: str) -> str:
    """One line: what ran the measurements."""
    cluster = cluster_of(spec)
    if backend == "simulated" and cluster is not None:
        ranks = spec.parallel.fsdp if spec.parallel else spec.job.ranks
        noise = f", {spec.cost.noise:.0%} noise" if spec.cost.noise else ""
        return f"simulated: {ranks} x {cluster.gpu.name} ({cluster.name}), profile {spec.cost.profile}{noise}"
    if backend == "gloo":
        link = "loopback" if spec.job.link == "loopback" else f"emulated link of {spec.job.link}"
        return f"gloo: {spec.job.ranks} rank processes on this machine, {link}"
    return backend


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
