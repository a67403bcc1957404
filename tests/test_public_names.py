import ast
import inspect
from pathlib import Path

import pytest

import lagom_overlap


def test_what_type_checkers_see_is_what_the_package_promises():
    stub = ast.parse(Path(lagom_overlap.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(lagom_overlap.__all__)
    assert Path(lagom_overlap.__file__).with_name("py.typed").exists()


@pytest.mark.torch
def test_promised_names_are_there():
    pytest.importorskip("torch")
    for name in lagom_overlap.__all__:
        assert getattr(lagom_overlap, name)
    assert inspect.isclass(lagom_overlap.OnlineTuner)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nope'"):
        _ = lagom_overlap.nope
