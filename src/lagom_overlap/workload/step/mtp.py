"""Multi-token prediction around its layers, as Megatron-Core builds it (`core/transformer/multi_token_prediction.py`).

The next token's embedding and the hidden state before it are normed, joined and projected to one hidden size (a
column-parallel product, whose parts tensor-parallel ranks gather; with sequence parallelism each then takes its rows);
after the layers come a norm, and the head and the loss again. The head's table is the model's own; so is the
embedding's, of which the last stage of a pipeline holds a copy, as with tied tables (`build`).

A prediction's backward comes after that of the model's own loss: its head's gradient is the one that is announced.
"""

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.model_ends import TableOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, StepShape
from lagom_overlap.workload.step.parameter_units import Weight


class MtpOps(TableOps):
    """The operators around the layers of prediction `depth`, which count as the first of them, `layer`."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, depth: int, layer: int, batch: int, weights: dict[str, Weight]
    ) -> None:
        super().__init__(graph, shape, layer=layer, batch=batch, weights=weights)
        self.name_within(f"mb{batch}.mtp{depth}.", f"mb{batch - 1}.mtp{depth}.", f"mtp.{depth}.")

    def enter(self, hidden: str) -> str:
        """What the prediction's layers read, of the hidden state before them."""
        h, rows, kernels = self._model.hidden, self._rows, self._shape.traffic.norm[0]
        also = (self._parameters("mtp_proj", FORWARD),)
        embedded = self.embed()
        self.made["embedded"], self.made["hidden"] = embedded, hidden
        normed = [
            self._run(part, (source,), kernels, (rows, h), FORWARD, also=also)
            for part, source in (("embed_norm", embedded), ("hidden_norm", hidden))
        ]
        joined = self._touch("join", normed, 8 * rows * h, (rows, 2 * h), FORWARD)
        projected = self._product("mtp_proj", self._enter("join_gather", joined, FORWARD, columns=2 * h))
        return self._whole("proj_gather", projected, CollectiveKind.ALL_GATHER, FORWARD)

    def _whole(self, part: str, source: str, kind: CollectiveKind, phase: Phase) -> str:
        """The projection's columns of all tensor-parallel ranks; or, backward, a rank's own, which needs no sums."""
        if self._layout.tensor == 1 or (phase is BACKWARD and not self._layout.sequence_parallel):
            return source
        return self._tensor_comm(part, kind, source, phase, is_async=False, element_bytes=self._element_bytes)

    def enter_backward(self, gradient: str) -> str:
        """The gradient of the hidden state, given that of what the layers read; the embedding's goes to its table."""
        h, rows, kernels, made = self._model.hidden, self._rows, self._shape.traffic.norm[1], self.made
        entered = self._whole("proj_gather_d", gradient, CollectiveKind.ALL_GATHER, BACKWARD)
        data = self._data_gradient("mtp_proj", entered)
        reduced = self._leave("join_reduce_d", data, BACKWARD, columns=2 * h)
        saved = self._enter("join_gather_w", made["join"], Phase.WEIGHT_GRAD, columns=2 * h)
        self._weight_gradient("mtp_proj", saved, entered)
        also = (self._parameters("mtp_proj", BACKWARD),)
        hidden_d, embedded_d = [
            self._run(f"{part}_norm_d", (reduced, made[saved]), kernels, (rows, h), BACKWARD, also=also)
            for part, saved in (("hidden", "hidden"), ("embed", "embedded"))
        ]
        self.embed_backward(embedded_d)
        return hidden_d

    def summed(self, part: str, gradient: str, own: str) -> str:
        """Two gradients of one hidden state."""
        shape = (self._rows, self._model.hidden)
        return self._touch(part, (gradient, own), 6 * shape[0] * shape[1], shape, BACKWARD, both=True)
