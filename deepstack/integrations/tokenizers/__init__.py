"""Text through a file of the library `tokenizers`."""
