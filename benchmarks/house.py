"""What docs/design.md says of the package's own shape, counted: lines, names, words, walks and imports.

    python benchmarks/house.py [--numbers] [--locals]

`--numbers` lists the module-level numbers without words, `--locals` the functions that bind one of the empty locals.
A walk runs a verb on a small phi-2 job and counts the functions that are entered with the job, its specification or its
step among their arguments (or with a request that holds one), the files that these stand in, and their calls. CPU times
are medians of five fresh processes.
"""

import argparse
import ast
import io
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.verbs.compare import CompareRequest, run_compare
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.verbs.tune import TuneRequest, run_tune

ROOT = Path(__file__).parent.parent
MAIN = ROOT / "src" / "lagom_overlap"
EMPTY_LOCALS = frozenset({"found", "held", "made", "said", "told"})
"""Locals that say how a value came, not what it is (conventions, 9c)."""
REPEATS = 5
SMALL_JOB = {
    "job": {"name": "walk", "backend": "simulated"},
    "model": {"name": "phi-2", "seq_len": 1024},
    "cluster": {"preset": "a40_nvlink"},
    "parallel": {"fsdp": 8, "micro_batch": 1},
    "tune": {"pairs": 3},
}
IMPORTS = ("lagom_overlap.online.tuner", "lagom_overlap.online.launch_session")
"""What a rank that tunes online begins with."""
COMMANDS = ("--version", "--help")
_TIMED = """
import sys
from importlib import import_module
from time import process_time
for name in {foreign}:
    try:
        import_module(name)
    except Exception:  # one that only its package can import
        pass
began = process_time()
import {module}
print(process_time() - began)
"""


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """The modules of a folder, parsed."""
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def size(folder: str) -> str:
    """Lines of Python and files."""
    paths = list((ROOT / folder).rglob("*.py"))
    return f"{sum(len(path.read_text(encoding='utf-8').splitlines()) for path in paths):,} in {len(paths)}"


def num_comments() -> int:
    """Comments of the main package; docstrings and the words below a constant are none."""
    return sum(
        token.type == tokenize.COMMENT
        for path in MAIN.rglob("*.py")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    )


