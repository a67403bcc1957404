from lagom_overlap.workload import CommOp, Gemm


class CoarseTimes:
    """Long operators on a slow link between nodes, so that cutting them pays."""

    def seconds(self, op):
        if isinstance(op, CommOp):
            spans_nodes = (op.collective.num_nodes or 1) > 1
            return 20e-6 + op.collective.num_bytes * (4e-7 if spans_nodes else 1e-7)
        return 10e-6 + (op.work.flops * 2e-8 if isinstance(op.work, Gemm) else op.work.num_bytes * 1e-9)
