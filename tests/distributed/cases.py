"""Engines and requests whose tokens are compared between numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from unittest import mock

from tests.models.fp8_checkpoint import keeping_fp8
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.llm import LLM
from tllm_spec.ranks import release_ranks
from tllm_spec.sampling_params import SamplingParams, ThinkingBudgetLogitsProcessor

EAGLE3 = {
    "decoding_type": "Eagle3",
    "max_draft_len": 3,
    "speculative_model": "zoo:llama-eagle3",
}
DRAFT_MODEL = {
    "decoding_type": "Draft_Target",
    "max_draft_len": 3,
    "speculative_model": "zoo:llama-draft",
}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TOKEN_MAP = {"speculative_token_map": "zoo:llama-draft/token_map.json"}
OTHER_TOKENIZER = {"speculative_model": "{folder}/other-tokenizer"}
# For the tiny targets, and with their tokens in another order.
EAGLE = {
    "decoding_type": "Eagle",
    "max_draft_len": 3,
    "speculative_model": "{folder}/eagle",
    "speculative_token_map": "{folder}/eagle/tokens.json",
}
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "ngram-tree": NGRAM | TREE,
    "eagle3": EAGLE3,
    "eagle3-two-model": EAGLE3 | {"eagle3_one_model": False},
    "draft-model": DRAFT_MODEL,
    "draft-model-one-model": DRAFT_MODEL | {"draft_target_one_model": True},
    "draft-model-token-map": DRAFT_MODEL | TOKEN_MAP,
    "draft-model-sa": DRAFT_MODEL | {"sa_config": {}},
    "eagle3-sa": EAGLE3 | {"sa_config": {}},
    "eagle3-sa-tree": EAGLE3 | TREE | {"sa_config": {}},
    "eagle3-tree": EAGLE3 | TREE,
    "eagle3-tree-two-model": EAGLE3 | TREE | {"eagle3_one_model": False},
    "eagle3-static-tree": EAGLE3 | {"eagle_choices": CHOICES},
    "peagle": EAGLE3 | {"speculative_model": "zoo:llama-peagle"},
    "pard": DRAFT_MODEL | {"decoding_type": "PARD", "mask_token_id": 1},
    "rejection-sampling": DRAFT_MODEL | {"use_rejection_sampling": True},
}

PROMPTS = [
    "Once upon a time",
    "def main():\n    ",
    "class Foo",
    "import os\nimport",
    "return x",
    "def main():\n    return",
    "import os\n",
]
# Greedy, sampled, penalised, with stop strings, guided, several samples, and with a budget of the
# section that the prompt's last token opens; its closer is written `EF`.
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 14},
    {"max_tokens": 14, "temperature": 0.9, "seed": 3, "top_k": 20},
    {"max_tokens": 14, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"max_tokens": 20, "stop": ["\n", "or"]},
    {"max_tokens": 12, "guided_decoding": {"regex": "[a-z ]{5,10}"}},
    {"max_tokens": 14, "temperature": 1.0, "top_p": 0.8, "seed": 7, "n": 2},
    {
        "max_tokens": 12,
        "logits_processor": ThinkingBudgetLogitsProcessor(2, [202], [40, 41]),
        "stop": ["E", "F"],
    },
]
LONG = {"max_tokens": 100, "min_tokens": 100, "ignore_eos": True}
TOKEN_PROMPTS = [[5 + length, 9, 11, 30 + length] * 3 for length in range(4)]
TOKEN_PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 16, "ignore_eos": True},
    {"max_tokens": 16, "ignore_eos": True, "temperature": 0.7, "seed": 5},
    {"max_tokens": 16, "ignore_eos": True, "frequency_penalty": 0.5},
    {"max_tokens": 16, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9, "n": 2, "seed": 1},
]

Outputs = list[tuple[str | None, list[list[int]], list[str | None]]]


def generate_all(llm: LLM) -> Outputs:
    """Error, tokens and finish reasons of every prompt, all running together."""
    has_text = llm.tokenizer is not None
    params = [SamplingParams.from_dict(each) for each in (PARAMS if has_text else TOKEN_PARAMS)]
    found = llm.generate(PROMPTS if has_text else TOKEN_PROMPTS, params, use_tqdm=False)
    return [
        (each.error, [o.token_ids for o in each.outputs], [o.finish_reason for o in each.outputs])
        for each in found
    ]


def generate_twice(llm: LLM) -> Outputs:
    """The second time the prompts' prefixes are in the cache."""
    return generate_all(llm) + generate_all(llm)


