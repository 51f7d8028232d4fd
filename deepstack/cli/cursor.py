"""The word at the cursor, which a shell completes."""

import os

split_key = ""  # `key=` of the word at the cursor, if the shell completes its value alone


def cut_word_at_equals() -> None:
    """Leave out `key` and `=` before the value at the cursor; bash splits a word at `=`.

    The value is then the argument of the option before it, and `split_key` has the rest.  Of
    `--option=value` it leaves out `=` alone.
    """
    global split_key
    words = os.environ.get("COMP_WORDS", "").split()
    position = int(os.environ.get("COMP_CWORD") or 0)
    kept = [at for at, word in enumerate(words) if word != "=" or words[at - 1][:2] != "--"]
    words, position = [words[at] for at in kept], sum(at < position for at in kept)
    equals = next((at for at in (position, position - 1) if words[at : at + 1] == ["="]), 0)
    split_key = f"{words[equals - 1]}=" if equals > 1 else ""
    if split_key:
        del words[equals - 1 : equals + 1]
        position = equals - 1
    if words:
        os.environ |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(position)}
