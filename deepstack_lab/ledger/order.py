"""The order of the entries."""

import re


def order(name: str) -> tuple[bool, list[int | str]]:
    """Return the sort key of an id: papers by letters and number, then C1, C2, …, C49, C49B, …"""
    parts: list[int | str] = []
    for word in re.findall(r"\d+|\D+", name):
        parts.append(int(word) if word.isdigit() else word)
    return bool(re.match(r"C\d", name)), parts
