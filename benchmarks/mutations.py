"""Small wrong changes at random places of the package, and whether a test without ranks notices each.

    python benchmarks/mutations.py run FOLDER --seed 38 --changes 100  # goes on where it was; Ctrl-C keeps results
    python benchmarks/mutations.py run FOLDER --seed 38 --again        # what did not die, with today's tests
    python benchmarks/mutations.py count FOLDER

A place is a comparison, an operator, a number, a condition, a call's arguments, a returned value or a statement. Places
are shuffled by the seed, the kind of change at each is drawn too: the first 100 of a seed are the first 100 of 300.
FOLDER gets a copy of what git tracks, an environment that imports the copy, and `results.jsonl`, a line for each try.
A change is tried on the test files that import its module, however indirectly: those named like it first, then those
that name its function, those of its folder, and by distance, until `--cpu-seconds` of processor time are spent. So one
that survives here may die in a whole run, and what dies here dies there: a test that fails without the change, too,
counts for nothing.
"""

import argparse
import ast
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/lagom_overlap"
WITHOUT_RANKS = "not gloo and not gpu and not real_nccl and not cuda_torch"
NOTICED = ("died", "hung")
HUNG = -1
HUNG_FACTOR = 4
"""A fork that takes this many times the processor time that ends it between two tests hangs in one."""

_OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
_EMPTY = {"bool": "False", "int": "0", "float": "0.0", "str": "''", "None": "None"}
_TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
_ONLY_RANKS = re.compile(r"^pytestmark = .*mark\.(gloo|gpu|real_nccl|cuda_torch)", re.MULTILINE)
_LOGGED = {"debug", "info", "warning", "error", "exception"}


# Places and changes. --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Bytes of one file that become others, within a function or class (empty: the module's own statements)."""

    path: str
    line: int
    start: int
    end: int
    kind: str
    after: str
    name: str


