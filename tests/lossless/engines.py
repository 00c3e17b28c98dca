"""The ways of decoding that the suite compares with plain decoding, as keyword arguments of `LLM`
and of `Harness`."""

from pathlib import Path
from typing import Any

from tests.executor.draft_caches import MASK
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import write_tiny_eagle3

DRAFT_MODEL, HEAD = "zoo:llama-draft", "zoo:llama-eagle3"
PARALLEL_HEAD = "zoo:llama-peagle"
# Without a model that was trained for it, drafts after the first are rarely right.
PARD: dict[str, Any] = {
    "decoding_type": "PARD",
    "speculative_model": DRAFT_MODEL,
    "mask_token_id": 1,
}
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"decoding_type": "NGram", "max_matching_ngram_size": 3},
    "draft_target": {"decoding_type": "Draft_Target", "speculative_model": DRAFT_MODEL},
    "draft_target_onnxruntime": {
        "decoding_type": "Draft_Target",
        "speculative_model": DRAFT_MODEL,
        "draft_backend": "onnxruntime",
    },
    "draft_target_one_model": {
        "decoding_type": "Draft_Target",
        "speculative_model": DRAFT_MODEL,
        "draft_target_one_model": True,
    },
    "eagle3": {"decoding_type": "Eagle3", "speculative_model": HEAD},
    "eagle3_two_model": {
        "decoding_type": "Eagle3",
        "speculative_model": HEAD,
        "eagle3_one_model": False,
    },
    "eagle3_onnxruntime": {
        "decoding_type": "Eagle3",
        "speculative_model": HEAD,
        "eagle3_one_model": False,
        "draft_backend": "onnxruntime",
    },
    "peagle": {"decoding_type": "Eagle3", "speculative_model": PARALLEL_HEAD},
    "peagle_two_model": {
        "decoding_type": "Eagle3",
        "speculative_model": PARALLEL_HEAD,
        "eagle3_one_model": False,
    },
    "pard": PARD,
    "pard_two_model": PARD | {"draft_target_one_model": False},
}
DYNAMIC_TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4}
TREES = ("eagle3", "eagle3_two_model", "draft_target_one_model", "draft_target", "ngram", "peagle")
MODES |= {f"{mode}_tree": (MODES[mode] or {}) | DYNAMIC_TREE for mode in TREES}
MODES["eagle3_static"] = MODES["eagle3"]
MODES["sa"] = {"decoding_type": "SA"}
SA_CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3_two_model": {"threshold": 2},
    "draft_target_one_model": {"threshold": 3, "enable_global_pool": True},
    "draft_target": {},
    "pard_two_model": {"threshold": 2, "enable_global_pool": True},
}
MODES |= {
    f"{mode}_sa": (MODES[mode] or {}) | {"sa_config": own} for mode, own in SA_CONFIGS.items()
}
MODES |= {
    "eagle3_sa_tree": (MODES["eagle3_tree"] or {}) | {"sa_config": {}},
    "eagle3_sa_static": (MODES["eagle3"] or {}) | {"sa_config": {"threshold": 2}},
    "eagle3_two_model_sa_tree": (MODES["eagle3_two_model_tree"] or {}) | {"sa_config": {}},
    "draft_target_sa_tree": (MODES["draft_target_tree"] or {}) | {"sa_config": {}},
}
# Modes that the default run has in `test_equality` only: each is like another one that it has.
LONG_ONLY = (
    "eagle3_two_model_tree",
    "draft_target_one_model_tree",
    "draft_target_tree",
    "draft_target_onnxruntime",
    "eagle3_onnxruntime",
    "eagle3_static",
    "sa",
    *(mode for mode in MODES if "_sa" in mode),
)
ON_GPU = tuple(mode for mode in MODES if not mode.endswith("_onnxruntime"))


def static_choices(depth: int) -> list[list[int]]:
    """A path of the best drafts, and next to each draft on it the second best, with one more."""
    paths = [[0] * length for length in range(1, depth + 1)]
    paths += [[*path[:-1], 1] for path in paths]
    return paths + [[*path, 0] for path in paths[depth:-1]]


def engine(
    mode: str, draft_len: int, *, overlap: bool = True, **speculation: Any
) -> dict[str, Any]:
    """A mode of the zoo's models; `overlap` says nothing where the mode has none."""
    own = MODES[mode]
    if mode.endswith("_static"):
        speculation = {"eagle_choices": static_choices(draft_len)} | speculation
    config = None if own is None else own | {"max_draft_len": draft_len} | speculation
    return {"speculative_config": config, "disable_overlap_scheduler": not overlap}


def write_tiny_drafts(root: Path) -> tuple[Path, Path]:
    """A draft model and a head for the target of `write_tiny_llama`: the model is right in every
    second place, the head, which has three quarters of the tokens, hardly ever."""
    head = write_tiny_eagle3(root / "head", num_captured=2)
    write_tiny_eagle3(root / "peagle", num_captured=2, num_layers=2, mask_token=MASK)
    return write_tiny_llama(root / "draft", noise=0.15), head


def tiny_engine(
    mode: str, drafts: tuple[Path, Path], draft_len: int, **speculation: Any
) -> dict[str, Any]:
    """The same mode with the drafts of `write_tiny_drafts`."""
    draft, head = drafts
    own: dict[str, Any] = {}
    if mode.startswith("draft_target"):
        own = {"speculative_model": str(draft)}
    elif mode.startswith("pard"):
        own = {"speculative_model": str(draft), "mask_token_id": MASK}
    elif mode.startswith("peagle"):
        head = head.with_name("peagle")
        own = {"speculative_model": str(head), "eagle3_layers_to_capture": [0, 1]}
    elif mode.startswith("eagle3"):
        own = {"speculative_model": str(head), "eagle3_layers_to_capture": [0, 1]}
    return engine(mode, draft_len, **own, **speculation)
