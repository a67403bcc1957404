"""Hooks of mkdocs: the site has the pages that lie outside of docs/, and its links lead where the repository's do.

The page of the Python interface is made from the docstrings of the public names.

A relative link of a page is seen from the page's place in the repository. In the site it leads to another page, or to a
copy of the file that it names: a program, a table, a job file. A link to a folder has no page and becomes plain text.
Notebooks are pages, too.
"""

import ast
import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
HOME = "README.md"
OUTSIDE = (HOME, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the site that do not lie in docs/; and those of benchmarks/."""
API = "api.md"
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
"""A block of code: what looks like a link there is none."""
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/ and the files that pages link to."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    outside = [ROOT / name for name in OUTSIDE] + sorted((ROOT / "benchmarks").rglob("*.md"))
    pages |= {path.relative_to(ROOT).as_posix() for path in outside}
    linked = {target for page in pages for target in _targets(page)}
    for notebook in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        name = notebook.relative_to(ROOT).as_posix()
        files.append(File.generated(config, _uri(name), content=_of_notebook(notebook)))
    for name in sorted(pages | {target for target in linked if (ROOT / target).is_file()}):
        if files.get_file_from_path(_uri(name)) is None:
            files.append(File.generated(config, _uri(name), abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, API, content=_api()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """The text of a page with its links as the site has them."""
    if page.file.src_uri == API or page.file.src_uri.startswith("notebooks/"):
        return markdown
    source = _source(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        text, link = match.groups()
        target, anchor = _resolved(source, link)
        if target is None:
            return match[0]
        if files.get_file_from_path(_uri(target)) is None:
            return text if (ROOT / target).is_dir() else match[0]
        return f"[{text}]({relpath(_uri(target), dirname(page.file.src_uri) or '.')}{anchor})"

    parts, start = [], 0
    for code in FENCED.finditer(markdown):
        # GitHub draws these; here it would take a script from the network, without which the search does not start.
        shown = "" if code[0].startswith("```mermaid") else code[0]
        parts += [LINK.sub(replaced, markdown[start : code.start()]), shown]
        start = code.end()
    return "".join([*parts, LINK.sub(replaced, markdown[start:])])


def _api() -> str:
    """The page of the public names: functions, then classes, each where it is defined."""
    tree = ast.parse((ROOT / "src" / "lagom_overlap" / "__init__.py").read_text(encoding="utf-8"))
    (homes,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    names = sorted((name, home) for home, defined in homes.items() for name in defined)
    lines = ["# Python", "", "`import lagom_overlap as lagom`; every name below is `lagom.NAME`.", ""]
    for title, is_class in (("Functions", False), ("Classes", True)):
        lines += [f"## {title}", ""]
        lines += [f"::: lagom_overlap.{home}.{name}\n" for name, home in names if name[0].isupper() == is_class]
    return "\n".join(lines)


def _of_notebook(path: Path) -> str:
    """The cells of a notebook, one after another, and where it lies."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shown = [
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else f"```python\n{''.join(cell['source'])}\n```"
        for cell in cells
    ]
    return "\n\n".join([*shown, f"The notebook: `{path.relative_to(ROOT).as_posix()}`."])


def _targets(page: str) -> list[str]:
    """What a page of the repository links to, as paths of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = (_resolved(page, match[2])[0] for match in LINK.finditer(text))
    return [target for target in found if target is not None]


def _resolved(page: str, link: str) -> tuple[str | None, str]:
    """The path in the repository that a link leads to, None where it leaves it or stays on the page, and its anchor."""
    path, sign, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return None, ""
    return normpath(join(dirname(page), path)), sign + anchor


def _uri(name: str) -> str:
    """Where the site has a file of the repository."""
    if name.endswith(".ipynb"):
        return f"notebooks/{Path(name).stem}.md"
    return "index.md" if name == HOME else name.removeprefix("docs/")


def _source(uri: str) -> str:
    """The file of the repository that a page of the site is made from."""
    if uri == "index.md":
        return HOME
    return uri if (ROOT / uri).is_file() and not (ROOT / "docs" / uri).is_file() else f"docs/{uri}"
