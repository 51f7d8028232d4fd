"""`model.start`: a run that begins with the weights of another one, its starting point.

The other run may have another task, vocabulary, sequence length or head and, with `model.grow`,
fewer layers.  Parameters that do not fit because of these are drawn anew; the optimizer starts anew
too.  ‖ΔF‖ is measured from the model that starts so.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config.identity import is_of_experiment
from deepstack.config.schema import values
from deepstack.model import build_model, with_defaults, without_defaults
from deepstack.model.build import Built
from deepstack.records import CHECKSUMS, Run, RunFolder, data_identity, existing_run, mapping
from deepstack.training import checkpoint as ckpt
from deepstack.training.plan import RunPart, RunPlan

KEY = "model.start"
OUTSIDE = {"embedding", "position", "head"}  # roles whose shape may differ
FREE = {"start", "grow", "head", "init", "dropout"}  # settings of `model` that may differ
DEPTHS = {"depth", "decoder_depth"}
OUTPUTS = {"o", "w2", "cross_o"}  # roles whose products, and biases, are added to the stream


def grown_rows(grow: str, before: int, after: int) -> list[int]:
    """Return the layer of the shallow stack, from 0, that each layer of the deep one copies.

    | grow       | layers 1 2 3 4 become | source                                                  |
    |------------|-----------------------|---------------------------------------------------------|
    | stack      | 1 2 3 4 1 2 3 4       | G_stack, Du et al. 2024, arXiv:2405.15319               |
    | interleave | 1 1 2 2 3 3 4 4       | each layer beside its copy                              |
    | middle     | 1 2 3 2 3 4           | copies the middle block, as Kapl et al. 2026,           |
    |            |                       | arXiv:2602.16490, describe depth growing; at twice the  |
    |            |                       | depth it is `stack`                                     |
    | identity   | 1 2 3 4 + new ones    | new layers add 0: Gesmundo & Maile 2023,                |
    |            |                       | arXiv:2308.06103; the result has the `before` rows only |
    """
    if grow == "identity":
        return list(range(before))
    if grow == "middle":
        first, last = (2 * before - after) // 2, (2 * before - after) // 2 + after - before
        return [*range(last), *range(first, before)]
    if grow == "interleave":
        return [layer * before // after for layer in range(after)]
    return [layer % before for layer in range(after)]


@dataclass(frozen=True)
class StartingPoint(RunPart):
    """The run whose weights another one begins with.

    path: as in `model.start`.
    sha256: of its weights.
    trained: how it, and each run before it, differ from the run that begins here, by dotted key.
    fresh: a line for each parameter that starts anew.
    """

    path: str
    config: conf.Config
    sha256: str
    weights: Mapping[str, Tensor]
    trained: Sequence[Mapping[str, Any]] = ()
    fresh: Sequence[str] = ()

    def check(self, config: conf.Config, built: Built) -> list[str]:
        """Return a line for each parameter that starts anew.

        Raises ConfigError, naming both values, for another difference of the two runs.
        """
        here, there = (with_defaults(c).model.model_dump() for c in (config, self.config))
        for model in (here, there):  # null: the encoder's
            model["decoder_depth"] = model["decoder_depth"] or model["depth"]
        grow = config.model.grow
        for key, value in here.items():
            recorded, more = there[key], ""
            if key in DEPTHS:
                most = 2 * recorded if grow == "middle" else math.inf
                if grow and recorded <= value <= most:
                    continue
                more = ", or more with model.grow (middle: up to twice as many)"
            if key not in FREE and value != recorded:
                raise ConfigError(
                    f"model.{key}: found {value}, and {self.path} has {recorded}; allowed under "
                    f"{KEY}: {recorded}{more}",
                    key=f"model.{key}",
                )
        if grow == "identity":
            refuse_identity(here, there)
        lines = []
        for bank in built.banks:
            weights = self.weights.get(bank.key)
            shape = None if weights is None else tuple(weights.shape[1:])
            if shape == tuple(bank.shape):
                continue
            text = f"{KEY}: {bank.key} {tuple(bank.shape)} starts anew; {self.path} has {shape}"
            if not set(bank.roles) <= OUTSIDE:
                raise ConfigError(f"{text}; they must be equal", key=KEY)
            lines.append(text)
        return lines

    @property
    def notices(self) -> Sequence[str]:
        return self.fresh

    def begin(self, plan: RunPlan, built: Built) -> None:
        """Overwrite the parameters that fit, after `check`; the others keep their values."""
        grow = plan.config.model.grow
        added = {bank.key for bank in built.banks if OUTPUTS & set(bank.roles)}
        added |= {f"{key}_bias" for key in added}
        for bank in built.banks:
            there, values = self.weights.get(bank.key), bank.values().clone()
            if there is None or there.shape[1:] != values.shape[1:]:
                continue
            if bank.in_layers and grow:
                there = there[grown_rows(grow, len(there), len(values))]
            if len(there) < len(values) and bank.key in added:
                values.zero_()
            values[: len(there)] = there
            bank.copy_(values)
        built.banks.tie()
        if not grow or grow == "identity":
            self._load_averages(built)

    def _load_averages(self, built: Built) -> None:
        """Load the running averages of the batch norms of all layers that the other run has.

        New layers, all of which follow the others, have none yet.
        """
        depth = with_defaults(self.config).model.depth
        named = [(name.split("."), norm) for name, norm in built.model.named_batch_norms()]
        kept = [norm for path, norm in named if path[1] != "layers" or int(path[2]) < depth]
        if kept and any(name.startswith("running.") for name in self.weights):
            built.model.load_averages(dict(self.weights), kept)

    def facts(self) -> Mapping[str, Any]:
        step = self.config.train.steps
        facts = {"run": self.path, "step": step, "sha256": self.sha256}
        return {"start": {**facts, "settings": self.trained}}


def refuse_identity(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise ConfigError for new layers that cannot add 0, from `model` of both configurations."""
    deeper = {key for key in DEPTHS if here[key] != there[key]}
    loops = here["unique_layers"]
    if loops and deeper:
        found = f"model.unique_layers={loops}, whose further layers repeat trained ones"
    elif here["decoder_attention"] == "average" and "decoder_depth" in deeper:
        found = "model.decoder_attention=average, whose gates add a share of x"
    else:
        return
    raise ConfigError(
        f"model.grow: found identity with {found}, so that new layers add more than 0; allowed: "
        "stack, interleave, middle",
        key="model.grow",
    )