class _Places(ast.NodeVisitor):
    """What may be changed in one file, place by place."""

    def __init__(self, path: str, source: str) -> None:
        self.places: list[list[Change]] = []
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._names = [""]
        self._returns = ""

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return self._starts[begin[0] - 1] + begin[1], self._starts[end[0] - 1] + end[1]

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source.encode()[start:end].decode()

    def _place(self, node: ast.AST, changes: dict[str, str]) -> None:
        start, end = self._span(node)
        made = [
            Change(
                path=self._path,
                line=node.lineno,  # type: ignore[attr-defined]
                start=start,
                end=end,
                kind=kind,
                after=after,
                name=self._names[-1],
            )
            for kind, after in changes.items()
        ]
        self.places.append(made)

    def _in_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        outer = self._returns
        self._returns = ast.unparse(node.returns) if node.returns else ""
        self._names.append(self._names[-1] or node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()
        self._returns = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _in_function  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 does not say where in a text its expressions are."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._place(node, {"comparison": f"({left} {_OTHER[type(node.ops[0])]} {right})"})
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        parts = (node.left, node.right)
        is_text = any(isinstance(part, _TEXT) or _is_str(part) for part in parts)
        if type(node.op) in _OTHER and not is_text:
            left, right = map(self._text, parts)
            self._place(node, {"arithmetic": f"(({left}) {_OTHER[type(node.op)]} ({right}))"})
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        values = [self._text(value) for value in node.values]
        other = " and " if isinstance(node.op, ast.Or) else " or "
        changes = {"and, or": f"({other.join(f'({value})' for value in values)})"}
        same = " or " if isinstance(node.op, ast.Or) else " and "
        changes["dropped condition"] = f"({same.join(f'({value})' for value in values[:-1])})"
        self._place(node, changes)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._place(node, {"dropped sign": f"({self._text(node.operand)})"})
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._place(node, {"constant": str(not node.value)})
        elif isinstance(node.value, int):
            self._place(node, {"off by one": f"({node.value} + 1)", "off by minus one": f"({node.value} - 1)"})
        elif isinstance(node.value, float):
            self._place(node, {"constant": f"({node.value!r} * 2 + 1)"})

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._place(node.test, {"negated": f"(not ({self._text(node.test)}))"})
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _condition  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._place(condition, {"dropped filter": "True"})
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, changes = self._text(node.func), {}
        arguments = [*map(self._text, node.args), *map(self._text, node.keywords)]
        named = [keyword for keyword in node.keywords if keyword.arg]
        if named:
            kept = [text for text in arguments if text != self._text(named[-1])]
            changes["dropped argument"] = f"{function}({', '.join(kept)})"
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if len(plain) == len(node.args) >= 2:
            first, second, *others = arguments
            if function != "isinstance" and not _is_log(node):
                changes["swapped arguments"] = f"{function}({', '.join([second, first, *others])})"
        if function in ("min", "max"):
            changes["min, max"] = f"{'max' if function == 'min' else 'min'}({', '.join(arguments)})"
        if changes:
            self._place(node, changes)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._place(node, {"deleted": "pass"})
            return
        empty = _EMPTY.get(
            self._returns, "None" if "None" in self._returns else "()" if "tuple" in self._returns else ""
        )
        if empty and self._text(node.value) != empty:
            self._place(node.value, {"returned constant": empty})
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call) and not _is_log(node.value):
            self._place(node, {"deleted": "pass"})
        self.generic_visit(node)

    def _deleted(self, node: ast.Raise | ast.Continue | ast.Break | ast.AugAssign) -> None:
        self._place(node, {"deleted": "pass"})
        self.generic_visit(node)

    visit_Raise = visit_Continue = visit_Break = visit_AugAssign = _deleted  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._place(node, {"deleted": "pass"})
        self.visit(node.value)


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_log(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOGGED


def places(tree: Path) -> list[list[Change]]:
    """Every place of the package, with what may be changed there."""
    found = []
    for path in sorted((tree / PACKAGE).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        visitor = _Places(str(path.relative_to(tree)), source)
        visitor.visit(ast.parse(source))
        found += [place for place in visitor.places if place]
    return found


def drawn(tree: Path, seed: int, num: int) -> list[Change]:
    """The first changes of a seed."""
    rng, found = random.Random(seed), places(tree)
    rng.shuffle(found)
    return [rng.choice(place) for place in found[:num]]


# The copy. ------------------------------------------------------------------------------------------------------------


def _copied(folder: Path) -> Path:
    """What git tracks and what is new, copied, with an environment that imports the copy."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    venv.create(tree / ".venv", symlinks=True)
    bin_folder = tree / ".venv" / "bin"
    (site,) = (tree / ".venv").glob("lib/*/site-packages")
    ours = [Path(path) for path in sys.path if path.endswith("site-packages")]
    # A path in a .pth file brings no .pth files of its own: what makes the checkout importable stays out.
    (site / "copy.pth").write_text("\n".join(map(str, [tree / "src", *ours])) + "\n")
    for script in Path(sys.executable).parent.iterdir():
        with suppress(UnicodeDecodeError, OSError):
            first, _, rest = script.read_text().partition("\n")
            if first.startswith("#!") and "python" in first and not (bin_folder / script.name).exists():
                (bin_folder / script.name).write_text(f"#!{bin_folder / 'python'}\n{rest}")
                (bin_folder / script.name).chmod(0o755)
    for built in ("lib", "emulated_gpu"):
        there = next(
            (path / "lagom_overlap" / built for path in ours if (path / "lagom_overlap" / built).is_dir()), None
        )
        if there is not None:
            (tree / PACKAGE / built).symlink_to(there)
    return tree


# Which test files may notice. -----------------------------------------------------------------------------------------


class Imports:
    """How far each test file is from each module, by imports."""

    def __init__(self, tree: Path) -> None:
        self._text = {
            str(path.relative_to(tree)): path.read_text(encoding="utf-8")
            for folder in (PACKAGE, "tests", "benchmarks")
            for path in (tree / folder).rglob("*.py")
        }
        by_name = {self._module(path): path for path in self._text}
        self._entry_points = set(re.findall(r'= "(lagom_overlap[\w.]*):', (tree / "pyproject.toml").read_text()))
        self._names = [name for name in by_name if name.startswith("lagom_overlap.")]
        self._users: dict[str, set[str]] = defaultdict(set)
        for path, text in self._text.items():
            for name in self._imported(ast.parse(text)) | (self._entry_points if "entry_points(" in text else set()):
                if (used := by_name.get(name)) is not None and used != path:
                    self._users[used].add(path)

    @staticmethod
    def _module(path: str) -> str:
        """As others import it; tests and benchmarks import each other by their last names."""
        name = path.removesuffix(".py").removesuffix("/__init__")
        return name.removeprefix("src/").replace("/", ".") if name.startswith("src/") else name.rpartition("/")[2]

    def _imported(self, tree: ast.Module) -> set[str]:
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.JoinedStr):  # import_module(f"lagom_overlap.cli.{name}")
                begin = str(getattr(node.values[0], "value", "")) if node.values else ""
                if begin.count(".") > 1:
                    names.update(name for name in self._names if name.startswith(begin))
        return names

    def tests(self, change: Change) -> list[str]:
        """The test files without ranks that reach the changed module, the likeliest first."""
        distance, border = {change.path: 0}, [change.path]
        while border:
            border = [user for path in border for user in sorted(self._users[path]) if user not in distance]
            border = list(dict.fromkeys(border))
            distance |= {user: 1 + min(distance[p] for p in distance if user in self._users[p]) for user in border}
        mirrored = change.path.removeprefix(f"{PACKAGE}/").removesuffix(".py").split("/")

        def order(test: str) -> tuple[bool, bool, bool, int, bool, int, str]:
            text = self._text[test]
            is_named_alike = mirrored[-1] in test.rpartition("/")[2]
            is_near = test.startswith(f"tests/{mirrored[0]}/")
            names_it = bool(change.name) and re.search(rf"\b{change.name}\b", text) is not None
            is_beside = test.rpartition("/")[0].removeprefix("tests/").split("/") == mirrored[:-1]
            first = (not (is_named_alike and is_near), not names_it, not is_beside)
            return *first, distance[test], not is_near, len(text), test

        found = (path for path in distance if path.rpartition("/")[2].startswith("test_"))
        return sorted((path for path in found if not _ONLY_RANKS.search(self._text[path])), key=order)


# Running. -------------------------------------------------------------------------------------------------------------


class _UntilSpent:
    """A pytest plug-in: the first test that fails, and an end when the processor time is spent."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self.failed, self.num_tests = "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_tests += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if sum(os.times()[:4]) > self._cpu_s:
            item.session.shouldstop = "the processor time is spent"


def _serve() -> None:
    """In the copy: runs pytest in a fork for each line of input, so that imports of others' packages are paid once."""
    for name in ("torch", "numpy", "scipy.optimize", "scipy.stats", "plotly.graph_objects", "jinja2"):
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        tests, cpu_s, deselected = json.loads(line)
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(HUNG_FACTOR * cpu_s), resource.RLIM_INFINITY))
            with Path(os.environ["LAGOM_MUTATION_LOG"]).open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            watch = _UntilSpent(cpu_s)
            code = pytest.main(["-x", "-m", WITHOUT_RANKS, *deselected, *tests], plugins=[watch])
            said = {"code": int(code), "failed": watch.failed, "tests": watch.num_tests, "cpu_s": sum(os.times()[:4])}
            Path(os.environ["LAGOM_MUTATION_LOG"]).with_suffix(".json").write_text(json.dumps(said))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        sys.__stdout__.write(f"{os.waitstatus_to_exitcode(status)}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


class Runner:
    """Tries changes in the copy."""

    def __init__(self, folder: Path, cpu_s: float) -> None:
        self._folder, self._tree, self._cpu_s = folder, folder / "tree", cpu_s
        self._imports = Imports(self._tree)
        self._failing: dict[str, bool] = {}
        python = [str(self._tree / ".venv" / "bin" / "python"), str(self._tree / "benchmarks" / "mutations.py")]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "LAGOM_MUTATION_LOG": str(folder / "pytest.log")}
        self._server = subprocess.Popen(
            [*python, "serve", str(folder)],
            cwd=self._tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours, and ends it after the file is as it was
        )

    def close(self) -> None:
        """Ends what still runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def _run(self, tests: list[str], cpu_s: float) -> dict[str, object]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        said = self._folder / "pytest.json"
        said.unlink(missing_ok=True)
        known = [word for test, fails in self._failing.items() if fails for word in ("--deselect", test)]
        self._server.stdin.write(json.dumps([tests, cpu_s, known]) + "\n")
        self._server.stdin.flush()
        self._server.stdout.readline()
        result: dict[str, object] = json.loads(said.read_text()) if said.exists() else {}
        return {"code": HUNG, "failed": "a test that hung", "tests": 0, "cpu_s": cpu_s} | result

    def _fails_anyway(self, test: str) -> bool:
        if test not in self._failing:
            self._failing[test] = bool(self._run([test], 10 * self._cpu_s)["failed"])
        return self._failing[test]

    def attempt(self, change: Change) -> dict[str, object]:
        """The row of one change: its place, what it was, and how it ended."""
        path = self._tree / change.path
        original = path.read_bytes()
        row = asdict(change) | {"before": original[change.start : change.end].decode()}
        changed = original[: change.start] + change.after.encode() + original[change.end :]
        began, outcome, by, num_tests, left_s = time.monotonic(), "survived", "", 0, self._cpu_s
        batches = [list(batch) for batch in _batched(self._imports.tests(change))]
        while batches and left_s > 0 and not by:
            try:
                path.write_bytes(changed)
                said = self._run(batches[0], left_s)
            finally:
                path.write_bytes(original)
            num_tests, left_s = num_tests + int(str(said["tests"])), left_s - float(str(said["cpu_s"]))
            failed = str(said["failed"])
            if not failed:
                del batches[0]
            elif said["code"] == HUNG or not self._fails_anyway(failed):
                outcome, by = ("hung" if said["code"] == HUNG else "died"), failed
        took = {"cpu_s": round(self._cpu_s - left_s, 1), "took_s": round(time.monotonic() - began, 1)}
        return row | {"outcome": outcome, "by": by, "tests": num_tests} | took


def _batched(tests: list[str]) -> Iterator[list[str]]:
    """A few likely files first: pytest imports all that it is given before it runs a test."""
    begin, size = 0, 2
    while begin < len(tests):
        yield tests[begin : begin + size]
        begin, size = begin + size, 2 * size


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row: dict[str, object]) -> tuple[object, ...]:
    return row["path"], row["start"], row["end"], row["kind"], row["after"]


def run(folder: Path, *, seed: int, num: int, cpu_s: float, again: bool) -> None:
    """Tries the changes that have no row yet; `again`: those that did not die so far."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    tree = _copied(folder)
    last = {_key(row): row for row in _rows(results)}
    runner = Runner(folder, cpu_s)
    try:
        for number, change in enumerate(drawn(tree, seed, num)):
            known = last.get(_key(asdict(change)))
            if (known is not None) if not again else (known is None or known["outcome"] in NOTICED):
                continue
            row = runner.attempt(change) | {"seed": seed, "number": number, "again": again}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{number} {row['path']}:{row['line']} {row['kind']}: {row['outcome']} {row.get('by', '')}", flush=True
            )
    finally:
        runner.close()


