"""The coordinate check: sizes of the stream and of its change over width and depth."""
