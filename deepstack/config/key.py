"""The dotted name of a setting: found from a word, shortened, and put into words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from deepstack.base.errors import ConfigError
from deepstack.base.registry import nearest, unknown

MOST_NAMES = 12  # keys that an error names
SECTIONS = ("model", "train", "task", "log")  # which labels leave out
WORDS = {
    "model.depth": "depth N (layers)",
    "model.scheme": "scheme",
    "train.lr": "learning rate",
    "step": "step t",
    "layer": "layer l",
    "flops": "training FLOPs",
    "val_loss_masked": "validation loss on [MASK]",
}
# Words of other tools and papers -> the setting that is meant.
OTHER_WORDS = {
    "layers": "model.depth", "num_layers": "model.depth", "n_layers": "model.depth",
    "n_layer": "model.depth", "num_hidden_layers": "model.depth", "epochs": "train.steps",
    "max_steps": "train.steps", "iterations": "train.steps", "learning_rate": "train.lr",
    "hidden_size": "model.d_model", "n_embd": "model.d_model", "width": "model.d_model",
    "dim": "model.d_model", "num_heads": "model.n_heads", "n_head": "model.n_heads",
    "heads": "model.n_heads", "warmup": "train.warmup_steps", "grad_clip": "train.clip",
    "max_grad_norm": "train.clip", "context_length": "task.seq_len", "block_size": "task.seq_len",
    "random_seed": "seed", "dataset": "task.path", "residual": "model.scheme",
}  # fmt: skip
FULL_WORDS = {"grad": "gradient", "param": "parameter", "ln": "LN", "val": "validation"}
SUBLAYERS = ("cross_attention", "attention", "feed_forward")


class Key(str):
    """The name of a setting, `train.lr`, or of a column of the runs' tables, `val_loss`."""

    @classmethod
    def look_up(
        cls, word: str, keys: Collection[str], option: str, prefer: Sequence[str] = ()
    ) -> Key:
        """Return the key that a word names: all of it, its last parts, or their beginning.

        Of several such keys, it is the only one in `prefer`.  Raises ConfigError, starting with the
        option's name, for an unknown or ambiguous word.
        """
        if word in keys or f"{word}.name" in keys:
            return cls(word if word in keys else f"{word}.name")
        dotted = [key for key in keys if key.endswith(f".{word}")]
        matches = dotted or [key for key in keys if cls(key).last.startswith(word)]
        preferred = [key for key in matches if key in prefer]
        for choice in (preferred, matches):
            if len(choice) == 1:
                return cls(choice[0])
        if matches:
            names = ", ".join(matches[:MOST_NAMES])
            raise ConfigError(f"{option}: {word!r} can mean {names}; give one of them in full")
        if near := cls.nearest(word, keys):
            raise ConfigError(f"{option}: unknown key {word!r}; did you mean {near!r}?")
        listed = unknown("key", word, keys, "deepstack list settings", MOST_NAMES)
        raise ConfigError(f"{option}: {listed}")

    @classmethod
    def nearest(cls, word: str, keys: Iterable[str]) -> Key | None:
        """Return the key that a mistyped word most probably meant, in full or by its last part."""
        every = list(keys)
        if (meant := cls.of_other_word(word)) in every:
            return meant
        by_name = {cls(key).last: key for key in reversed(every)}
        near = nearest(word, [*every, *by_name])
        return None if near is None else cls(by_name.get(near, near))

    @classmethod
    def of_other_word(cls, word: str) -> Key | None:
        """Return the setting that other tools call by the last part of this word, or None."""
        meant = OTHER_WORDS.get(cls(word).last.lower().replace("-", "_"))
        return None if meant is None else cls(meant)

    @property
    def last(self) -> str:
        """The part after the last dot: `lr`."""
        return self.rpartition(".")[2]

    @property
    def owner(self) -> Key | None:
        """The key that names the scheme, task, … of this option; None for other settings."""
        setting, _, option = self.partition("_options.")
        if option:
            return Key(setting)
        return TASK if self.startswith("task.") and self not in (TASK, "task.seq_len") else None

    @property
    def short(self) -> str:
        """The key as part of a label: `lr`, `d_model`, `norm gain`."""
        section, *rest = self.split(".")
        names = rest if section in SECTIONS and rest else [section, *rest]
        ends = [at for at, name in enumerate(names[:-1], 1) if name.endswith("_options")]
        names = names[max(ends, default=0) :]
        if section == "task" and names == ["name"]:
            names = ["task"]
        return " ".join(names)

    @property
    def words(self) -> str:
        """The key as words: `learning rate`, `depth N (layers)`, `LN input, feed-forward`."""
        if self in WORDS:
            return WORDS[self]
        for part in SUBLAYERS:
            if self.endswith(f"_{part}"):
                return f"{Key(self.removesuffix(f'_{part}')).words}, {part.replace('_', '-')}"
        return " ".join(FULL_WORDS.get(word, word) for word in self.short.split("_"))

    def label(self, value: str) -> str:
        """Return key and value as a label that no line breaks: `lr 0.001`."""
        return f"{self.short}\u00a0{value}"


SCHEME, DEPTH, WIDTH = Key("model.scheme"), Key("model.depth"), Key("model.d_model")
TASK, SEED, LR, STEPS = Key("task.name"), Key("seed"), Key("train.lr"), Key("train.steps")
