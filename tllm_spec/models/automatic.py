"""The drafter of a configuration that leaves it to the engine.

Without a `decoding_type` the JSON of the draft weights' folder says what they are. `AUTO` also
chooses all other options of `speculative_config`: from the weights that there are follow the
drafter and what rounds may have, and the adaptive cost model chooses among that as it runs. None of
these options changes a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tllm_spec.config.config_base import plain
from tllm_spec.config.draft_tree_config import MAX_BEAM_KEYS
from tllm_spec.config.neighbours import AUTO, SPECULATIVE_RENAMED
from tllm_spec.config.option_checks import with_our_names
from tllm_spec.config.speculative_config import AutoDecodingConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_kind import TYPES, is_exported, kind_by, names_in, naming_draft
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)

MAX_CHAIN = 7
# Drafts that cost little more the more there are: matches, and those of one forward.
MAX_CHEAP_CHAIN = 15
# Steps, children of a node, and drafts. In larger batches their rows are better spent on requests.
TREES: tuple[tuple[int, int, int], ...] = ((3, 4, 8), (5, 4, 16), (5, 8, 31))
LARGEST = ("dynamic_tree_max_topK", "max_total_draft_tokens")
MAX_TREE_BATCH = 8
STEPS: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 10, 15)
STEPS_OF_MATCHES = (0, 1, 3, 7, 15)  # a start times each of them


def with_drafter(model: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM` in which the decoding type is one that drafts. `AUTO` is logged as the
    YAML that it stands for. Raises ValueError if `AUTO` cannot read the folders."""
    spec = options.get("speculative_config")
    if isinstance(spec, AutoDecodingConfig):
        spec = {"decoding_type": AUTO, **spec.as_options()}
    elif str(spec).upper() == AUTO:
        spec = {"decoding_type": AUTO}
    if not isinstance(spec, Mapping):
        return dict(options)
    try:
        named = with_our_names(spec, SPECULATIVE_RENAMED)
    except ValueError:
        return dict(options)  # to be refused for the same reason
    draft, given = named.pop("speculative_model", None), named.pop("decoding_type", None)
    if isinstance(given, str) and given.upper() == AUTO:
        try:
            spec = _chosen(str(model), draft, named) | {key: plain(named[key]) for key in named}
        except TypeError as error:
            raise ValueError(f"speculative_config: {error}") from None
        logger.info("AUTO stands for this configuration:\n%s", as_yaml(spec).rstrip())
    elif given is None and isinstance(draft, str):
        try:
            spec = {**spec, "decoding_type": _type_of(resolve_model(draft))}
        except ValueError:
            return dict(options)  # to be refused without a type
    return {**options, "speculative_config": spec}


def as_yaml(spec: Mapping[str, Any]) -> str:
    """A file of options that has these."""
    tree = {"speculative_config": dict(spec)}
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


def _type_of(folder: Path) -> str:
    """The decoding type of draft weights. Raises ValueError for an unreadable configuration."""
    config = read_config(folder)
    if is_exported(config):
        return "MTP"
    kind = kind_by(config, lambda: names_in(folder) or ())
    if kind is not None:
        return TYPES[kind]
    return "PARD" if "pard_token" in config else "Draft_Target"


def _chosen(model: str, draft: object, own: Mapping[str, Any]) -> dict[str, Any]:
    """What `AUTO` takes next to the user's own options. Raises ValueError as `resolve_model`."""
    target, most, steps = resolve_model(model), MAX_CHAIN, STEPS
    trees = () if own.get("use_dynamic_tree") is False else TREES
    with naming_draft():
        folder = target if draft is None else resolve_model(str(draft))
    if folder.samefile(target) and _has_modules(target):
        found: dict[str, Any] = {"decoding_type": "MTP", "sa_config": {}}
    elif draft is not None:
        with naming_draft():
            found = {"decoding_type": _type_of(folder), "speculative_model": str(draft)}
            block = read_config(folder).get("block_size")
        found["sa_config"] = {}
        if found["decoding_type"] == "DFlash":
            most = min(MAX_CHEAP_CHAIN, int(block or MAX_CHEAP_CHAIN + 1) - 1)
        elif found["decoding_type"] == "Draft_Target":
            found["draft_target_one_model"] = True
    else:
        found = {"decoding_type": "SA"}
        most, steps, trees = MAX_CHEAP_CHAIN, STEPS_OF_MATCHES, ()
    if type(given := own.get("max_draft_len")) is int and given > 0:  # else it is refused
        most = given
    fitting = [tree for tree in trees if tree[0] <= most and tree[1] * most <= MAX_BEAM_KEYS]
    lengths = [*(length for length in steps if length < most), most]
    return found | {"max_draft_len": most} | _adaptive(lengths, fitting)


def _adaptive(lengths: list[int], shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Chains of these lengths, and trees."""
    if not shapes:
        return {"adaptive": {"candidate_steps": lengths}}
    trees = [dict(zip(("max_draft_len", *LARGEST), shape, strict=True)) for shape in shapes]
    adaptive = {
        1: {"candidate_steps": lengths, "candidate_trees": trees},
        MAX_TREE_BATCH + 1: {"candidate_steps": [*lengths], "candidate_trees": []},
    }
    largest = {name: max(tree[name] for tree in trees) for name in LARGEST}
    return {"use_dynamic_tree": True, **largest, "adaptive": adaptive}


def _has_modules(target: Path) -> bool:
    """Whether the checkpoint has MTP modules: config.json tells of them, and the weights, where
    their names are known, have them."""
    config = read_config(target)
    flat = {**config, **(config.get("text_config") or {})}
    number = flat.get("num_nextn_predict_layers", flat.get("mtp_num_hidden_layers"))
    names = names_in(target)
    if number is None:  # older files of Qwen3-Next
        return names is not None and "mtp.fc.weight" in names
    prefixes = ("mtp.", f"model.layers.{flat.get('num_hidden_layers')}.")
    return bool(number) and (names is None or any(name.startswith(prefixes) for name in names))
