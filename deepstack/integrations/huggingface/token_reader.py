"""Reads data sets saved by Hugging Face datasets, for the task `tokens`."""

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from deepstack.base import needs_package
from deepstack.records import mapping
from deepstack.tasks import MOST_TEXT, Part, Reading, Tokens

SUFFIX = ".arrow"
FORMAT = "a data set saved by Hugging Face datasets"
STATE, SPLITS = "state.json", "dataset_dict.json"
MASK = "attention_mask"  # 0 at the padding, which is left out


def files_of(folder: Path, path: str, reading: Reading) -> list[Path] | None:
    """Return the files of a saved data set, which has state.json; None for any other folder.

    path: the folder as the user typed it.

    Raises ConfigError for a data set of several splits.
    """
    if (folder / SPLITS).is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise reading.refusal(path, f" has the splits {splits}; give one")
    return saved_files(folder, reading) if (folder / STATE).is_file() else None


def saved_files(folder: Path, reading: Reading) -> list[Path]:
    """Return the arrow files of a data set that was saved by Hugging Face datasets, in order."""
    with suppress(KeyError, TypeError, ValueError):
        state = mapping(folder / STATE)
        names = [entry["filename"] for entry in state["_data_files"]]
        plain = all(Path(name).name == name for name in names)
        if names and plain and not state.get("_indices_data_files"):
            return [folder / name for name in names]
    raise reading.refusal(folder / STATE, " is not the state of a saved data set")


def table_of(content: mmap.mmap, file: Path, reading: Reading) -> Any:
    """Return the table of an arrow file, which stays mapped."""
    try:
        import pyarrow as pa
    except ImportError:
        raise reading.refusal(file, f" {needs_package('pyarrow', 'datasets')}") from None
    try:
        return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content))).read_all()
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())
        raise reading.refusal(file, f" is not an arrow stream: {reason}") from error


def read(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens] | list[Part]:
    """Read the column of an arrow file: lists of tokens, or text for the tokenizer."""
    table = table_of(content, file, reading)
    import pyarrow as pa

    default = "input_ids" if "input_ids" in table.column_names else "text"
    name = reading.column or default
    if name not in table.column_names:
        reason = f" has no column {name!r}; set task.column to one of "
        raise reading.refusal(file, reason + ", ".join(table.column_names))
    kind = table.schema.field(name).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [encode(table.column(name), name, file, reading)]
    list_types = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if not (any(is_list(kind) for is_list in list_types) and pa.types.is_integer(kind.value_type)):
        reason = f": found {kind} in {name!r}; allowed text or lists of integers"
        raise reading.refusal(file, reason)
    values = [chunk.flatten() for chunk in table.column(name).chunks]
    if any(array.null_count for array in values):
        raise reading.refusal(file, f": found null among the tokens of {name!r}")
    tokens = [array.to_numpy() for array in values]
    if name != "input_ids" or MASK not in table.column_names:
        return tokens
    masks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(MASK).chunks]
    if [len(one) for one in masks] != [len(one) for one in tokens]:
        raise reading.refusal(file, f": {MASK} has other lengths than {name}")
    return [without_padding(*pair) for pair in zip(tokens, masks, strict=True)]


def encode(column: Any, name: str, file: Path, reading: Reading) -> Part:
    """Return the tokens of a column of texts, each of which is a document."""
    if reading.tokenizer is None:
        raise reading.refusal(file, f": the text of {name!r} needs task.tokenizer")
    if column.nbytes > MOST_TEXT:
        reason = f": {name!r} has more than {MOST_TEXT:,} bytes of text; store its tokens in "
        raise reading.refusal(file, f"{reason}.npy instead")
    texts = (text.as_py() or "" for chunk in column.chunks for text in chunk)
    rows = [reading.tokenizer.encode([text]) for text in texts]
    sizes = np.concatenate([row.sizes for row in rows if row.sizes is not None])
    return Part(np.concatenate([row.tokens for row in rows]), sizes=sizes)


def without_padding(tokens: Tokens, mask: Any) -> Any:
    """Return the tokens whose mask is not 0; without padding the same array, which stays mapped."""
    return Part(tokens[mask != 0]) if (mask == 0).any() else tokens
