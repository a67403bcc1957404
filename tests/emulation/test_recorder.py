"""What is kept of an emulated job's operations."""

import json

from lagom_emulate.clock import Operation
from lagom_emulate.prices import CostModelPrices, Doubt
from lagom_emulate.recorder import Recorder
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset


def test_launches_whose_price_is_to_be_doubted_are_counted_by_name_the_most_frequent_first() -> None:
    prices = CostModelPrices(ContentionModel(load_preset("h100_dgx"), load_profile("plausible")))
    recorder = Recorder()
    kernel = {"kernel": "k", "grid": [8, 1, 1], "block": [32, 1, 1]}
    said = [
        ({"op": "mine", "bytes": 4096, "floor": True}, 2),
        ({"op": "yours", "bytes": 4096, "floor": True}, 3),
        ({"op": "aten::x", "bytes": 4096, "uncounted": True}, 1),
        ({}, 4),
        ({"op": "aten::add", "bytes": 4096}, 5),
    ]
    op_id = 0
    for desc, (fields, number) in enumerate(said, 1):
        priced = prices.priced(json.dumps(kernel | fields).encode())
        recorder.describe(0, desc, priced)
        for _ in range(number):
            op_id += 1
            recorder.add(Operation(0, op_id, 0, priced.work, 0.0, 1.0, desc, 0))
    assert recorder.doubtful == {
        Doubt.FLOOR: {"yours": 3, "mine": 2},
        Doubt.UNCOUNTED: {"aten::x": 1},
        Doubt.NAME: {"k": 4},
    }
    assert list(recorder.doubtful[Doubt.FLOOR]) == ["yours", "mine"]
