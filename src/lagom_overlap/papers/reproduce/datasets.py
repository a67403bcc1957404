"""Third-party data behind the accuracy tables: a manifest, where files are looked for, and fetching what is missing.

The manifest (`datasets.toml`) gives each file's source, commit, size, SHA-256 and licence. A file is looked for in

    $LAGOM_DATA, the shared data folder next to the checkout (../shared/data), the cache ($XDG_CACHE_HOME/lagom-overlap)

and counts only with the manifest's checksum, so that a table is made from the data that it names. Fetching needs a
network, follows no redirect to another scheme, reads no more than the manifest's size, and puts a file into the cache
whole or not at all.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.errors import DataError, OutputError
from lagom_overlap.record import read_regular, write_private

TIMEOUT_S: Final = 30.0
"""Of one answer of the server. Chosen."""
_MAX_BYTES: Final = 1 << 30
"""Chosen, far above the largest of them."""
_RAW: Final = "https://raw.githubusercontent.com"
_CODE_HOST: Final = "https://github.com/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One file of somebody else's; `also` are checksums of versions that count as the same data.

    `commit` and `file` say where it lies in its repository; without a file it cannot be fetched, and `why` says why.
    """

    name: str
    path: str
    source: str
    num_bytes: int
    sha256: str
    licence: str
    what: str
    commit: str | None = None
    file: str | None = None
    why: str | None = None
    also: tuple[str, ...] = ()

    @property
    def url(self) -> str | None:
        """Where it is fetched from; None where it cannot be."""
        if self.file is None:
            return None
        return f"{self.source.replace(_CODE_HOST, f'{_RAW}/')}/{self.commit}/{self.file}"

    def is_of(self, content: bytes) -> bool:
        """Whether these bytes are the data."""
        return hashlib.sha256(content).hexdigest() in (self.sha256, *self.also)


class DatasetState(StrEnum):
    """What became of a dataset."""

    HERE = "here"
    FETCHED = "fetched"
    ABSENT = "absent"
    OTHER = "other content"
    NO_SOURCE = "not to be fetched"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDataset:
    """A dataset, its state, and the file if there is one."""

    dataset: Dataset
    state: DatasetState
    path: Path | None = None


@cache
def datasets() -> tuple[Dataset, ...]:
    """The manifest."""
    text = (resources.files(__package__) / "datasets.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, tuple[Dataset, ...]])["datasets"]


def data_roots() -> tuple[Path, ...]:
    """The folders that are searched, in order; the last is the cache, where fetched files go."""
    roots = [Path(os.environ[key]) for key in ("LAGOM_DATA", "LAGOM_SHARED_DATA") if os.environ.get(key)]
    checkout = next((folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file()), None)
    if checkout is not None:
        roots.append(checkout.parent / "shared" / "data")
    return (*roots, cache_root())


def cache_root() -> Path:
    """The cache of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "lagom-overlap" / "data"


def look_up(dataset: Dataset) -> FoundDataset:
    """Where a dataset is; a file of another content is named, not used."""
    other: Path | None = None
    for root in data_roots():
        path = root / dataset.path
        try:
            content = read_regular(path, _MAX_BYTES)
        except OSError:
            continue
        if dataset.is_of(content):
            return FoundDataset(dataset=dataset, state=DatasetState.HERE, path=path)
        other = other or path
    if other is not None:
        return FoundDataset(dataset=dataset, state=DatasetState.OTHER, path=other)
    return FoundDataset(
        dataset=dataset, state=DatasetState.ABSENT if dataset.file is not None else DatasetState.NO_SOURCE
    )


def fetch(wanted: Sequence[Dataset], note: Callable[[str], None] = lambda _: None) -> tuple[FoundDataset, ...]:
    """Every dataset; missing ones are fetched into the cache.

    Raises:
        DataError: if a source cannot be reached or sends something else; what came before it stays.
        OutputError: if the cache cannot be written.
    """
    rows = []
    for dataset in wanted:
        known = look_up(dataset)
        url = dataset.url
        if known.state is DatasetState.HERE or url is None:
            rows.append(known)
            continue
        note(f"{dataset.name}: {url}")
        target = cache_root() / dataset.path
        content = download(url, dataset)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write {str(target.parent)!r}: {error.strerror}") from None
        write_private(target, content)
        rows.append(FoundDataset(dataset=dataset, state=DatasetState.FETCHED, path=target))
    return tuple(rows)


def download(url: str, dataset: Dataset) -> bytes:
    """The bytes at a URL, which must be the dataset's.

    Raises:
        DataError: if there is no network, the source refuses, or the content is another.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(dataset.num_bytes + 1)
    except urllib.error.HTTPError as error:
        raise DataError(f"dataset {dataset.name!r}: {url} answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise DataError(
            f"dataset {dataset.name!r}: {url} cannot be reached ({error.reason}); without a network, put the file to "
            f"{str(Path('$LAGOM_DATA') / dataset.path)!r}"
        ) from None
    except (OSError, HTTPException) as error:
        raise DataError(f"dataset {dataset.name!r}: {url} broke off ({error})") from None
    if not dataset.is_of(content):
        size = f"more than {dataset.num_bytes}" if len(content) > dataset.num_bytes else str(len(content))
        raise DataError(
            f"dataset {dataset.name!r}: {url} sent {size} bytes that are not the manifest's "
            f"({dataset.num_bytes} bytes, SHA-256 {dataset.sha256[:12]}...): nothing was kept"
        )
    return content
