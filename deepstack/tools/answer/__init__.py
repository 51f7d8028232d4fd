"""One page that answers a study: a sentence, its figure and table, methods and sources."""

PUBLIC = {"answer": ("answer", "answer")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
