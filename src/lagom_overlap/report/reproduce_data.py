"""Third-party datasets with where they are: what `lagom reproduce data` prints."""

import msgspec
from rich.table import Table


class DatasetJson(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset of the manifest, its state, and the file; `why` says why it cannot be fetched."""

    name: str
    state: str
    file: str | None
    source: str
    commit: str | None
    url: str | None
    num_bytes: int
    sha256: str
    licence: str
    what: str
    why: str | None


class DataReport(msgspec.Struct, frozen=True):
    """All datasets, in the manifest's order."""

    datasets: list[DatasetJson]


def data_table(report: DataReport) -> Table:
    """Name, state, licence and source; why one cannot be fetched."""
    table = Table(title="Third-party data (not part of the project)", title_justify="left")
    for name in ("dataset", "state", "licence", "source"):
        table.add_column(name, overflow="fold", no_wrap=name == "dataset")
    for row in report.datasets:
        source = row.source.partition("://")[2] + (f" @{row.commit[:7]}" if row.commit else "")
        table.add_row(row.name, row.state, row.licence, source)
    return table
