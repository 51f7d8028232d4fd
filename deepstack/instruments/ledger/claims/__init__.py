"""The entries of the ledger: statements of documents and papers, with their experiments."""

from deepstack.base import import_all
from deepstack.instruments.ledger.claim import (
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
from deepstack.instruments.ledger.draws import repeats
from deepstack.instruments.ledger.reach import Extent

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
