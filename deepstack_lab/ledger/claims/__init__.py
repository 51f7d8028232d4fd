"""The entries of the ledger: statements of documents and papers, with their experiments."""

from deepstack.base import import_all
from deepstack_lab.ledger.claim import (
    CLAIMS,
    Claim,
    Curves,
    Finding,
    Line,
    Null,
    Part,
    Rule,
    Source,
    all_claims,
    claim,
)
from deepstack_lab.ledger.draws import repeats
from deepstack_lab.ledger.reach import Extent

import_all(__name__, __path__)  # each module registers its claims

__all__ = [
    "CLAIMS",
    "Claim",
    "Curves",
    "Extent",
    "Finding",
    "Line",
    "Null",
    "Part",
    "Rule",
    "Source",
    "all_claims",
    "claim",
    "repeats",
]
