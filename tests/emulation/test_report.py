"""What an emulated job says of its prices."""

from dataclasses import dataclass

from lagom_emulate.prices import PriceSource
from lagom_emulate.report import _SOURCES, priced_text
from lagom_emulate.result import PricedShare


@dataclass
class Job:
    priced: tuple[PricedShare, ...]


def test_every_source_of_a_price_has_words_and_the_largest_share_comes_first():
    assert set(_SOURCES) == set(PriceSource)
    rows = (
        PricedShare(source="name", num_operations=1, time_share=0.1),
        PricedShare(source="shape", num_operations=9, time_share=0.9),
    )
    assert priced_text(Job(rows)) == (
        "Time by what its price rests on: shapes of products and attention 90.0 %, "
        "kernels known by name alone (the weakest) 10.0 %."
    )
    assert priced_text(Job(())) == "Nothing was priced."