def start_of(config: conf.Config, vocab_size: int) -> StartingPoint | None:
    """Return the starting point of a run, or None.  Raises ConfigError for one that does not fit.

    vocab_size: of the run's task.
    """
    if config.model.start is None:
        return None
    folder = finished_run(config.model.start, KEY)
    there = conf.load_config(folder.config_path)
    step, sum_of_weights = there.train.steps, start_sha256(config)
    try:
        weights = whole_weights(folder, there, step)
    except (KeyError, ValueError) as error:
        text = f"{KEY}: {folder.path}: its weights cannot be read: {error}"
        raise ConfigError(text, key=KEY) from error
    trained = runs_before(config, Run(folder.path))
    start = StartingPoint(config.model.start, there, sum_of_weights or "", weights, trained)
    built = build_model(config, vocab_size=vocab_size, device="meta")
    return replace(start, fresh=start.check(config, built))


def runs_before(config: conf.Config, run: Run) -> list[dict[str, Any]]:
    """Return how a run, and each run before it, differ from a configuration that starts with it.

    The last run comes first.  The value of a setting that a run lacks is None.  Of what came before
    a run of an earlier version only the sha256 of its weights is known.
    """
    here, of_run, before = values(config), run.flat_config, run.meta.get("start", {})
    unknown = [{"sha256": before["sha256"]}] if before else []
    chain = [of_run, *({**of_run, **one} for one in before.get("settings", unknown))]
    keys = {key: None for one in (here, *chain) for key in one if is_of_experiment(key)}
    keys.pop(KEY, None)
    return [{key: one.get(key) for key in keys if one.get(key) != here.get(key)} for one in chain]