def generate_and_cancel(llm: LLM) -> Outputs:
    """The others' tokens, while one request is cancelled in the middle."""
    cancelled = llm.generate_async(TOKEN_PROMPTS[0], LONG, streaming=True)
    next(iter(cancelled))
    found = generate_all(llm)
    cancelled.abort()
    assert cancelled.result().outputs[0].finish_reason == "cancelled"
    return found + generate_all(llm)


class ChangingTiers:
    """Chooses another of `tiers` in every round. Ranks other than the first choose in another
    order, which must not matter."""

    def __init__(self, tiers: Sequence[int]) -> None:
        from mpi4py import MPI

        self._coming = cycle(tiers if MPI.COMM_WORLD.rank == 0 else tiers[::-1])
        self.chosen = set[int]()

    def tier_for(self, batch_size: int) -> int:
        tier = next(self._coming)
        self.chosen.add(tier)
        return tier


@dataclass(frozen=True)
class Case:
    """`model`: of the zoo, or one of `tiny_models`, as its speculative model may be: the caller has
    a folder with these. `tiers`: that rounds have by turns, instead of the controller's choice.
    `whole_pages`: whether prefixes must be reused in whole pages. `in_fp8`: whether FP8 weights
    stay so on CPUs, too."""

    model: str = "zoo:llama"
    options: dict[str, Any] = field(default_factory=dict)
    run: Callable[[LLM], Outputs] = generate_all
    accepts: bool = False  # whether drafts must be accepted
    tiers: tuple[int, ...] = ()
    whole_pages: bool = False
    in_fp8: bool = False

    def outputs(self, folder: str, num_ranks: int) -> Outputs:
        """On rank 0. The other processes of mpirun end with SystemExit, to have the next case's
        patches."""
        options: dict[str, Any] = {"device": "cpu", "max_batch_size": 8, **self.options}
        options["skip_tokenizer_init"] = not self.model.startswith(("zoo:", "text-"))
        if num_ranks == 1:
            options.pop("moe_expert_parallel_size", None)
        if (spec := options.get("speculative_config")) is not None:
            options["speculative_config"] = {
                name: value.format(folder=folder) if isinstance(value, str) else value
                for name, value in spec.items()
            }
        model = self.model if self.model.startswith("zoo:") else f"{folder}/{self.model}"
        with ExitStack() as stack:
            asked = stack.enter_context(keeping_fp8()) if self.in_fp8 else None
            if self.tiers:
                changing = ChangingTiers(self.tiers)
                patch = mock.patch.object(AdaptiveController, "tier_for", changing.tier_for)
                stack.enter_context(patch)
            llm = stack.enter_context(LLM(model, tensor_parallel_size=num_ranks, **options))
            found = self.run(llm)
            assert asked is None or asked.called
            assert not self.tiers or changing.chosen == set(self.tiers)
            llm.check_integrity()
            state = llm.server_info()["internal_states"][0]
            assert [rank["rank"] for rank in state["ranks"]] == list(range(num_ranks))
            assert all(rank["weight_bytes"] > 0 for rank in state["ranks"])
            if self.accepts:
                assert state["totals"]["speculation"]["acceptance_length"] > 1, state
            if self.run is generate_twice:
                cache = state["kv_cache"]
                assert cache["reused_pages"] + cache["copied_pages"] > 0, state
            if self.whole_pages:
                assert state["kv_cache"]["reused_pages"] > 0, state
            if self.options.get("scheduler_config"):
                assert state["num_preemptions"] > 0, state
        if num_ranks > 1:
            release_ranks()
        return found


def speculating(name: str, **options: Any) -> Case:
    return Case(options={"speculative_config": SPECULATION[name], **options}, accepts=True)


