"""Hugging Face folders: checked before anything is loaded, and loaded with weights that fit."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError, ResourceError
from deepstack.config import available_memory
from deepstack.integrations.huggingface.constants import (
    MASK_TYPES,
    is_constant,
    may_be_mask,
    refuse_quantized,
    tensors_in,
)
from deepstack.model import undisturbed

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST_CONFIG = 2**24  # bytes
FLOATS, OTHERS = ("F64", "F32", "F16", "BF16"), ("I64",)
SIZES = re.compile(r"layer|block|hidden|embd|d_model|intermediate|ffn|inner|head|expert|vocab")
LAYERS = re.compile(r"^(n|num)_(\w+_)?(layer|block)s?$")
NO_SIZES = re.compile(r"position|token_id|length|window|max_")
"""Keys of config.json that are sizes of tensors, numbers of layers, and neither of both."""
PREFIXES = {r"^(?:module\.|_orig_mod\.)+": "", r"_orig_mod\.": ""}
"""Patterns in names of tensors that wrappers have added, and their replacement."""
OTHER_FORMATS = {
    "adapter_config.json": "a PEFT adapter without its base model; write the merged model: "
    "model.merge_and_unload().save_pretrained(folder)",
    "*.bin": "weights in pickle files, which can run code; write safetensors: "
    "model.save_pretrained(folder)",
    "*.pt": "weights in pickle files, which can run code; write safetensors: "
    "model.save_pretrained(folder)",
    "*.pth": "weights in pickle files, which can run code; write safetensors: "
    "model.save_pretrained(folder)",
    "*.gguf": "weights in GGUF; write safetensors: model.save_pretrained(folder)",
    "*.h5": "weights of TensorFlow; write safetensors: model.save_pretrained(folder)",
    "*.msgpack": "weights of Flax; write safetensors: model.save_pretrained(folder)",
}


def is_huggingface(folder: str | Path) -> bool:
    """Return whether a folder has config.json and *.safetensors."""
    path = Path(folder)
    return (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def other_format(folder: str | Path) -> str | None:
    """Return the format of another library's folder with an advice; None for any other folder."""
    path = Path(folder)
    for pattern, text in OTHER_FORMATS.items():
        if any(path.glob(pattern)) and not (path / "config.yaml").exists():
            return f"{path}: found {text}"
    return None


@dataclass(frozen=True)
class Folder:
    """A folder whose files have been checked.

    config: of config.json.
    files: the weights that are loaded.
    prefixes: what wrappers have added to names of tensors.
    elements: of all tensors.
    """

    path: Path
    config: Mapping[str, Any]
    files: list[Path]
    prefixes: list[str]
    elements: int

    @property
    def code(self) -> list[str]:
        """Return the keys of the config that name code of the folder, which is not run."""
        parts = parts_of(self.config).items()
        return [f"{prefix}auto_map" for prefix, part in parts if part.get("auto_map")]

    @property
    def positions(self) -> int | None:
        """Return the largest number of positions, if the config states one."""
        for key in ("max_position_embeddings", "n_positions"):
            value = self.config.get(key)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                    raise ConfigError(
                        f"{self.path / CONFIG}: {key}: found {value!r}; allowed an integer >= 2"
                    )
                return value
        return None

    def notes(self) -> list[str]:
        """Return sentences on prefixes that are stripped, and on code that is not run."""
        sentences = []
        if self.prefixes:
            sentences.append(f"stripped {' and '.join(self.prefixes)} from the names of tensors")
        if self.code:
            kind = self.config["model_type"]
            sentences.append(f"the folder's code was not run: {kind} is built by transformers")
        return sentences


