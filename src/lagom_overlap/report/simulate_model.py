"""What a simulated iteration is made of, as it is printed and drawn. All times in seconds, sizes in bytes."""

import msgspec


class CommunicatorJson(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator on one stage: running, running while nothing computed, what it stretched computation by."""

    name: str
    total_s: float
    exposed_s: float
    stretched_s: float


class MemoryJson(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one GPU at its peak."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    total_bytes: int


class StageJson(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage: what its iteration is spent on, and its memory."""

    stage: int
    busy_s: float
    bubble_s: float
    compute_s: float
    launch_s: float
    gradients_s: float
    optimizer_s: float
    communicators: list[CommunicatorJson]
    memory: MemoryJson


class CarveOutJson(msgspec.Struct, frozen=True, kw_only=True):
    """The same iteration with another carve-out, everything else as it is."""

    sm_carveout: int
    iteration_s: float


class SimulateJson(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `lagom simulate`; `bubble_s` and `communicators` are of the stage that ends last.

    `carve_outs` is absent where the job names no carve-outs to try.
    """

    tool: str
    version: str
    job: str
    model: str
    cluster: str
    num_gpus: int
    num_micro_batches: int
    iteration_s: float
    tokens_per_s: float
    model_flops: float
    mfu: float
    peak_flops_per_gpu: float
    memory_bytes: int
    memory_limit_bytes: int
    bubble_s: float
    communicators: list[CommunicatorJson]
    stages: list[StageJson]
    notes: list[str]
    files: list[str]
    carve_outs: list[CarveOutJson] | msgspec.UnsetType = msgspec.UNSET
