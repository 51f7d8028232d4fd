"""A database of MLflow from finished runs."""
