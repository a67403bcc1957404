from pathlib import Path

import random_projects
from lagom_overlap.plan.rcpsp import Project, read_sm


def _made(folder: Path, *options: str) -> list[Project]:
    assert random_projects.main([str(folder), *options]) == 0
    return [read_sm(path) for path in sorted(folder.glob("*.sm"))]


def _reached(project: Project, activity: int) -> set[int]:
    """All that an activity waits for."""
    found: set[int] = set()
    left = [activity]
    while left:
        for pred in project.preds[left.pop()]:
            if pred not in found:
                found.add(pred)
                left.append(pred)
    return found


def test_random_projects_are_what_their_generator_promises(tmp_path: Path) -> None:
    projects = _made(tmp_path, "--activities", "30", "--count", "4", "--seed", "2")
    assert len(projects) == 4
    for project in projects:
        succs = project.succs()
        assert len(project) == 32
        assert all(1 <= duration <= 10 for duration in project.durations[1:-1])
        assert all(any(row) and max(row) <= 10 for row in project.demands[1:-1])
        assert project.durations[0] == project.durations[-1] == 0
        assert len(succs[0]) == 3
        assert all(1 <= len(after) <= 3 for after in succs[:-1])
        assert _reached(project, 31) == set(range(31))
        for activity, preds in enumerate(project.preds):  # no arc says what two others say
            assert not any(pred in _reached(project, other) for pred in preds for other in preds), activity


def test_the_same_seed_gives_the_same_projects(tmp_path: Path) -> None:
    options = ("--activities", "12", "--count", "2", "--seed")
    first, again, other = (
        _made(tmp_path / name, *options, seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first == again != other
