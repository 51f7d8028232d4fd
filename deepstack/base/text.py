"""Turns values into text for tables, sentences, messages and logs.

Labels of charts have `deepstack.plots.texts` besides, which typesets them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# C0 but tab and line feed, DEL, C1, directions of text, ends of lines of Unicode, lone surrogates
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
# Letters of East Asian scripts, which have no spaces between words, or other words.
_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
COMMAND = ": deepstack "  # between a sentence and the command to type
_PARTS = re.compile(f" ?(?:[{_WIDE}]|[^ {_WIDE}]+)")


def printable(text: str) -> str:
    """Return a text with control characters as escapes that JSON reads; tabs and lines stay."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Return `printable` with tabs and line feeds as escapes too."""
    return printable(text).replace("\t", "\\t").replace("\n", "\\n")


def printable_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table whose texts are `printable`: names of folders may have any bytes."""
    return {key: printable(v) if isinstance(v, str) else v for key, v in row.items()}


def short_text(value: Any) -> str:
    """Return a value as a table cell: four significant digits, a dash for None."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def words_of(text: str) -> list[str]:
    """Return the parts between which a line may end: words, and letters two cells wide.

    A part after a space begins with it.
    """
    return _PARTS.findall(" ".join(text.split()))


def wrap(text: str, width: int) -> list[str]:
    """Return a paragraph in lines of at most so many cells of a terminal; words stay whole."""
    from rich.cells import cell_len

    lines: list[str] = []
    for word in words_of(text):
        if lines and cell_len(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(word.lstrip(" "))
    return lines


def fold_lines(text: str, width: int) -> str:
    """Return a text whose lines end at words, in at most so many cells of a terminal.

    A command at the end of a long line moves to a separate line, so that users can copy it.
    """
    from rich.cells import cell_len

    lines: list[str] = []
    for line in text.split("\n"):
        if cell_len(line) <= width:
            lines.append(line)
            continue
        words, colon, command = line.partition(COMMAND)
        lines += wrap(f"{words}:" if colon else words, width)
        lines += [f"{colon.removeprefix(': ')}{command}"] if colon else []
    return "\n".join(lines)


def distinct_texts(values: Iterable[Any]) -> dict[Any, str]:
    """Return the text of each value of a setting as a cell, exact where four digits are equal."""
    known = {scalar(value): short_text(scalar(value)) for value in values}
    counts = Counter(known.values())
    return {value: cell if counts[cell] == 1 else str(value) for value, cell in known.items()}


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: numpy scalars as numbers, NaN as None, inf as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def scalar(value: Any) -> Any:
    """Return the value of a setting as a table cell, lists and sections as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def counted(form: str, value: object) -> str:
    """Return a form with its value: `{} steps` gives `3 steps`, and `1 step`."""
    words = form.format(value)
    return words.removesuffix("s") if str(value) == "1" and form.endswith("s") else words


def tally(words: Iterable[str]) -> str:
    """Return words with their counts, the most frequent first: '8 done, 2 running'."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())


def number_text(value: float | None) -> str:
    """Return four significant digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


def clock_text(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: '1:02:03'."""
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def bytes_text(size: float) -> str:
    """Return a size in bytes as text: '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"


def limit_text(value: float) -> str:
    """Return the limit of a range: a whole number below 10^12 with all digits."""
    return str(int(value)) if float(value).is_integer() and value < 1e12 else f"{value:g}"


def float32_text(value: Any) -> str:
    """Return the shortest text that reads back as the same float32; integers stay integers.

    None gives the empty cell, NaN `nan`, infinities `inf` and `-inf`. The text depends on the value
    alone, not on the locale, the machine or numpy's version.
    """
    if value is None:
        return ""
    import numpy as np

    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return str(int(value))
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if 1e7 <= abs(number) < 1e16:  # numpy below 2.3 writes all digits
        return np.format_float_scientific(number, trim="-", exp_digits=2)
    return str(number)


def escaped(text: str) -> str:
    """Return a text with escapes for letters that cannot be printed; Python and YAML read them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int = 48) -> str:
    """Return a text cut to a length that fits into a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quote(text: str) -> str:
    """Return a shortened text in quotes, with invisible characters as escapes."""
    return repr(shorten(text))


def quote_key(dotted: str) -> str:
    """Return a dotted key as it is when it is printable and short, else quoted."""
    plain = dotted.isprintable() and len(dotted) <= 100 and dotted == dotted.strip()
    return dotted if plain else repr(shorten(dotted, 100))


def value_text(value: Any) -> str:
    """Return a config value as text: `0.001`, `on`, `(0.9, 0.98)`; without its middle if long."""
    full = _value_text(value)
    return full if len(full) <= 300 else f"{full[:140]}…{full[-140:]}"


def text_among(value: Any, values: Iterable[Any]) -> str:
    """Return `value_text`, or the exact value if another one of `values` has the same text."""
    short = value_text(value)
    if any(other != value and value_text(other) == short for other in values):
        return repr(value) if isinstance(value, float) else str(value)
    return short


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return "(" + ",\u00a0".join(map(_value_text, value)) + ")"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def signed_text(value: float, digits: int) -> str:
    """Return a number with so many decimals and a minus sign, without one for 0.00."""
    return f"{value:z.{digits}f}".replace("-", "−")


def yaml_text(value: Any) -> str:
    """Return a value as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
