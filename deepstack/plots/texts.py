"""Texts of figures: text stays text, and only deepstack's own indices and powers are typeset.

matplotlib reads text between dollar signs as mathematics, and warns of each letter that its
font lacks.  Texts of a chart come from run folders and files, so `drawn` makes every one safe.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

import matplotlib as mpl
from matplotlib.font_manager import FontProperties, fontManager, get_font

from deepstack.base.text import counted, printable

# Private letters around typeset parts, as in ⟨_{0}⟩: no font and no file gives them a meaning.
OPEN, CLOSE = "\ue000", "\ue001"
TYPESET = re.compile(rf"{OPEN}((?:10|[A-Za-z]?)[_^]{{[^\\$%#&^_{{}}{OPEN}{CLOSE}]*}}){CLOSE}")


def typeset(symbol: str) -> str:
    """Return a symbol whose indices are subscripts: ‖F_0‖_F, θ_{t−1}, d_head."""
    return re.sub(
        r"_(?:\{([^}]*)\}|([a-z]{2,}|\w))", lambda m: typeset_index(m[1] or m[2] or ""), symbol
    )


def typeset_index(text: str) -> str:
    """Return a text as a subscript."""
    return f"{OPEN}_{{{text}}}{CLOSE}"


def typeset_power(base: str, exponent: object) -> str:
    """Return a power of 10, a letter or '' as superscript: `10`, `5` or `N`, `−1/2`."""
    return f"{OPEN}{base}^{{{exponent}}}{CLOSE}"


def is_typeset(text: str) -> bool:
    """Return whether a text has a typeset part."""
    return TYPESET.search(coded(text)) is not None


def drawn(text: str) -> str:
    """Return a text as matplotlib draws it: letter by letter, with typeset parts."""
    texts = [strip(part).replace("$", r"\$") for part in TYPESET.split(coded(text))]
    for i, part in enumerate(texts[1::2]):  # text, part, text, …
        # A backslash at the end of the text before would take the dollar sign for its own.
        texts[2 * i + 1] = f"{' ' * texts[2 * i].endswith(chr(92))}${part}$"
    return "".join(texts)


def font_note(texts: Iterable[str]) -> str:
    """Return a note on the letters of these texts that the fonts lack, or ''."""
    letters = sorted(set().union(*map(lacking_letters, texts)))
    if not letters:
        return ""
    font = font_families()[0]
    count = counted("{} letters", len(letters))
    return f"{font} lacks {count}, shown as codes such as {code(letters[0])}; --font takes another"


def untypeset(text: str) -> str:
    """Return a text without typesetting, for files and notebooks: ‖F_0‖, 10^−5."""
    return strip(TYPESET.sub(lambda match: re.sub("[{}]", "", match[1]), text))


def strip(text: str) -> str:
    """Return a text without the marks of typeset parts."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def coded(text: str) -> str:
    """Return a text with the codes of control characters and of letters that the fonts lack."""
    lacking = lacking_letters(text)
    return "".join(
        code(one) if one in lacking else one for one in printable(text).replace("\t", " ")
    )


def code(letter: str) -> str:
    """Return the code of a letter as Python writes it."""
    number = ord(letter)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def lacking_letters(text: str) -> set[str]:
    """Return the letters of a text that neither of the figure's fonts has."""
    fonts = font_families()
    return {
        one
        for one in set(printable(text)) - {OPEN, CLOSE, "\n", "\t"}
        if not has_letter(fonts, one)
    }


def font_families() -> tuple[str, ...]:
    """Return the names of the fonts in use, the first one first."""
    family = mpl.rcParams["font.family"]
    return tuple(family) if isinstance(family, list) else (str(family),)


@lru_cache(maxsize=4096)
def has_letter(families: tuple[str, ...], letter: str) -> bool:
    """Return whether one of these families of fonts has a letter."""
    return any(
        get_font(fontManager.findfont(FontProperties(family=[family]))).get_char_index(ord(letter))
        for family in families
    )
