"""One page that answers a study: a sentence, its figure and table, methods and sources.

Question: What does a study show, how sure is it, and which runs come next?
Asked in: docs/answer.md
"""

PUBLIC = {"answer": ("answer", "answer")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