EP = {"moe_expert_parallel_size": 2}
MTP = {"decoding_type": "MTP", "max_draft_len": 3}
ASSISTANT = MTP | {"speculative_model": "{folder}/gemma4-assistant"}
RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 3,
    "relaxed_delta": 0.5,
    "begin_thinking_phase_token": 9,  # in all prompts
    "end_thinking_phase_token": 127,
}
VANILLA_MTP = {"decoding_type": "MTP", "max_draft_len": 2, "use_mtp_vanilla": True}
TINY_EAGLE3 = {
    "decoding_type": "Eagle3",
    "speculative_model": "{folder}/eagle3",
    "max_draft_len": 2,
    "eagle3_layers_to_capture": [0, 2],
}
LATENT_HEAD = TINY_EAGLE3 | {"speculative_model": "{folder}/eagle3-latent"}
DFLASH = {"decoding_type": "DFlash", "speculative_model": "{folder}/dflash", "max_draft_len": 3}
DFLASH2 = DFLASH | {"speculative_model": "{folder}/dflash2"}
DSPARK = DFLASH | {"decoding_type": "DSpark", "speculative_model": "{folder}/dspark"}
SMALL_CACHE = {
    "kv_cache_config": {"max_tokens": 104, "tokens_per_block": 8},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "max_seq_len": 64,
}
SMALL_PAGES = {"kv_cache_config": {"tokens_per_block": 8}}
STATES = {"kv_cache_config": {"tokens_per_block": 8, "state_snapshot_tokens": 8}}
WEIGHTS_ONLY = {"fp8_activations": False}
CASES: dict[str, Case] = {
    "eagle3-sa": speculating("eagle3-sa"),
    "eagle3-sa-tree": speculating("eagle3-sa-tree"),
    "peagle": speculating("peagle"),
    "pard": speculating("pard"),
    "dflash": Case("qwen2-moe", {"speculative_config": DFLASH}, generate_twice),
    "dflash2": Case("qwen2-moe", {"speculative_config": DFLASH2}, generate_twice),
    "dspark": Case("qwen2-moe", {"speculative_config": DSPARK}, generate_twice),
    "dspark-budget": Case(
        "qwen2-moe", {"speculative_config": DSPARK | {"verify_budget": 2.5}}, generate_twice
    ),
    "adaptive-draft-model": Case(
        options={"speculative_config": DRAFT_MODEL | {"adaptive": {}}}, accepts=True
    ),
    # Tiers 0 to 3 are draft lengths, 4 and 5 trees.
    "adaptive-trees": Case(
        options={"speculative_config": EAGLE3 | TREE | {"adaptive": {}}},
        accepts=True,
        tiers=(5, 0, 3, 4, 1, 5, 4, 2, 0),
    ),
    "budget": Case(options={"speculative_config": EAGLE3 | {"verify_budget": 2.5}}, accepts=True),
    "plain-experts": Case(
        model="qwen2-moe", options=SMALL_PAGES, run=generate_twice, whole_pages=True
    ),
    "divided-experts": Case(
        model="qwen2-moe", options={"moe_expert_parallel_size": 2, "speculative_config": NGRAM}
    ),
    "eagle": Case("qwen2-moe", {"speculative_config": EAGLE}, generate_twice),
    "draft-model-token-map-one-model": Case(
        options={"speculative_config": DRAFT_MODEL | TOKEN_MAP | {"draft_target_one_model": True}},
        accepts=True,
    ),
    "draft-model-other-tokenizer": Case(
        options={"speculative_config": DRAFT_MODEL | OTHER_TOKENIZER}, accepts=True
    ),
    "cancelled": Case(
        model="qwen2-moe", options={"disable_overlap_scheduler": True}, run=generate_and_cancel
    ),
    "llama4-parts": Case("llama4", EP | {"speculative_config": NGRAM}),
    "gemma3": Case("gemma3", SMALL_PAGES | {"speculative_config": TINY_EAGLE3}, generate_twice),
    "gemma4": Case("gemma4", {"speculative_config": TINY_EAGLE3}, generate_twice),
    "gemma4-assistant": Case("gemma4", {"speculative_config": ASSISTANT}, generate_twice),
    "gemma4-per-layer": Case("gemma4-per-layer", SMALL_PAGES | {"speculative_config": NGRAM}),
    "gemma4-experts": Case("gemma4-experts", {"speculative_config": NGRAM}),
    "gemma4-experts-parts": Case("gemma4-experts", EP | {"speculative_config": NGRAM}),
    "latent-head": Case("gemma3", {"speculative_config": LATENT_HEAD}, generate_twice),
    "latent-head-of-latents": Case("deepseek-v3", {"speculative_config": LATENT_HEAD}),
    "phi3": Case("phi3", {"speculative_config": NGRAM}),
    "minimax-m2": Case("minimax-m2", {"speculative_config": NGRAM}),
    "minimax-m2-parts": Case("minimax-m2", EP | {"speculative_config": NGRAM}),
    "ministral3": Case("ministral3", {"speculative_config": NGRAM}),
    "mistral4": Case("mistral4", {"speculative_config": NGRAM}),
    "olmo2": Case("olmo2", {"speculative_config": NGRAM}),
    "gpt-oss-parts": Case("gpt-oss-mxfp4", EP | {"speculative_config": TINY_EAGLE3}),
    "deepseek-v3-parts-mtp": Case("deepseek-v3", EP | {"speculative_config": MTP}, accepts=True),
    "glm-5-mtp": Case("glm-5", {"speculative_config": MTP}, generate_twice, accepts=True),
    "qwen3-next-mtp": Case("qwen3-next", {"speculative_config": MTP}, accepts=True),
    "qwen3.5-fp8-mtp": Case(
        "qwen3.5-fp8",
        STATES | WEIGHTS_ONLY | {"speculative_config": MTP},
        *(generate_twice, True),
        in_fp8=True,
    ),
    "preempted": Case(model="qwen2-moe", options=SMALL_CACHE),
    "fp8": Case("qwen3-moe-fp8", {"speculative_config": NGRAM}, in_fp8=True),
    "fp8-by-token": Case("llama-fp8-by-token", {"speculative_config": NGRAM}),
    "fp8-experts-by-token": Case("qwen3-moe-fp8-by-token", {"speculative_config": NGRAM}),
    "fp8-cache": Case(
        "qwen2-moe", {"kv_cache_config": {"dtype": "fp8"}, "speculative_config": NGRAM}
    ),
    "fp8-parts": Case("qwen3-moe-fp8", EP | {"speculative_config": NGRAM}, in_fp8=True),
}
# Pools are small, since the ranks may share a device.
ON_GPU = {
    "device": "cuda",
    "dtype": "float32",
    "kv_cache_config": {"max_tokens": 4096},
    "max_seq_len": 256,
}
ON_GPU_TINY = ON_GPU | {"max_seq_len": 64}
GPU_CASES = {
    "gpu-eagle3": speculating("eagle3", **ON_GPU),
    "gpu-draft-model": speculating("draft-model", **ON_GPU),
    "gpu-adaptive": Case(options=ON_GPU | {"speculative_config": EAGLE3 | {"adaptive": {}}}),
    "gpu-experts": Case("qwen2-moe", ON_GPU_TINY | {"speculative_config": NGRAM}),
    "gpu-divided-experts": Case("qwen2-moe", ON_GPU_TINY | EP | {"speculative_config": NGRAM}),
    "gpu-latent-mtp": Case("deepseek-v3", ON_GPU_TINY | EP | {"speculative_config": MTP}),
    "gpu-fp8": Case("qwen3-moe-fp8", ON_GPU_TINY | {"speculative_config": NGRAM}),
    "gpu-fp8-by-token": Case("llama-fp8-by-token", ON_GPU_TINY | {"speculative_config": NGRAM}),
    "gpu-llama4": Case("llama4", ON_GPU_TINY | {"speculative_config": NGRAM}),
    "gpu-gemma3": Case("gemma3", ON_GPU_TINY | {"speculative_config": NGRAM}),
    "gpu-gpt-oss": Case("gpt-oss-mxfp4", ON_GPU_TINY | EP | {"speculative_config": NGRAM}),
}
# Every family with experts or latent attention, its layers sliced and its experts divided.
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "mtp": MTP,
    "mtp-two-model": MTP | {"mtp_eagle_one_model": False},
    "vanilla-mtp": VANILLA_MTP,
    "vanilla-mtp-two-model": VANILLA_MTP | {"mtp_eagle_one_model": False},
    "mtp-sa": MTP | {"sa_config": {}},
    "mtp-tree": MTP | TREE,
    "mtp-relaxed": MTP | RELAXED,
    "eagle3": TINY_EAGLE3,
    "eagle3-two-model": TINY_EAGLE3 | {"eagle3_one_model": False},
}
OWN: dict[str, dict[str, Any]] = {"qwen3-next": STATES, "qwen3.5": STATES}
FAMILIES: dict[str, Case] = {
    f"{model}-{name}-{kind}": Case(
        model,
        {"speculative_config": DRAFTERS[name], **divided, **OWN.get(model, {})},
        run=generate_twice,
        accepts="mtp" in name,
    )
    for model, names in {
        "qwen2-moe": ["ngram"],
        "qwen3-moe": ["ngram"],
        "mixtral": ["ngram"],
        "llama4": ["ngram", "eagle3"],
        "glm": ["mtp"],
        "glm-5": ["mtp-two-model", "mtp-tree", "eagle3"],
        "gpt-oss": ["ngram", "eagle3"],
        "gpt-oss-mxfp4": ["ngram"],
        "deepseek-v2": ["ngram"],
        "deepseek-v3-strong": ["ngram"],
        "deepseek-v3": list(DRAFTERS),
        "qwen3.5": ["mtp-two-model"],
        "qwen3-next": ["ngram", "mtp-two-model", "mtp-tree", "eagle3"],
        "zoo:deepseek": ["mtp"],
    }.items()
    for name in names
    for kind, divided in {"tp": {}, "ep": EP}.items()
}
# All ways of speculating, with and without overlap, at each number of ranks.
GRID: dict[str, Case] = {
    f"{name}-{'no-overlap' if off else 'overlap'}": Case(
        options={"speculative_config": config, "disable_overlap_scheduler": off},
        run=generate_twice,
        accepts=config is not None,
    )
    for name, config in SPECULATION.items()
    for off in (False, True)
}
# On as many GPUs as a host has: 2, 4 or 8. Only the first has text, and grammars.
EIGHT_EAGLE3 = TINY_EAGLE3 | {"speculative_model": "{folder}/eagle3-eight-heads"}
EIGHT_DRAFT = DRAFT_MODEL | {"speculative_model": "{folder}/eight-heads"}
WIDE: dict[str, Case] = {
    f"wide-{name}": Case(
        model, ON_GPU_TINY | {"speculative_config": spec} | options, generate_twice
    )
    for name, model, spec, options in [
        ("grammars", "text-eight-heads", NGRAM, {}),
        ("grammars-tree", "text-eight-heads", NGRAM | TREE, {}),
        ("plain", "eight-heads", None, {}),
        ("no-overlap", "eight-heads", NGRAM, {"disable_overlap_scheduler": True}),
        ("eagle3", "eight-heads", EIGHT_EAGLE3, {}),
        ("eagle3-tree", "eight-heads", EIGHT_EAGLE3 | TREE, {}),
        ("eagle3-two-model", "eight-heads", EIGHT_EAGLE3 | {"eagle3_one_model": False}, {}),
        ("eagle3-sa", "eight-heads", EIGHT_EAGLE3 | {"sa_config": {}}, {}),
        ("draft-model", "eight-heads", EIGHT_DRAFT, {}),
        ("rejection", "eight-heads", EIGHT_DRAFT | {"use_rejection_sampling": True}, {}),
        ("adaptive", "eight-heads", EIGHT_EAGLE3 | {"adaptive": {}}, {}),
        ("experts-tp", "eight-heads-experts", NGRAM, {}),
        ("experts-ep2", "eight-heads-experts", NGRAM, EP),
        ("experts-ep4", "eight-heads-experts", NGRAM, {"moe_expert_parallel_size": 4}),
        ("latent-mtp-tp", "eight-heads-latent", MTP, {}),
        ("latent-mtp-ep2", "eight-heads-latent", MTP, EP),
        ("latent-mtp-tree-ep2", "eight-heads-latent", MTP | TREE, EP),
        ("latent-mtp-two-model", "eight-heads-latent", MTP | {"mtp_eagle_one_model": False}, {}),
    ]
}
ALL = CASES | GPU_CASES | FAMILIES | GRID | WIDE
