"""VGG19 in data parallelism: 16 convolutions and 3 linear layers, of which the first holds 72 % of all parameters.

Simonyan and Zisserman, arXiv 1409.1556, table 1, column E; 224 x 224 images. A convolution is the product that its
im2col is: every pixel a row. ReLU and pooling read and write the layer's output once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Origin, Phase

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
"""Output channels of each convolution; 0 is a pooling that halves the image."""
LINEAR = (4096, 4096, 1000)
IMAGE, KERNEL, HALF_BYTES = 224, 9, 2


@dataclass(frozen=True, slots=True)
class _Layer:
    rows: int
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        return (self.inputs + 1) * self.outputs


def layers(batch: int) -> Iterator[_Layer]:
    """The layers as products, first to last."""
    side, channels = IMAGE, 3
    for width in CHANNELS:
        if not width:
            side //= 2
            continue
        yield _Layer(batch * side * side, KERNEL * channels, width)
        channels = width
    features = channels * side * side
    for width in LINEAR:
        yield _Layer(batch, features, width)
        features = width


def vgg19_step(batch: int, num_ranks: int) -> Iteration:
    """One rank's step: forward, backward, an all-reduce of each layer's gradients in half precision, updates."""
    every = list(layers(batch))
    ops: list[Op] = []
    before = ()
    for number, layer in enumerate(every):
        origin = Origin(phase=Phase.FORWARD, layer=number)
        name = f"f{number}"
        ops += [
            CompOp(name=name, work=Gemm(layer.rows, layer.outputs, layer.inputs), deps=before, origin=origin),
            CompOp(
                name=f"{name}.relu",
                work=MemoryBound(2 * HALF_BYTES * layer.rows * layer.outputs),
                deps=(name,),
                origin=origin,
            ),
        ]
        before = (f"{name}.relu",)
    for number, layer in reversed(list(enumerate(every))):
        name, backward = f"b{number}", Origin(phase=Phase.BACKWARD, layer=number)
        relu = MemoryBound(3 * HALF_BYTES * layer.rows * layer.outputs)
        ops.append(CompOp(name=f"{name}.relu", work=relu, deps=before, origin=backward))
        weights = CompOp(
            name=f"w{number}",
            work=Gemm(layer.inputs, layer.outputs, layer.rows),
            deps=(f"{name}.relu",),
            origin=Origin(phase=Phase.WEIGHT_GRAD, layer=number),
        )
        reduction = CommOp(
            name=f"r{number}",
            collective=Collective(CollectiveKind.ALL_REDUCE, HALF_BYTES * layer.parameters, num_ranks),
            communicator="data",
            stream="comm",
            deps=(weights.name,),
            origin=Origin(phase=Phase.BACKWARD, layer=number),
        )
        ops += [weights, reduction]
        if number:
            product = Gemm(layer.rows, layer.inputs, layer.outputs)
            ops.append(CompOp(name=name, work=product, deps=(f"{name}.relu",), origin=backward))
            before = (name,)
    for number, layer in enumerate(every):
        ops.append(
            CompOp(
                name=f"u{number}",
                work=MemoryBound(16 * layer.parameters),
                deps=(f"r{number}",),
                origin=Origin(phase=Phase.OPTIMIZER, layer=number),
            )
        )
    return Iteration("vgg19", tuple(ops), is_dataflow=True)
