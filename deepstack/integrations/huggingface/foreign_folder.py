"""Lets `deepstack analyze` take a Hugging Face folder."""

from deepstack.integrations.huggingface.analysis import analyze_folder
from deepstack.integrations.huggingface.folder import is_huggingface as is_readable
from deepstack.integrations.huggingface.folder import other_format

__all__ = ["analyze_folder", "is_readable", "other_format"]