def read_folder(folder: str | Path) -> Folder:
    """Return a folder of config.json and *.safetensors; read no weights.

    Raises ConfigError, one line, for files that are missing, damaged, elsewhere or quantized, and
    for a config whose sizes the weights cannot have; ResourceError if the memory does not hold
    them.
    """
    path = Path(folder)
    if not is_huggingface(path):
        raise ConfigError(
            other_format(path)
            or f"{path}: found no config.json with *.safetensors; allowed such a folder"
        )
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"{path}: found {OTHER_FORMATS['adapter_config.json']}")
    config = mapping_of(path / CONFIG)
    refuse_config(path / CONFIG, config)
    files = weight_files(path)
    names: list[str] = []
    elements = 0
    for file in files:
        for name, count in tensors_of(file):
            names.append(name)
            elements += count
    if (
        twice := sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    ):
        raise ConfigError(f"{path}: tensor {twice[0]} is in two files; allowed each once")
    refuse_sizes(path / CONFIG, config, len(names), elements)
    if 4 * elements > available_memory():
        raise ResourceError(
            f"{path}: {elements:,} weights need {4 * elements / 1e9:.1f} GB in fp32; "
            f"{available_memory() / 1e9:.1f} GB are free"
        )
    found = [p for p in ("_orig_mod.", "module.") if any(n.startswith(p) for n in names)]
    inside = any("._orig_mod." in name for name in names)
    prefixes = found + (["_orig_mod."] if inside and "_orig_mod." not in found else [])
    return Folder(path, config, files, prefixes, elements)


def mapping_of(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file.  Raises ConfigError unless it is a mapping."""
    try:
        if file.stat().st_size > LARGEST_CONFIG:
            raise ConfigError(f"{file} is larger than {LARGEST_CONFIG:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: found {type(content).__name__}; allowed a mapping")
    return content


def parts_of(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a config and its sections, by what precedes their keys."""
    return {"": config} | {f"{k}.": v for k, v in config.items() if isinstance(v, dict)}


def refuse_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for quantized weights, and for weights elsewhere."""
    reasons = {
        "quantization_config": "the weights are quantized; allowed fp32, fp16, bf16: dequantize "
        "them and save the model again",
        "transformers_weights": "it names other weights; allowed model.safetensors",
    }
    for prefix, part in parts_of(config).items():
        for key, reason in reasons.items():
            if part.get(key) is not None:
                raise ConfigError(f"{file}: {prefix}{key}: {reason}")
    if not isinstance(config.get("model_type"), str):
        found = config.get("model_type")
        raise ConfigError(f"{file}: model_type: found {found!r}; allowed a name of transformers")


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights: model.safetensors, or those that its index names."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    index = path / INDEX
    if not index.is_file():
        raise ConfigError(f"{path}: found neither {WEIGHTS} nor {INDEX}; allowed one of them")
    named = mapping_of(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"{index}: found no weight_map; allowed tensor -> file")
    files = sorted({str(name) for name in named.values()})
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index}: found the file {name!r}; allowed *.safetensors beside it")
        if not (path / name).is_file():
            raise ConfigError(f"{index}: the file {name} is missing")
    held = {tensor for name in files for tensor, _ in tensors_of(path / name)}
    if lacking := sorted(set(named) - held):
        raise ConfigError(f"{index}: no file has the tensor {lacking[0]}")
    return [path / name for name in files]


def tensors_of(file: Path) -> Iterator[tuple[str, int]]:
    """Yield name and elements of each tensor, from the header of the file alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # not a mapping
                part = content.get_slice(name)
                kind, count = part.get_dtype(), math.prod(part.get_shape())
                is_mask = kind in MASK_TYPES and may_be_mask(part.get_shape())
                if kind not in (*FLOATS, *OTHERS) and not is_mask:
                    raise ConfigError(
                        f"{file}: tensor {name} is {kind}; allowed {', '.join(FLOATS)}: dequantize "
                        "the model and save it again"
                    )
                yield name, count
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


def refuse_sizes(file: Path, config: Mapping[str, Any], tensors: int, elements: int) -> None:
    """Raise ConfigError for sizes in the config that no file with so many weights can have."""
    for prefix, part in parts_of(config).items():
        for key, value in part.items():
            if not isinstance(value, int) or not SIZES.search(key) or NO_SIZES.search(key):
                continue
            most = tensors if LAYERS.search(key) else elements
            if not 0 <= value <= most and not (value == -1):
                raise ConfigError(
                    f"{file}: {prefix}{key}: found {value:,}; the weights are {tensors:,} tensors "
                    f"of {elements:,} numbers, so allowed at most {most:,}"
                )


def load_huggingface(folder: Folder) -> Any:
    """Return the causal language model of a folder, in fp32.

    Raises ConfigError unless every weight of the model is in the files, and every tensor of the
    files in the model or a constant that the model computes itself.  Raises it also for a model
    that transformers lacks; ResourceError without transformers.
    """
    path = folder.path
    try:
        import transformers
    except ImportError as error:
        raise ResourceError(f"{path}: transformers is missing: pip install transformers") from error
    if folder.code and folder.config["model_type"] not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{path / CONFIG}: {folder.code[0]}: transformers has no model "
            f"{folder.config['model_type']!r}, and code of the folder is not run; build it and "
            "call deepstack.analyze_model(model, batch)"
        )
    refuse_quantized(folder.files)
    options: dict[str, Any] = {
        "local_files_only": True, "trust_remote_code": False, "use_safetensors": True,
        "dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True,
        "experts_implementation": "eager",  # the only one with forward-mode derivatives
    }  # fmt: skip
    if folder.prefixes:
        options["key_mapping"] = dict(PREFIXES)
    with quiet(transformers), refusing(path):
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        try:
            model, info = load(path.resolve(), attn_implementation="sdpa", **options)
        except ValueError as error:
            if "attn_implementation" not in str(error):
                raise
            model, info = load(path.resolve(), attn_implementation="eager", **options)
    info["unexpected_keys"] = unknown_tensors(folder, model, info.get("unexpected_keys") or ())
    reasons = {
        "missing_keys": "the files lack weights of the model, which would be random",
        "mismatched_keys": "weights have other shapes than config.json says",
        "unexpected_keys": "the model lacks tensors of the files",
        "error_msgs": "transformers reports",
    }
    for key, reason in reasons.items():
        if names := sorted(n[0] if isinstance(n, tuple) else str(n) for n in info.get(key) or ()):
            rest = f", … ({len(names)})" if len(names) > 3 else ""
            raise ConfigError(f"{path}: {reason}: {', '.join(names[:3])}{rest}")
    return model.float()


