import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap import units
from lagom_overlap.units import GIB, KIB, MIB, format_bytes, format_percent, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2 MiB", 2_097_152),
        ("512 KiB", 524_288),
        ("32 MB", 32_000_000),
        ("4096 B", 4096),
        ("684KiB", 700_416),
        ("  1.5 GiB ", 1_610_612_736),
        ("0.5 kib", 512),
        ("40 gb", 40_000_000_000),
        ("4.1 MB", 4_100_000),
    ],
)
def test_sizes_are_read_with_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "2", "MiB", "2 MiBs", "2 M", "-2 MiB", "1e3 B", "two MiB", "2 MiB 3 KiB", "2 Mb/s"]
)
def test_a_size_without_a_known_unit_is_refused_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number and one of B, KB"):
        parse_bytes(text)


@given(st.integers(0, 10**15), st.sampled_from([("KB", 3), ("MB", 6), ("GB", 9)]))
def test_decimal_fractions_are_exact(num_bytes: int, unit: tuple[str, int]) -> None:
    whole, rest = divmod(num_bytes, 10 ** unit[1])
    assert parse_bytes(f"{whole}.{rest:0{unit[1]}d} {unit[0]}") == num_bytes


@pytest.mark.parametrize("number", ["9" * 400, "0." + "0" * 400 + "1", "9" * 5000])
def test_an_endless_number_is_refused_in_few_words(number: str) -> None:
    with pytest.raises(
        ValueError, match=rf"\.\.\..* has a number of {len(number)} characters; .* at most 40"
    ) as caught:
        parse_bytes(f"{number} GiB")
    assert len(str(caught.value)) < 150
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_bytes(number)
    assert len(str(caught.value)) < 150


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        parse_bytes("0.3 B")


@given(st.integers(0, 4095), st.sampled_from([("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB)]))
def test_what_is_printed_exactly_reads_back(count: int, unit: tuple[str, int]) -> None:
    num_bytes = count * unit[1]
    text = format_bytes(num_bytes)
    assert abs(parse_bytes_rounded(text) - num_bytes) <= 0.005 * max(num_bytes, 1)
    if num_bytes < KIB or (unit[1] > 1 and count < KIB):
        assert parse_bytes(text) == num_bytes


def parse_bytes_rounded(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[unit]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (684 * KIB, "684 KiB"),
        (2 * MIB, "2 MiB"),
        (1366 * KIB, "1.33 MiB"),
        (1e10, "9.31 GiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2, "2.00 s"),
        (1.234e-3, "1.23 ms"),
        (45.6e-6, "45.6 us"),
        (0.123, "123 ms"),
        (5e-9, "5 ns"),
        (0, "0 ns"),
        (61, "61.0 s"),
    ],
)
def test_durations_are_printed_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "digits", "signed", "text"),
    [
        (0.1051, 1, True, "+10.5 %"),
        (-0.1051, 1, True, "-10.5 %"),
        (0.1051, 1, False, "10.5 %"),
        (-0.02, 0, False, "-2 %"),
        (-0.0004, 1, True, "0.0 %"),
        (0.0004, 1, True, "0.0 %"),
        (-0.0006, 1, True, "-0.1 %"),
        (0.12345, 2, False, "12.35 %"),
    ],
)
def test_a_share_is_written_in_per_cent_with_a_space_and_rounds_to_nothing_without_a_sign(
    share: float, digits: int, signed: bool, text: str
) -> None:
    assert format_percent(share, digits, signed=signed) == text


def test_nobody_writes_per_cent_in_another_style() -> None:
    """Python's own format of a share, `{x:.1%}`, has no space, and two styles stood on one screen."""
    package = Path(units.__file__).parent
    assert not [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        if "%}" in (source := path.read_text())  # most files need not be parsed
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        if ast.unparse(node.format_spec).rstrip("'\"").endswith("%")
    ]
