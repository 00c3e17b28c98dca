"""What draft weights are, by the JSON of their folder: a kind that does not fit the decoding type
is refused before torch is loaded."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tllm_spec.models.config_file import read_config, read_json
from tllm_spec.zoo.registry import resolve_model

HeadKind = Literal[
    "EAGLE-1/2", "EAGLE-3", "DFlash", "DFlash2", "DSpark", "MTP", "Gemma 4 assistant"
]
# By decoding_type: the heads that it takes, the first one where a folder does not say; none: it
# takes a language model.
ACCEPTED: Mapping[str, tuple[HeadKind, ...]] = {
    "Draft_Target": (),
    "PARD": (),
    "DFlash": ("DFlash", "DFlash2"),
    "DSpark": ("DSpark",),
    "Eagle": ("EAGLE-1/2", "EAGLE-3"),
    "Eagle3": ("EAGLE-3",),
}
TYPES: Mapping[HeadKind, str] = {
    "EAGLE-1/2": "Eagle",
    "EAGLE-3": "Eagle3",
    "DFlash": "DFlash",
    "DFlash2": "DFlash",
    "DSpark": "DSpark",
    "MTP": "MTP",
    "Gemma 4 assistant": "MTP",
}
ASSISTANT = "Gemma4AssistantForCausalLM"
MODULES = "NextN"  # after the target's architecture, of exported MTP modules
# Heads that are not served, as their architectures and `projector_type` name them.
_NOT_SERVED = ("Domino", "JetSpec", "LiLiCorr", "Medusa", "UNO", "XPress")
_SPECULATORS = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")
# Keys of config.json that only EAGLE-3 heads have.
_EAGLE3_KEYS = frozenset({"draft_vocab_size", "eagle_config", "speculators_model_type"})
_DSPARK_KEYS = frozenset({"markov_rank", "dspark_markov_rank"})
# Each kind has the first tensor, and only EAGLE-3 has the second.
_FC, _HIDDEN_NORM = "fc.weight", "hidden_norm.weight"
MAX_HEADER_BYTES = 1 << 27


def kind_by(config: Mapping[str, Any], names: Callable[[], Iterable[str]]) -> HeadKind | None:
    """The kind by config.json, or else by the names of the tensors. None: a language model, or
    neither says so. Raises ValueError for a method that is not served."""
    if (method := _not_served(config)) is not None:
        raise ValueError(f"The draft weights are a {method} head; served are {', '.join(TYPES)}.")
    architectures = [str(name).lower() for name in config.get("architectures") or []]
    if architectures == [ASSISTANT.lower()]:
        return "Gemma 4 assistant"
    kinds = [*architectures, _text(config, "speculators_model_type")]
    if any("dspark" in name for name in kinds) or _DSPARK_KEYS & config.keys():
        return "DSpark"
    nested = config.get("dflash_config") or {}
    if any("dflash2" in name for name in kinds) or "selector_rank" in nested | dict(config):
        return "DFlash2"
    if "dflash_config" in config or any("dflash" in name for name in kinds):
        return "DFlash"
    if _EAGLE3_KEYS & config.keys() or any("eagle3" in name for name in architectures):
        return "EAGLE-3"
    if any("eagle" in name for name in architectures):
        return "EAGLE-1/2"
    found = [name for name in names() if name.endswith((_FC, _HIDDEN_NORM))]
    if any(name.endswith(_HIDDEN_NORM) for name in found):
        return "EAGLE-3"
    return "EAGLE-1/2" if any(name.endswith(_FC) for name in found) else None


def _not_served(config: Mapping[str, Any]) -> str | None:
    """The method of a head that is not served; None: it may be served."""
    nested = config.get("dflash_config") or {}
    own = (each.get("projector_type") for each in (config, nested))
    names = [str(name) for name in [*(config.get("architectures") or []), *own] if name]
    for method in _NOT_SERVED:
        if any(method in name or method.lower() == name.lower() for name in names):
            return method
    kind = _text(config, "speculators_model_type")
    return kind if kind and kind not in _SPECULATORS else None


def check_kind(
    path: str, kind: HeadKind | None, config: Mapping[str, Any], accepted: tuple[HeadKind, ...]
) -> None:
    """Raises ValueError for draft weights that are not accepted."""
    option = f"speculative_config.speculative_model = {path!r}"
    if is_exported(config):
        raise ValueError(f"{option} has MTP modules; use it with decoding_type: MTP")
    if kind is None:
        # Some published heads have no more than a Llama's configuration of one layer.
        num_layers = config.get("num_hidden_layers", 1)
        if accepted and num_layers != 1:
            raise ValueError(
                f"{option} is a language model of {num_layers} layers, not an {accepted[0]} head; "
                "use it with decoding_type: Draft_Target"
            )
    elif kind not in accepted:
        raise ValueError(
            f"{option} is an {kind} head, which reads hidden states of the target; use it with "
            f"decoding_type: {TYPES[kind]}"
        )


@contextmanager
def naming_draft() -> Iterator[None]:
    """A ValueError inside names the option of draft weights."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None


def is_exported(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is of a folder of exported MTP modules."""
    names = config.get("architectures") or []
    return is_fine_tuned(config) or (len(names) == 1 and str(names[0]).endswith(MODULES))


def is_fine_tuned(config: Mapping[str, Any]) -> bool:
    """Whether it is a module of the target's that speculators has trained further."""
    return _text(config, "speculators_model_type") == "mtp"


def check_folders(model: str, draft: str | None, decoding_type: str) -> None:
    """What the JSON of both folders says, before the weights are loaded and checked. Raises
    ValueError."""
    read_config(resolve_model(model))
    if draft is None or decoding_type not in ACCEPTED:
        return
    with naming_draft():
        folder = resolve_model(draft)
        config = read_config(folder)
    if (names := names_in(folder)) is not None:
        kind = kind_by(config, lambda: names)
        check_kind(draft, kind, config, ACCEPTED[decoding_type])


def names_in(folder: Path) -> list[str] | None:
    """The names of the tensors by headers of safetensors; None where these do not say."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if not single.is_file():
            return list(read_json(index)["weight_map"])
        with single.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            return list(json.loads(content.read(min(size, MAX_HEADER_BYTES))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _text(config: Mapping[str, Any], key: str) -> str:
    return str(config.get(key) or "")
