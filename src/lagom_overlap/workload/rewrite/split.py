"""`Split` applied: a collective and the chains around it in equal pieces (Concerto, Centauri's workload partition)."""

from fractions import Fraction

from lagom_overlap.workload.rewrite.chain import checked_chain, member_pieces
from lagom_overlap.workload.rewrite.draft import Draft
from lagom_overlap.workload.rewrite.steps import Split


def piece_name(op: str, number: int) -> str:
    """The name of a piece."""
    return f"{op}#{number}"


def apply_split(draft: Draft, split: Split) -> None:
    """Cuts the members; piece k of one waits for piece k of what it reads.

    Raises:
        JobError: if the chain is not legal.
    """
    shares = [Fraction(1, split.num_chunks)] * split.num_chunks
    chain = checked_chain(draft, split.comm, split.axis, before=split.before, after=split.after, shares=shares)
    draft.replace({name: member_pieces(draft, name, chain, piece_name) for name in chain.axes})
