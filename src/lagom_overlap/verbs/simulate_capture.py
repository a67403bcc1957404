"""`lagom simulate` of a captured step: the operators as the framework issues them, under the contention model."""

from pathlib import Path

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import beyond_note
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.step import nodes_notes
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.planners.simulated import stands_still_s
from lagom_overlap.results.simulate import SimulateCaptureResult
from lagom_overlap.sim.iteration import simulate_iteration
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.verbs.simulate_what_if import captured_what_ifs

FILES = ("run.json", "report.html", "timeline.json")
_NOTE = "Simulated: no hardware was measured. How far off the model is: lagom docs accuracy."


def simulate_capture(job: Job, out: Path | None) -> SimulateCaptureResult:
    """Simulates one step of the rank that the job's capture holds, and writes the folder if asked to.

    Raises:
        JobError: if the job asks for what is not simulated, or its capture cannot be read.
        OutputError: if the folder cannot be written.
    """
    spec, capture, cluster = job.spec, job.captured, job.cluster
    if spec.job.backend != "simulated":
        raise JobError(f"job.backend is {spec.job.backend!r}; lagom simulate runs the simulated one only")
    if capture is None:
        raise JobError("the job names no capture")
    assert cluster is not None
    issued, model = capture.issued, job.price
    timeline = simulate_iteration(issued, {}, model)
    metrics = overlap_metrics(timeline)
    spans = {span.name: (span.start_s, span.end_s) for span in timeline.spans}
    peak, limit = peak_of_spans(issued, spans), cluster.gpu.memory_bytes
    notes = [_NOTE, f"Profile {model.profile.label}", *capture.notes, *beyond_note(peak, cluster.gpu)]
    notes += nodes_notes(spec, cluster)
    result = SimulateCaptureResult(
        job=spec.job.name,
        capture=issued.name,
        cluster=cluster.name,
        num_ranks=capture.num_ranks,
        num_ops=len(issued.ops),
        num_comms=len(issued.comms),
        iteration_s=metrics.makespan_s,
        compute_s=metrics.comp_s,
        comm_s=metrics.comm_s,
        exposed_comm_s=stands_still_s(timeline),
        peak_memory_bytes=peak,
        memory_limit_bytes=limit,
        what_ifs=captured_what_ifs(capture.iteration, issued, model, timeline),
        notes=tuple(notes),
        files=() if out is None else tuple(out / name for name in FILES),
        simulated=timeline,
    )
    if out is not None:
        _write(out, job, result)
    return result


def _write(folder: Path, job: Job, result: SimulateCaptureResult) -> None:
    from lagom_overlap.report.simulate_capture import render_captured  # noqa: PLC0415 - for a run folder alone

    RunFolder.create(folder, result.job).write(
        RunRecord.now(RunKind.SIMULATE_CAPTURE, seed=None, job=job.spec),
        result,
        {
            "report.html": lambda: render_captured(result).encode(),
            "timeline.json": lambda: chrome_trace({result.job: result.timeline}),
        },
    )