def class_homes() -> dict[str, list[Path]]:
    """Public class names with two homes."""
    homes = defaultdict[str, list[Path]](list)
    for path, tree in trees(MAIN):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All of the main package, methods and inner ones too."""
    for path, tree in trees(MAIN):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def binds_empty_local(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a local or argument of the function itself has one of those names."""
    stack: list[ast.AST] = [*ast.iter_child_nodes(function)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_LOCALS:
            return True
        if isinstance(node, ast.arg) and node.arg in EMPTY_LOCALS:
            return True
        stack += ast.iter_child_nodes(node)
    return False


def _is_number(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) or _is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(map(_is_number, elements))
    return False


def numbers() -> Iterator[tuple[Path, ast.stmt, bool]]:
    """Module-level numbers, and whether words stand with each: below it, on its line, or on the line above."""
    for path, tree in trees(MAIN):
        lines = path.read_text(encoding="utf-8").splitlines()
        for place, node in enumerate(tree.body):
            if not (isinstance(node, ast.Assign | ast.AnnAssign) and _is_number(node.value)):
                continue
            after = tree.body[place + 1] if place + 1 < len(tree.body) else None
            below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            beside = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
            above = node.lineno > 1 and lines[node.lineno - 2].startswith("#")
            yield path, node, below or beside or above


def walk(run: Callable[[], object]) -> str:
    """Files, functions and calls through which a job goes."""
    calls = defaultdict[tuple[str, str], int](int)
    kinds = (Job, JobSpec, JobStep)

    def follow(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or str(MAIN) not in code.co_filename or "<" in code.co_name:
            return
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            is_ours = type(value).__module__.startswith("lagom_overlap")
            if isinstance(value, kinds) or (is_ours and isinstance(getattr(value, "job", None), kinds)):
                calls[code.co_filename, code.co_qualname] += 1
                return

    sys.setprofile(follow)
    try:
        run()
    finally:
        sys.setprofile(None)
    return f"{len({file for file, _ in calls})} files, {len(calls)} functions, {sum(calls.values())} calls"


def walks() -> Iterator[tuple[str, str]]:
    """The walks of the three verbs."""
    spec: JobSpec = parse_job(SMALL_JOB, "job.toml")
    with tempfile.TemporaryDirectory() as folder:
        yield "tune", walk(lambda: run_tune(TuneRequest(job=Job(spec), out=Path(folder) / "run")))
    yield "compare", walk(lambda: run_compare(CompareRequest(job=Job(spec), tuners=("default", "lagom"))))
    yield "plan's input", walk(lambda: read_input(spec))


def printed_by(*arguments: str) -> str:
    """What a fresh Python prints."""
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def import_cost(module: str) -> str:
    """Our modules that an import loads, and its CPU time once everybody else's modules are loaded."""
    loaded = printed_by("-c", f"import sys\nimport {module}\nprint(*sys.modules)").split()
    foreign = [name for name in loaded if name.partition(".")[0] not in ("lagom_overlap", "__main__")]
    code = _TIMED.format(foreign=foreign, module=module)
    seconds = [float(printed_by("-c", code)) for _ in range(REPEATS)]
    return f"{len(loaded) - len(foreign) - 1} of ours, {median(seconds):.2f} s"


def cpu_s(*arguments: str) -> float:
    """CPU seconds of a fresh Python, the median of several."""
    spent = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        printed_by(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(spent)


def rows() -> Iterator[tuple[str, Any]]:
    """The table."""
    for folder in ("src/lagom_overlap", "src/lagom_overlap/papers", "emulate/src", "tests", "benchmarks"):
        yield f"lines of Python, files: {folder}", size(folder)
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MAIN.rglob("*.py"))
    yield "comments per 1,000 lines", f"{1000 * num_comments() / num_lines:.1f}"
    yield "public class names with two homes", len(class_homes())
    stems = [path.stem for path in MAIN.rglob("*.py") if path.stem != "__init__"]
    doubled = [stem for stem in stems if stems.count(stem) > 1]
    yield "file stems that several files share", f"{len(set(doubled))}, {len(doubled)} files"
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for _, node in functions()]
    yield (
        "functions, median length in lines, over 50",
        f"{len(lengths)}, {median(lengths):g}, {sum(n > 50 for n in lengths)}",
    )
    yield (
        f"functions that bind {', '.join(sorted(EMPTY_LOCALS))}",
        sum(binds_empty_local(node) for _, node in functions()),
    )
    every = list(numbers())
    yield "module-level numbers without words", f"{sum(not has_words for *_, has_words in every)} of {len(every)}"
    leader = next(
        node for _, tree in trees(MAIN / "online") for node in tree.body if getattr(node, "name", "") == "Leader"
    )
    assert isinstance(leader, ast.ClassDef)
    attributes = {
        node.attr
        for node in ast.walk(leader)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }
    methods = sum(isinstance(node, ast.FunctionDef) for node in leader.body)
    yield "Leader: attributes, methods", f"{len(attributes)}, {methods}"
    kinds = [path for path in MAIN.rglob("*.py") if "CollectiveKind." in path.read_text(encoding="utf-8")]
    yield "files that name a CollectiveKind", len(kinds)
    yield from ((f"walk: {name}", said) for name, said in walks())
    yield from ((f"import {module}", import_cost(module)) for module in IMPORTS)
    yield "an empty Python: CPU", f"{cpu_s('-c', 'pass'):.2f} s"
    yield from ((f"lagom {flag}: CPU", f"{cpu_s('-m', 'lagom_overlap', flag):.2f} s") for flag in COMMANDS)


def main(argv: list[str] | None = None) -> None:
    """Prints the table, or one of the lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numbers", action="store_true", help="the module-level numbers without words")
    parser.add_argument("--locals", action="store_true", help="the functions that bind an empty local")
    arguments = parser.parse_args(argv)
    if arguments.numbers:
        for path, node, has_words in numbers():
            if not has_words:
                print(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    elif arguments.locals:
        for path, function in functions():
            if binds_empty_local(function):
                print(f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}")
    else:
        for what, figure in rows():
            print(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()
