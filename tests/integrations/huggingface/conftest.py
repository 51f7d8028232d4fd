"""Fixtures that these tests share with others."""

from helpers.tokenizer_files import tokenizer as tokenizer
