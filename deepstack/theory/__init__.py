"""The claims of the documents that deepstack grew from, each a small measured experiment."""

from deepstack.registry import import_all
from deepstack.theory.claim import (
    CLAIMS,
    Claim,
    Curves,
    Finding,
    Line,
    Part,
    Source,
    all_claims,
    claim,
)
from deepstack.theory.draws import repeats

import_all(__name__, __path__)  # what a module claims registers itself

__all__ = [
    "CLAIMS",
    "Claim",
    "Curves",
    "Finding",
    "Line",
    "Part",
    "Source",
    "all_claims",
    "claim",
    "repeats",
]
