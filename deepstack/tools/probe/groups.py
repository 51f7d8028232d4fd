"""Groups of an external model's parameters, each of which has a share of ‖ΔF‖."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from deepstack.base import ConfigError, nearest
from deepstack.model import plain_name
from deepstack.tools.probe.model import ExternalModel

Groups = Mapping[str, str | Sequence[str]]
"""Name -> patterns of parameter names, as in `{"attention": "*.self_attn.*"}`."""

REST = "rest"
RESERVED = ("step", REST, "whole", "unexplained")  # other columns of attribution.csv


def names_by_child(subject: ExternalModel) -> dict[str, list[str]]:
    """Return the names of the parameters by child of a layer, elsewhere of the model.

    A child is a direct one, such as `self_attn` or `linear1`.  A child named as another column of
    attribution.csv, such as `step`, is the group `step_`.
    """
    name_in_layer = {p: n for layer in subject.layers for n, p in layer.named_parameters()}
    groups = defaultdict(list)
    for name, parameter in subject.parameters.items():
        child = plain_name(name_in_layer.get(parameter, name)).split(".")[0]
        groups[f"{child}_" if child in RESERVED else child].append(name)
    return dict(groups)


def names_by_group(names: Sequence[str], patterns: Groups) -> dict[str, list[str]]:
    """Return group -> names of the parameters that match its patterns, and the others as `rest`.

    Raises ConfigError for a pattern without a match and for a parameter in two groups.
    """
    owner: dict[str, str] = {}
    for group, wanted in patterns.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", group) or group in RESERVED:
            raise ConfigError(
                f"groups: found the name {group!r}; allowed letters, digits and _ . -, but not "
                f"{', '.join(RESERVED)}"
            )
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            matches = [name for name in names if fnmatchcase(name, pattern)]
            if not matches:
                raise ConfigError(
                    f"groups: {group}: no parameter is named {pattern!r}; "
                    f"one is named {nearest(pattern, names) or names[0]!r}"
                )
            for name in matches:
                if owner.setdefault(name, group) != group:
                    raise ConfigError(f"groups: {name} is in {owner[name]} and in {group}")
    groups: dict[str, list[str]] = {group: [] for group in (*patterns, REST)}
    for name in names:
        groups[owner.get(name, REST)].append(name)
    return {group: members for group, members in groups.items() if members}