def count(folder: Path) -> None:
    """Prints how the changes ended, at first and last, and those that nothing noticed."""
    rows = _rows(folder / "results.jsonl")
    first, last = {_key(row): row for row in reversed(rows)}, {_key(row): row for row in rows}
    for words, found in (("at first", first), ("at last", last)):
        ends = Counter(str(row["outcome"]) for row in found.values())
        noticed = sum(ends[end] for end in NOTICED)
        print(f"{words}: {noticed} of {len(found)} noticed ({100 * noticed / max(1, len(found)):.0f} %): {dict(ends)}")
    for row in sorted(last.values(), key=lambda row: int(str(row["number"]))):
        if row["outcome"] not in NOTICED:
            print(f"{row['number']} {row['path']}:{row['line']} {row['kind']}, {row['outcome']}, tests: {row['tests']}")
            print(f"    - {row['before']}\n    + {row['after']}")


def main() -> None:
    """Does what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "count", "serve"], help="serve: what run starts in the copy")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--cpu-seconds", type=float, default=30.0, help="of tests for a change")
    parser.add_argument("--again", action="store_true", help="what did not die, with today's tests")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    with suppress(KeyboardInterrupt):
        match chosen.what:
            case "run":
                run(folder, seed=chosen.seed, num=chosen.changes, cpu_s=chosen.cpu_seconds, again=chosen.again)
            case "count":
                count(folder)
            case _:
                _serve()


if __name__ == "__main__":
    main()