def unknown_tensors(folder: Folder, model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Return the names among unexpected ones that are not constants of the model."""
    left = set(unexpected)
    for file in folder.files if left else ():
        for name, tensor in tensors_in(file, lambda name: without_prefix(name) in left).items():
            if is_constant(name, tensor, model):
                left.discard(without_prefix(name))
    return sorted(left)


def without_prefix(name: str) -> str:
    """Return the name of a tensor without what wrappers have added."""
    for pattern, text in PREFIXES.items():
        name = re.sub(pattern, text, name)
    return name


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence the reports of transformers and its progress inside the block."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise an error of transformers as ConfigError, one line."""
    try:
        yield
    except Exception as error:  # whatever a damaged folder makes the library raise
        text = " ".join(str(error).split()) or type(error).__name__
        text = re.sub(r" Model type should be one of .*", "", text)
        raise ConfigError(f"{path}: not a causal language model: {text[:300]}") from error


def refuse_tokens(path: Path, model: nn.Module, tokens: Tensor) -> None:
    """Raise ConfigError for tokens outside of the vocabulary, and for another type or shape."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        raise ConfigError(
            f"tokens: found {tokens.dtype} of shape {tuple(tokens.shape)}; allowed integers, "
            "(batch, seq), two or more in a sequence"
        )
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    size = getattr(embedding, "num_embeddings", None)
    if size is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ConfigError(
            f"tokens: found {int(tokens.min())} to {int(tokens.max())}; {path} has the tokens 0 to "
            f"{size - 1}: is it another tokenizer's?"
        )


def refuse_reading_ahead(path: Path, model: nn.Module, tokens: Tensor) -> None:
    """Raise ConfigError if a position's logits depend on the token that it predicts."""
    some = tokens[:1].clone()
    changed = some.clone()
    changed[:, -1] = (some[:, -1] + 1) % max(2, int(tokens.max()) + 1)

    def logits(x: Tensor) -> Tensor:
        with undisturbed(model), refusing(path):
            return model(input_ids=x, use_cache=False).logits[:, :-1].clone()

    one, two = logits(some), logits(changed)
    if not one.isfinite().all():
        raise ConfigError(f"{path}: the logits are not finite; allowed finite weights")
    if not torch.allclose(one, two, rtol=0.0, atol=1e-3 * float(one.abs().max())):
        raise ConfigError(
            f"{path}: a position's logits depend on later tokens: {type(model).__name__} is not a "
            "causal language model; call deepstack.analyze_model(model, batch, targets=…)"
        )
