"""Claims about depth, each with the experiment that measures it and its verdict.

Question: Does a published statement about depth hold here, and how far does that reach?
Asked in: docs/claims.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack_lab.ledger.decoding import generate as generate

FACE = {"decoding": ("generate",)}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
