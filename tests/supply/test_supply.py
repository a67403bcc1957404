"""What is installed is pinned by hash, the wheel says what is in it, and nothing of ours opens a connection unasked."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lagom_overlap

ROOT = Path(__file__).parents[2]
FETCHES = "reproduce/datasets.py"
"""The one module that downloads: `reproduce --fetch`."""
CLIENTS = {"urllib.request", "http.client", "ftplib", "smtplib", "xmlrpc", "requests", "httpx", "aiohttp", "urllib3"}


def test_every_package_that_make_installs_is_pinned_by_version_and_hash() -> None:
    text = "".join(path.read_text() for path in sorted(ROOT.glob("constraints*.txt")))
    rows = re.split(r"\n(?=[A-Za-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    names = [re.match(r"([\w.-]+)==[\w.+]+ \\\n", row) for row in rows]
    assert all(names), "a row without a version"
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", row) for row in rows)
    held = {_normal(name[1]) for name in names if name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert {_normal(re.match(r"[\w.-]+", name)[0]) for name in wanted} <= held  # type: ignore[index]
    made = (ROOT / "Makefile").read_text()
    assert "--no-deps --require-hashes" in made
    assert "$(HASHED) --requirement constraints.txt" in made


CUDA = ("nvidia-", "cuda-", "triton")
"""What torch's CUDA build needs is not pinned, as SECURITY.md says."""


def test_what_pinned_packages_need_is_pinned_too() -> None:
    """Else the last call of pip, which checks no hash, would bring it: torch's setuptools, once."""
    text = "".join(path.read_text() for path in ROOT.glob("constraints*.txt"))
    held = {_normal(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)}
    missing, num_read = set(), 0
    for name in held:
        try:
            needs = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        num_read += 1
        for need in needs:
            other = _normal(need.name)
            if other.startswith(CUDA) or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if other not in held or not need.specifier.contains(held[other]):
                missing.add(f"{name} needs {need}")
    assert not missing
    assert num_read >= 10


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_a_bill_of_its_materials(tmp_path: Path) -> None:
    """PEP 770: in `.dist-info/sboms`; every compiled file of the wheel, by its hash, and what it needs at run time."""
    pytest.importorskip("scikit_build_core")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = str(Path(sys.executable).parent)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    command += [str(tmp_path), f"--config-settings=build-dir={tmp_path / 'build'}", str(ROOT)]
    subprocess.run(command, check=True, env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}, cwd=tmp_path)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if "/sboms/" in name]
        assert re.fullmatch(r"lagom_overlap-[\w.]+\.dist-info/sboms/lagom-overlap\.cdx\.json", name)
        bill = json.loads(wheel.read(name))
        compiled = {
            held.removeprefix("lagom_overlap/"): hashlib.sha256(wheel.read(held)).hexdigest()
            for held in wheel.namelist()
            if ".so" in Path(held).name
        }
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "lagom-overlap")
    own = {part["name"]: part["hashes"][0]["content"] for part in bill["components"] if "hashes" in part}
    assert own == compiled
    needed = {part["name"] for part in bill["components"] if "hashes" not in part}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert needed == {re.match(r"[\w.-]+", name)[0] for name in project["dependencies"]}  # type: ignore[index]
    refs = {part["bom-ref"] for part in bill["components"]}
    assert set(bill["dependencies"][0]["dependsOn"]) == refs


def test_one_module_alone_can_download_anything() -> None:
    package, found = Path(lagom_overlap.__file__).parent, set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if CLIENTS & {*names, *(name.partition(".")[0] for name in names)}:
                found.add(path.relative_to(package).as_posix())
    assert found == {FETCHES}


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", str(ROOT / "examples/phi2_fsdp_a40.toml")],
        ["doctor"],
        ["reproduce", "data"],
        ["plan", "--help"],
    ],
)
def test_a_verb_opens_no_connection(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an audit hook of a process of its own: no name is looked up, no address connected to."""
    script = (
        "import sys\n"
        "def hook(event, words):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname', 'urllib.Request'):\n"
        "        sys.stdout.write(f'NETWORK {event} {words}\\n')\n"
        "sys.addaudithook(hook)\n"
        "from lagom_overlap.cli.main import main\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "NETWORK" not in done.stdout, done.stdout
    assert done.returncode in (0, 2), done.stderr
