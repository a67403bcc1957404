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

import lagom_emulate
import lagom_overlap

ROOT = Path(__file__).parents[2]
FETCHES = "papers/reproduce/datasets.py"
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
    names = {_normal(re.match(r"[\w.-]+", name)[0]) for name in wanted}  # type: ignore[index]
    assert names - {"lagom-emulate"} <= held
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


def test_both_distributions_have_one_version() -> None:
    """lagom-emulate reads pyproject.toml, too, by a link; what else says it is held here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lagom_overlap.__version__
    assert project["optional-dependencies"]["emulate"] == [f"lagom-emulate=={lagom_overlap.__version__}"]
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == project["version"]  # type: ignore[index]
    assert (ROOT / "emulate" / "overlap.toml").samefile(ROOT / "pyproject.toml")


LIBRARIES = {
    "lagom_overlap/lib": {"fake_nccl", "lagom_list_schedule", "lagom_search", "lagom_simulation"}
    | {"lagom_tuner", "lagom_workers"},
    "lagom_emulate/lib": {"cublas", "cublasLt", "cuda", "cudart", "cupti", "nccl", "nvidia-ml"},
}
"""The compiled files of each wheel: the names of CUDA's and NCCL's in the one alone."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param("lagom-overlap", marks=pytest.mark.long), "lagom-emulate"])
def test_each_distribution_holds_its_own_and_a_bill_of_its_materials(name: str, tmp_path: Path) -> None:
    """A wheel built from its sdist; the bill (PEP 770) has each compiled file by its hash, and what runs need."""
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("build")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    package, folder = name.replace("-", "_"), str(Path(sys.executable).parent)
    source = ROOT if name == "lagom-overlap" else ROOT / "emulate"
    command = [sys.executable, "-m", "build", "--no-isolation", f"--config-setting=build-dir={tmp_path / 'build'}"]
    command.append("--config-setting=cmake.build-type=Debug")  # optimising them is most of what a build takes
    subprocess.run(
        [*command, "--outdir", str(tmp_path), str(source)],
        check=True,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    (path,) = tmp_path.glob("*.whl")
    info = f"{package}-{lagom_overlap.__version__}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        files = [file for file in wheel.namelist() if not file.startswith(f"{info}/")]
        bill = json.loads(wheel.read(f"{info}/sboms/{name}.cdx.json"))
        metadata = wheel.read(f"{info}/METADATA").decode()
        compiled = {file: hashlib.sha256(wheel.read(file)).hexdigest() for file in files if ".so" in Path(file).name}
    modules = {file.relative_to(source / "src").as_posix() for file in (source / "src").rglob("*.py")}
    assert modules == {file for file in files if file.endswith(".py")}
    assert all(file.startswith(f"{package}/") for file in files)
    if name == "lagom-overlap":  # what `lagom docs` shows
        pages = {f"{package}/{page.relative_to(ROOT).as_posix()}" for page in (ROOT / "docs").rglob("*.md")}
        assert pages == {file for file in files if file.endswith(".md")}
    assert {str(Path(file).parent) for file in compiled} == {f"{package}/lib"}
    assert {Path(file).name[3:].partition(".so")[0] for file in compiled} == LIBRARIES[f"{package}/lib"]
    needed = {Requirement(line) for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)}
    needed = {need.name for need in needed if "extra" not in str(need.marker)}
    assert needed == (_dependencies() if name == "lagom-overlap" else {"lagom-overlap"})
    if name == "lagom-emulate":
        assert f"Requires-Dist: lagom-overlap=={lagom_overlap.__version__}\n" in metadata
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", name)
    own = {f"{package}/{part['name']}": part["hashes"][0]["content"] for part in bill["components"] if "hashes" in part}
    assert own == compiled
    assert {part["name"] for part in bill["components"] if "hashes" not in part} == needed
    refs = {part["bom-ref"] for part in bill["components"]}
    assert set(bill["dependencies"][0]["dependsOn"]) == refs


def _dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.match(r"[\w.-]+", name)[0] for name in project["dependencies"]}  # type: ignore[index]


def _packages() -> list[Path]:
    return [Path(package.__file__).parent for package in (lagom_overlap, lagom_emulate)]  # type: ignore[arg-type]


def test_one_module_alone_can_download_anything() -> None:
    found = set()
    for package, path in ((at, path) for at in _packages() for path in at.rglob("*.py")):
        source = path.read_text()
        if not any(part in source for client in CLIENTS for part in client.split(".")[:1]):
            continue
        for node in ast.walk(ast.parse(source)):
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
