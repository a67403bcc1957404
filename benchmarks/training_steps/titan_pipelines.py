"""torchtitan's pipelines where its tables print neither stages nor micro-batches: its own defaults, by release.

`generate_split_points` (pytorch/torchtitan @9dec370 `parallelisms/pipelining_utils.py`, December 2024; @820504e
`distributed/pipeline.py`, June 2025): one stage per rank, two under a schedule of several stages. In December 2024 the
first stage has the quotient of layers and stages, and what is left over goes one by one to the stages behind it; in
June 2025 embedding and head count as a layer each, and what is left over goes to the first stages. Micro-batches
(`build_pipeline_schedule`): in December 2024 as many as there are ranks, in June 2025 of one sequence each.
"""

from lagom_overlap.workload.parallel import PipelineSchedule
from measured_rows import BadRowError, Row

_STAGES_PER_RANK = 2


def schedule_of(row: Row) -> tuple[PipelineSchedule, int]:
    """A row's schedule and its stages per rank.

    Raises:
        BadRowError: if the schedule is not modelled.
    """
    text = "".join(letter for letter in row.text("schedule").lower() if letter.isalnum())
    if text in ("", "1f1b"):
        return PipelineSchedule.ONE_F_ONE_B, 1
    if text == "gpipe":
        return PipelineSchedule.GPIPE, 1
    if text == "interleaved1f1b":
        return PipelineSchedule.INTERLEAVED, row.needed_count("vp", _STAGES_PER_RANK)
    raise BadRowError(f"schedule is {row.text('schedule')[:40]!r}; modelled: 1F1B, Interleaved1F1B, GPipe")


def split_of(num_layers: int, num_stages: int, *, before_2025: bool) -> tuple[int, ...]:
    """Layers of each stage, in the order of forward.

    Raises:
        BadRowError: if some stage would have none.
    """
    tables = 0 if before_2025 else 1
    each, left = divmod(num_layers + 2 * tables, num_stages)
    sizes = [each] * num_stages
    first = 1 if before_2025 else 0
    for stage in range(first, first + left):
        sizes[stage] += 1
    sizes[0] -= tables
    sizes[-1] -= tables
    if min(sizes) < 1:
        raise BadRowError(f"pp x stages per rank is {num_stages}, more than the model's {num_layers} layers fill")
    return tuple(sizes)


def layout_text(sizes: tuple[int, ...]) -> str:
    """The same as a job file says it."""
    return f"E{'|'.join(f't*{size}' for size in sizes)}L"


def micro_batch_of(row: Row, data: int, pipeline: int, *, before_2025: bool) -> int:
    """Sequences of a micro-batch: the row's where it is not the whole of a rank's batch, else the release's default.

    Raises:
        BadRowError: if the batch cannot be cut so.
    """
    local, rest = divmod(row.needed_count("global_batch"), data)
    if rest:
        raise BadRowError(f"global_batch is {row.needed_count('global_batch')}, must be a multiple of data = {data}")
    stated = row.needed_count("micro_batch", local)
    if stated != local:
        return stated
    if not before_2025:
        return 1
    if local % pipeline:
        raise BadRowError(f"a rank's batch is {local}, must be a multiple of pp = {pipeline}, its micro-batches")
    return local // pipeline