def whole_weights(folder: RunFolder, config: conf.Config, step: int) -> Mapping[str, Tensor]:
    """Return the weights of a run at a step.

    Raises ValueError unless they have the names, shapes and types of the model of its config with
    the embedding's vocabulary.
    """
    checkpoint = ckpt.load(folder.checkpoint_path(step), step)
    weights = checkpoint.parts["weights"]
    vocab_size = max(weights["embedding"].shape[-2:-1], default=0)
    if not vocab_size:
        raise ValueError(f"embedding is {ckpt.shape_of(weights['embedding'])}")
    built = build_model(config, vocab_size=vocab_size, device="meta")
    owner = ckpt.Owner(conf.digest(without_defaults(config)), built.state(), sys.maxsize)
    if problem := owner.mismatch(checkpoint):
        raise ValueError(problem)
    return weights


def start_sha256(config: conf.Config) -> str | None:
    """Return the sha256 of the weights that a run begins with; None without a starting point."""
    if config.model.start is None:
        return None
    folder = finished_run(config.model.start, KEY)
    step = folder.checkpoints()[-1:]
    try:
        return str(mapping(folder.checkpoint_path(*step) / CHECKSUMS)["weights.safetensors"])
    except (KeyError, OSError, TypeError, ValueError):
        raise ConfigError(f"{KEY}: {folder.path} has no weights to begin with", key=KEY) from None


def finished_run(path: str | Path, name: str) -> RunFolder:
    """Return the folder of a finished run, given by its path or by the path of its config.yaml.

    name: of the setting or option, for errors.

    Raises ConfigError for anything else.
    """
    key = KEY if name == KEY else None
    is_config = Path(path).name == "config.yaml"
    try:
        folder = existing_run(Path(path).parent if is_config else path)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", key=key) from None
    if (state := Run(folder.path).state) != "done":
        raise ConfigError(f"{name}: {folder.path} is {state}; allowed a finished run", key=key)
    return folder


class Change(NamedTuple):
    """A source of a run that differs from the recorded one.

    key: of the setting.
    source: the name of the text, of its held-out part, of the validation set or of the other run.
    was, now: sha256, or '' for a validation set of an earlier version.
    """

    key: str
    source: str
    was: str
    now: str

    def reason(self, digits: int | None = None) -> str:
        """Return how it differs.  digits: of the sha256 that it shows, by default all."""
        if not self.was:
            return "an earlier version of deepstack drew another one"
        more = "…" if digits else ""
        return f"its sha256 was {self.was[:digits]}{more}, is {self.now[:digits]}{more}"


def changed_source(meta: Mapping[str, Any], plan: RunPlan) -> Change | None:
    """Return the first of data, validation set and starting point that differ from a run's.

    meta: of the run.

    None if all are as they were.
    """
    data, config = plan.task.data, plan.config
    recorded, before = meta.get("start", {}).get("sha256"), meta.get("data", data)
    name = str(data.get("name"))
    sources = (
        ("task.path", name, before.get("sha256"), data.get("sha256")),
        (
            "task.held_out",
            f"the held-out part of {name}",
            data_identity(before),
            data_identity(data),
        ),
        (KEY, str(config.model.start), recorded, start_sha256(config) if meta else recorded),
    )
    for key, source, was, now in sources:
        if was != now:
            return Change(key, source, str(was), str(now))
    if "data" in meta and "validation" not in meta:
        return Change("train.eval_batches", "the validation set", "", "")
    return None
