"""The data manifest: what it promises, where files are found, and fetching from a server of our own."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from lagom_overlap.cli.main import main
from lagom_overlap.errors import DataError
from lagom_overlap.papers.reproduce import datasets as module
from lagom_overlap.papers.reproduce.datasets import Dataset, DatasetState, data_roots, datasets, fetch, look_up

CONTENT = b"size,ms\n1024,0.5\n"
ONE = Dataset(
    name="one",
    path="sub/one.csv",
    source="https://github.com/someone/data",
    commit="0" * 40,
    file="one.csv",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
    what="a test",
)


class _Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:  # the name that http.server asks for
        status, body = self.answers.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, tuple[int, bytes]]]:
    """Answers by path; the manifest's host is this server, the cache and the data folder are empty folders."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    _Handler.answers = {}
    monkeypatch.setattr(module, "_RAW", f"http://127.0.0.1:{served.server_port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "data_roots", lambda: (tmp_path / "data", module.cache_root()))
    yield _Handler.answers
    served.shutdown()
    served.server_close()
    thread.join()


def path_of(dataset: Dataset) -> str:
    return f"/someone/data/{dataset.commit}/{dataset.file}"


def test_every_dataset_says_where_it_is_from_and_can_be_checked() -> None:
    names = [dataset.name for dataset in datasets()]
    assert len(names) == len(set(names)) > 20
    for dataset in datasets():
        assert re.fullmatch("[0-9a-f]{64}", dataset.sha256)
        assert dataset.num_bytes > 0
        assert dataset.licence
        assert dataset.source.startswith("https://")
        assert (dataset.file is None) == (dataset.why is not None)
        if dataset.file is not None:
            assert re.fullmatch("[0-9a-f]{40}", dataset.commit or "")
            assert dataset.url is not None
            assert str(dataset.commit) in dataset.url


def test_what_is_missing_is_fetched_whole_and_found_afterwards(server: dict[str, tuple[int, bytes]]) -> None:
    server[path_of(ONE)] = (200, CONTENT)
    assert look_up(ONE).state is DatasetState.ABSENT
    lines: list[str] = []
    (found,) = fetch([ONE], lines.append)
    assert found.state is DatasetState.FETCHED
    assert found.path is not None
    assert found.path.read_bytes() == CONTENT
    assert [path.name for path in found.path.parent.iterdir()] == ["one.csv"]
    assert look_up(ONE).state is DatasetState.HERE
    server.clear()
    (again,) = fetch([ONE], lines.append)
    assert again.state is DatasetState.HERE
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, CONTENT[:-1]), "sent 16 bytes that are not the manifest's"),
        ((200, CONTENT + b"x" * 99), "sent more than 17 bytes"),
        ((200, CONTENT.replace(b"5", b"6")), "nothing was kept"),
        ((404, b""), "answers 404"),
        ((500, b"oops"), "answers 500"),
    ],
)
def test_something_else_is_refused_and_not_kept(
    server: dict[str, tuple[int, bytes]], answer: tuple[int, bytes], words: str
) -> None:
    server[path_of(ONE)] = answer
    with pytest.raises(DataError, match=words):
        fetch([ONE])
    assert look_up(ONE).state is DatasetState.ABSENT


def test_without_a_network_one_line_says_where_to_put_the_file(
    server: dict[str, tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RAW", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be reached .*without a network, put the file to .*LAGOM_DATA"):
        fetch([ONE])


def test_a_file_of_the_name_with_another_content_is_named_and_not_used(
    server: dict[str, tuple[int, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / ONE.path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"else")
    assert look_up(ONE).state is DatasetState.OTHER


def test_folders_are_searched_in_the_stated_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAGOM_DATA", str(tmp_path))
    monkeypatch.delenv("LAGOM_SHARED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    roots = data_roots()
    assert (roots[0], roots[-1]) == (tmp_path, tmp_path / "c" / "lagom-overlap" / "data")


def test_the_verb_lists_fetches_and_prints_one_object(
    server: dict[str, tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lagom_overlap.papers.cli.datasets", lambda: (ONE,))
    server[path_of(ONE)] = (200, CONTENT)
    assert main(["reproduce", "data"]) == 0
    assert "1 absent.\nNext: lagom reproduce data --fetch" in capsys.readouterr().out
    assert main(["reproduce", "data", "--fetch", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (row["dataset"]["name"], row["state"], row["dataset"]["licence"]) == ("one", "fetched", "MIT")
    assert main(["reproduce", "fig5", "--fetch"]) == 2
    assert main(["reproduce", "data", "--out", "x"]) == 2
