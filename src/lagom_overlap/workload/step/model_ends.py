"""The operators of the tables around the layers: the embedding, the head and the loss."""

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, WEIGHT, StepOps
from lagom_overlap.workload.step.parameter_units import Unit
from lagom_overlap.workload.step.rank_groups import TENSOR
from lagom_overlap.workload.step.traffic import FUSED_LOSS, LOSS_LAUNCHES
from lagom_overlap.workload.streams import COMPUTE


class TableOps(StepOps):
    """The operators of the tables."""

    def embed(self) -> str:
        """The lookup; its vocabulary is cut by tensor parallelism."""
        h = self._model.hidden
        shape = (self._tokens, h)
        gathered = (self._parameters("embed", FORWARD),)
        num_bytes = 4 * self._tokens * h
        looked = self._touch("embed", ("",), num_bytes, shape, FORWARD, also=gathered, num_launches=3)
        x = self._leave("embed_tp_reduce", looked, FORWARD)
        whole = (self._rows, h)
        if self._model.learned_positions:
            x = self._touch("positions", (x,), 6 * whole[0] * h, whole, FORWARD, also=gathered, num_launches=2)
        if self._model.dropout:
            x = self._touch("embed_dropout", (x,), 5 * whole[0] * h, whole, FORWARD, both=True)
        return x

    def head(self, x: str) -> str:
        """The last norm, the logits and the loss."""
        also = (self._parameters("logits", FORWARD),) if self._shape.unit is Unit.LAYER else ()
        return self.logits(self.norm(x, also))

    def norm(self, x: str, also: tuple[str, ...] = ()) -> str:
        """The norm before the logits."""
        self.made["head_input"] = x
        return self._run(
            "norm", (x,), self._shape.traffic.norm[0], (self._rows, self._model.hidden), FORWARD, also=also
        )

    def logits(self, norm: str) -> str:
        """The logits and the loss of what was normed."""
        vocab = self._weights["logits"].outputs
        self.made["norm"] = norm
        logits = self._product("logits", self._enter("head_tp_gather", norm, FORWARD))
        shape = (self._tokens, vocab)
        num_bytes = self._loss_bytes[0] * shape[0] * vocab
        launches = len(FUSED_LOSS[0]) if self._layout.fused_loss else LOSS_LAUNCHES[0]
        loss = self._touch("loss", (logits,), num_bytes, shape, Phase.LOSS, num_launches=launches)
        if self._layout.tensor > 1:
            call = self._shape.groups.collective(CollectiveKind.ALL_REDUCE, 3 * 4 * self._tokens, TENSOR)
            loss = self._graph.comm(
                self._name("loss_reduce"), call, TENSOR, origin=self._origin(Phase.LOSS, "loss"), deps=(loss,)
            )
            self._graph.hold_back(COMPUTE, [loss])
        self.made["loss"] = loss
        return loss

    @property
    def _loss_bytes(self) -> tuple[int, int]:
        traffic = self._shape.traffic
        if self._layout.fused_loss:
            return sum(FUSED_LOSS[0]), sum(FUSED_LOSS[1])
        return traffic.cut_loss if self._layout.tensor > 1 else traffic.loss

    def loss_backward(self) -> str:
        """The gradient of the logits."""
        vocab = self._weights["logits"].outputs
        shape = (self._tokens, vocab)
        sources = (self.made["loss"], self.made["logits"])
        num_bytes = self._loss_bytes[1] * shape[0] * vocab
        launches = len(FUSED_LOSS[1]) if self._layout.fused_loss else LOSS_LAUNCHES[1]
        return self._touch("loss_d", sources, num_bytes, shape, BACKWARD, num_launches=launches)

    def head_backward(self, loss_d: str) -> str:
        """The gradient of the last layer's output, given that of the logits."""
        reduced = self.logits_backward(loss_d)
        also = (self._parameters("logits", BACKWARD),) if self._shape.unit is Unit.LAYER else ()
        return self.norm_backward(reduced, also)

    def logits_backward(self, loss_d: str) -> str:
        """The gradient of what was normed, given that of the logits."""
        data = self._data_gradient("logits", loss_d)
        reduced = self._leave("logits_reduce_d", data, BACKWARD)
        self._weight_gradient("logits", self.made["norm"], loss_d)
        return reduced

    def norm_backward(self, reduced: str, also: tuple[str, ...] = ()) -> str:
        """The gradient of the last layer's output, given that of what was normed."""
        sources, kernels = (reduced, self.made["head_input"]), self._shape.traffic.norm[1]
        return self._run("norm_d", sources, kernels, (self._rows, self._model.hidden), BACKWARD, also=also)

    def embed_backward(self, gradient: str) -> None:
        """The table's gradient."""
        if self._layout.frozen:
            return
        entered = self._enter("embed_tp_gather_d", gradient, BACKWARD)
        weight = self._weights["embed"]
        before = self._before(weight)
        num_bytes = 8 * self._tokens * self._model.hidden + 4 * weight.num_params
        embed_d = self._touch(
            "embed_w", (entered,), num_bytes, (self._tokens, self._model.hidden), WEIGHT, also=before, num_launches=4
        )
        if "embed" in self.silent:
            weight.partial.append(embed_d)
            return
        weight.gradients.append(embed_d)
        self.on_gradient(weight, embed_d)
