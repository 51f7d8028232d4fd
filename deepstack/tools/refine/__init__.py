"""A search for the best learning rates of every setting of a sweep."""
