"""Pages link to what is there, and name modules, files and public names that exist."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import lagom_overlap

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lagom_overlap"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@cache
def _anchors(page: Path) -> frozenset[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return frozenset(_slug(match) for match in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=_name)
def test_every_relative_link_resolves(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_module_that_a_page_names_exists(page: Path):
    missing = [name for name in _named_paths(page.read_text(encoding="utf-8")) if not _exists(name)]
    assert missing == []


def test_every_name_of_the_glossary_stands_in_the_file_it_names():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)` (?:and `(\w+)` )?in `([\w/]+\.py)`", page)
    assert len(named) >= 20
    missing = [
        f"{name} in {path}"
        for *names, path in named
        for name in filter(None, names)
        if not re.search(rf"\b{name}\b", (PACKAGE / path).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_page_is_in_the_site_s_navigation():
    """mkdocs would say so, too, but only where the site is built."""
    shown = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    made_by_its_hooks = {"index.md", "api.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    made_by_its_hooks |= {f"notebooks/{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert shown - made_by_its_hooks == pages


def _named_paths(text: str) -> list[str]:
    """Names with a slash in backticks of Python files, or whose first part is a folder of ours, made by no build."""
    folders = {path.name for path in [*PACKAGE.iterdir(), *ROOT.iterdir()] if path.is_dir()} - {"build"}
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+)`", text)
    return [name for name in named if name.endswith(".py") or name.split("/")[0] in folders]


def _exists(name: str) -> bool:
    bases = (PACKAGE, ROOT, ROOT / "emulate" / "src")
    return any((base / (name + suffix)).exists() for base in bases for suffix in ("", ".py"))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_dotted_name_of_the_package_exists(page: Path):
    missing = []
    for name in re.findall(r"\blagom_overlap((?:\.\w+)+)", page.read_text(encoding="utf-8")):
        parts = name.strip(".").split(".")
        while parts and not _is_module(parts):
            last = parts.pop()
        if not parts and last not in lagom_overlap.__all__ and last not in _ENTRY_POINT_GROUPS:
            missing.append(name)
    assert missing == []


_ENTRY_POINT_GROUPS = {"tuners", "backends", "planners", "engines", "models", "verbs"}


def _is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=_name)
def test_every_python_block_imports_names_that_exist(page: Path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    missing = [f"{module}.{name}" for block in blocks for module, name in _imports(block) if not _defines(module, name)]
    assert missing == []


def _imports(block: str) -> list[tuple[str, str]]:
    """(module, name) of all that a block takes out of the package, by import or as an attribute of it."""
    tree = ast.parse(block)
    found = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lagom_overlap")
        for alias in node.names
    ]
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "lagom_overlap"
    }
    used = [
        ("lagom_overlap", node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
    ]
    return found + used


def _defines(module: str, name: str) -> bool:
    """Whether a module binds a name, read from its source: nothing heavy is imported."""
    if module == "lagom_overlap":
        return name in lagom_overlap.__all__
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    bound = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    bound |= {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return name in bound
