"""One page that answers a study: a sentence, its figure and table, methods and sources.

Question: What does a study show, how sure is it, and which runs come next?
Asked in: docs/answer.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.answer.found import Found as Found
    from deepstack.tools.answer.looks import looks_at as looks_at
    from deepstack.tools.answer.sentence import find as find

FACE = {"found": ("Found",), "looks": ("looks_at",), "sentence": ("find",)}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)

PUBLIC = {"answer": ("answer", "answer")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
