"""A wrong table of a user's file is told in one line: the key, the value, what is allowed."""

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from lagom_overlap.cost.operators import load_operators
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_gpu, load_preset
from lagom_overlap.toml_tables import MAX_KEY_DEPTH, parse_toml


def _gpu(name: str) -> str:
    return (resources.files("lagom_overlap.gpus") / f"{name}.toml").read_text(encoding="utf-8")


def _cluster() -> str:
    text = (resources.files("lagom_overlap.clusters") / "gb200.toml").read_text(encoding="utf-8")
    hardware = "[gpu]" + _gpu("gb200").partition("[gpu]")[2].partition("\n\n")[0]
    return text.replace('gpu = "gb200"\n', "") + "\n" + hardware


def _load_operators(path: str) -> object:
    return load_operators(load_gpu(path))


def _refusal(tmp_path: Path, text: str, load: Callable[[str], object]) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(JobError) as error:
        load(str(path))
    words = str(error.value)
    assert "\n" not in words
    assert "$" not in words
    return words


@pytest.mark.parametrize(
    ("line", "becomes", "words"),
    [
        ("max_gpus_per_node = 72", 'max_gpus_per_node = "72"', "max_gpus_per_node is '72', must be a whole number"),
        ("max_gpus_per_node = 72", "max_gpus_per_node = 0", "max_gpus_per_node is 0, must be at least 1"),
        ("max_gpus_per_node = 72", "max_gpus_per_node = 2", "gpus_per_node is 4, must be 1 to 2"),
        ("max_gpus_per_node = 72", "max_gpu_per_node = 72", "unknown key 'max_gpu_per_node' (did you mean 'max_gp"),
        ("num_sms = 148", "num_sms = 148\nnum_smz = 3", "unknown key 'gpu.num_smz' (did you mean 'num_sms'?); allowed"),
        ('kind = "nvlink"', 'kind = "tin"', "intra.kind is 'tin', must be nvlink or pcie or network"),
        ("mxfp8 = true", 'mxfp8 = "yes"', "gpu.mxfp8 is 'yes', must be true or false"),
        ('kind = "nvlink"', "", "missing key 'intra.kind'"),
    ],
)
def test_a_cluster_file_s_wrong_key_is_named_with_its_value(
    tmp_path: Path, line: str, becomes: str, words: str
) -> None:
    assert words in _refusal(tmp_path, _cluster().replace(line, becomes, 1), load_preset)


@pytest.mark.parametrize(
    ("line", "becomes", "words"),
    [
        ("sustained_share", "sustaned_share", "unknown key 'operators.sustaned_share' (did you mean 'sustained_share'"),
        ("forward_half = 402", "forward_haf = 402", "unknown key 'operators.attention[0].forward_haf' (did you mean"),
        ("forward_half = 402", "", "missing key 'operators.attention[0].forward_half'"),
        ("forward_half = 402", "forward_half = inf", "forward_half is inf, must be finite and not negative"),
        ("forward_flops = 351e12", "forward_flops = nan", "forward_flops is nan, must be positive and finite"),
        ('"sdpa_flash"', '"cudnn"', "attention has cudnn twice, must have it once"),
        (
            '"sdpa_flash"',
            '"tin"',
            "operators.attention[1].kernel is 'tin', must be flash_attention_2 or sdpa_flash or cudnn",
        ),
        ("touch_s", 'attention_kernel = "cudnn"\ntouch_s', "operators.attention_kernel'; a job has parallel.attention"),
        ("launch_s = 4.613e-06", "launch_s = nan", "gemm: launch_s is nan, must be positive and finite"),
        ("sustained_share = 0.767", "sustained_share = 1e308", "rates times their shares: gemm: tile_flops is (inf"),
        ("touch_s", "attention_share = 1e308\ntouch_s", "rates times their shares: attention of flash_attention_2"),
        ("touch_s", "block_share = 1e308\ntouch_s", "rates times their shares: gemm: tile_flops is (inf"),
    ],
)
def test_an_operators_table_s_wrong_key_is_named_with_its_value(
    tmp_path: Path, line: str, becomes: str, words: str
) -> None:
    assert _load_operators(_written(tmp_path, _gpu("h100"))) == load_operators(load_gpu("h100"))
    assert words in _refusal(tmp_path, _gpu("h100").replace(line, becomes, 1), _load_operators)


def test_operators_that_are_no_table_are_refused(tmp_path: Path) -> None:
    text = "operators = 3\n" + _gpu("h100").partition("[operators]")[0]
    assert "operators is 3, must be a table" in _refusal(tmp_path, text, _load_operators)


def test_a_file_of_too_many_nested_lists_is_no_toml(tmp_path: Path) -> None:
    assert re.search("is not TOML", _refusal(tmp_path, "a = " + "[" * 20_000, load_preset))


def _written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "good.toml"
    path.write_text(text)
    return str(path)


DEEP = [
    *(".".join([name] * 20_000) for name in ("a", '"a"', "'a'", "1", "a b".replace(" ", " . "))),
    *(f"{before}{'.'.join(['a'] * 20_000)}" for before in ("[", "[[", "x = {", "x = 1\n[a]\n", 'x = """.\n"""\n')),
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_a_key_of_many_names_is_refused_before_it_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("20,000 names take it 41 s and 1.6 GB"))
    with pytest.raises(ValueError, match="names joined by dots"):
        parse_toml(text.encode())


def test_dots_of_values_texts_and_comments_are_no_key() -> None:
    dots = "a." * 200
    text = f"""
{".".join(["k"] * MAX_KEY_DEPTH)} = 1
floats = [{", ".join(["1.5"] * 200)}]
text = "{dots}\\"{dots}" # {dots}
more = '{dots}"'
lines = \"\"\"
{dots} "" '{dots}
\"\"\"
raw = '''{dots} " '' {dots}'''
""".replace('\\"\\"\\"', '"' * 3)
    found = parse_toml(text.encode())
    assert len(found) == 6
    assert found["raw"].count(".") == 400


def test_tables_in_tables_are_refused_in_a_line() -> None:
    for text in ("x = " + "[" * 100_000, "x = " + "{a = " * 100_000):
        with pytest.raises(ValueError, match="nested too deep"):
            parse_toml(text.encode())
