"""The folder of a training job that was tuned while it ran, without the job."""

import json
from pathlib import Path

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace
from lagom_overlap.collective.space import Subspace
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.results.step_times import RunSteps, write_step_times
from lagom_overlap.tuners.bundle import header_line
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entry_to_json
from lagom_overlap.tuners.problem import Failure, GroupProblem, Measurement
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup


def leave(path: Path) -> Path:
    """A job that was tuned while it ran, as its rank 0 leaves it: two settings tried, of which one could not run."""
    folder = RunFolder.create(path, "run")
    asked = {"command": ["python", "train.py"], "mode": "online", "config": None, "tuner": None}
    folder.write(RunRecord.now(RunKind.RUN, seed=None, request=asked))
    events = [
        {"event": "begin", "mode": "online", "world_size": 2, "backend": "gloo"},
        {"event": "model", "type": "Net"},
        {"event": "state", "state": "record", "reason": "new job", "settings": 0, "steps_left": 100},
        {"event": "state", "state": "watch", "reason": "proven faster", "settings": 1},
        {"event": "end", "steps": 90, "result": "1 call site is set", "why": "proven faster", "next": "lagom run"},
    ]
    lines = [json.dumps({"time": "2026-11-28T00:00:00Z", "rank": 0, **event}) for event in events]
    (folder.path / "events.0.jsonl").write_text("\n".join(lines) + '\n{"time": "2026-11-28T0')
    space = ConfigSpace((Subspace(num_channels=(1, 2), chunk_bytes=(4096,)),))
    comm = CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, 1 << 20, 2), communicator="fsdp")
    group = OverlapGroup(name="g", computations=(CompOp(name="mm", work=Gemm(64, 64, 64)),), comms=(comm,))
    configs = [CommConfig(num_channels=number, chunk_bytes=4096) for number in (1, 2)]
    problem = GroupProblem(group=group, spaces=(space,), default=(configs[0],), baselines={})
    measured = Measurement(makespan_s=0.5, comp_s=0.4, comm_s=(0.3,))
    entries = [
        Entry(
            step=Step(number=0, kind=StepKind.SEARCH, assignments={"g": (configs[0],)}, reasons={"g": "default"}),
            outcomes={"g": measured},
        ),
        Entry(
            step=Step(number=1, kind=StepKind.SEARCH, assignments={"g": (configs[1],)}, priorities={"g": {"c": 0.25}}),
            outcomes={"g": Failure("no memory")},
        ),
    ]
    journal = [header_line("job", "online-gloo", (problem,)), *(entry_to_json(entry, (problem,)) for entry in entries)]
    (folder.path / "journal.0.jsonl").write_text("\n".join(journal) + "\n")
    write_step_times(folder.path, RunSteps(num_steps=90, num_settings=1, steps_s=(9.0, 9.0, 9.0, 0.5, 0.25)))
    return folder.path
