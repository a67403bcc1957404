"""The datasets of the manifest with what became of them, as they are printed."""

from collections.abc import Iterable

from lagom_overlap.job.reproduce.datasets import Found
from lagom_overlap.report.reproduce_data import DataReport, DatasetJson


def data_report(found: Iterable[Found]) -> DataReport:
    """One row per dataset."""
    return DataReport(
        [
            DatasetJson(
                name=one.dataset.name,
                state=one.state,
                file=None if one.path is None else str(one.path),
                source=one.dataset.source,
                commit=one.dataset.commit,
                url=one.dataset.url,
                num_bytes=one.dataset.num_bytes,
                sha256=one.dataset.sha256,
                licence=one.dataset.licence,
                what=one.dataset.what,
                why=one.dataset.why,
            )
            for one in found
        ]
    )
