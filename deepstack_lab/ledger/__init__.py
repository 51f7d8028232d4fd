"""Claims about depth, each with the experiment that measures it and its verdict."""
