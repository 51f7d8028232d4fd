"""BibTeX: the only place that writes its entries.  Values are escaped."""

import re
from collections.abc import Collection, Mapping

from deepstack.base import printable


def entry(kind: str, key: str, fields: Mapping[str, str], whole: Collection[str] = ()) -> str:
    """Return an entry.

    fields: name -> text.
    whole: names of the fields that BibTeX leaves as they are: names of groups, and capitals.
    """
    lines = []
    for name, value in fields.items():
        text = f"{{{escaped(value)}}}"
        lines.append(f"  {name} = {f'{{{text}}}' if name in whole else text},\n")
    return f"@{kind}{{{re.sub('[^A-Za-z0-9]+', '_', key)},\n{''.join(lines)}}}"


def escaped(text: str) -> str:
    """Return a text without letters that end a field, in one line."""
    line = re.sub(r"[{}\\\s]+", " ", printable(text)).strip()
    return re.sub(r"([&%$#_])", r"\\\1", re.sub(r"[~^]", " ", line))
