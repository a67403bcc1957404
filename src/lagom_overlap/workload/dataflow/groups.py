"""The communicators of one rank, their sizes and the nodes that they span: tensor ranks first, then data ranks."""

from dataclasses import dataclass

from lagom_overlap.collective import Collective, CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Degrees: `shard` consecutive data-parallel ranks share parameters, `replicas` of such groups hold the same."""

    tensor: int
    shard: int
    replicas: int
    expert: int
    gpus_per_node: int

    def _size_and_stride(self, group: str) -> tuple[int, int]:
        data = self.shard * self.replicas
        return {
            "tp": (self.tensor, 1),
            "fsdp": (self.shard, self.tensor),
            "dp": (self.replicas, self.tensor * self.shard),
            "ep": (self.expert, self.tensor),
            "edp": (data // self.expert, self.tensor * self.expert),
        }[group]

    def size(self, group: str) -> int:
        """Ranks of a group."""
        return self._size_and_stride(group)[0]

    def collective(self, kind: CollectiveKind, num_bytes: int, group: str) -> Collective:
        """A collective of `num_bytes` (as `Collective` counts them) over a group."""
        size, stride = self._size_and_stride(group)
        in_node = max(1, self.gpus_per_node // stride)
        return Collective(
            kind, max(1, num_bytes), size, -(-size // in_node) if size % in_node == 0 else _even(size, in_node)
        )


def _even(size: int, in_node: int) -> int:
    """Nodes of a group that does not fill them: as few as hold it evenly."""
    nodes = -(-size // in_node)
    while size % nodes:
        nodes += 1
    return nodes
