"""Engines and requests whose tokens are compared between numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

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
TOKEN_MAP = {"speculative_token_map": "zoo:llama-draft/token_map.json"}
# For the caller's target, and with its tokens in another order.
EAGLE = {
    "decoding_type": "Eagle",
    "max_draft_len": 3,
    "speculative_model": "{folder}/head",
    "speculative_token_map": "{folder}/head/tokens.json",
}
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "eagle3": EAGLE3,
    "eagle3-two-model": EAGLE3 | {"eagle3_one_model": False},
    "draft-model": DRAFT_MODEL,
    "draft-model-one-model": DRAFT_MODEL | {"draft_target_one_model": True},
    "draft-model-token-map": DRAFT_MODEL | TOKEN_MAP,
}

PROMPTS = [
    "Once upon a time",
    "def main():\n    ",
    "class Foo",
    "import os\nimport",
    "return x",
    "def main():\n    return",
]
# Greedy, sampled, penalised, with stop strings, guided, and several samples.
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 14},
    {"max_tokens": 14, "temperature": 0.9, "seed": 3, "top_k": 20},
    {"max_tokens": 14, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"max_tokens": 20, "stop": ["\n", "or"]},
    {"max_tokens": 12, "guided_decoding": {"regex": "[a-z ]{5,10}"}},
    {"max_tokens": 14, "temperature": 1.0, "top_p": 0.8, "seed": 7, "n": 2},
]
LONG = {"max_tokens": 100, "min_tokens": 100, "ignore_eos": True}
TOKEN_PROMPTS = [[5 + length, 9, 11, 30 + length] * 3 for length in range(4)]
TOKEN_PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 24, "ignore_eos": True},
    {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 5},
    {"max_tokens": 24, "ignore_eos": True, "frequency_penalty": 0.5},
    {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9, "n": 2, "seed": 1},
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


@dataclass(frozen=True)
class Case:
    """`model`: None for a random model of two layers with experts, whose folder the caller has."""

    model: str | None = "zoo:llama"
    options: dict[str, Any] = field(default_factory=dict)
    run: Callable[[LLM], Outputs] = generate_all
    accepts: bool = False  # whether drafts must be accepted

    def outputs(self, folder: str, num_ranks: int) -> Outputs:
        """On rank 0. The other processes of mpirun end with SystemExit."""
        options: dict[str, Any] = {"device": "cpu", "max_batch_size": 8, **self.options}
        if self.model is None:
            options["skip_tokenizer_init"] = True
        if (spec := options.get("speculative_config")) is not None:
            options["speculative_config"] = {
                name: value.format(folder=folder) if isinstance(value, str) else value
                for name, value in spec.items()
            }
        if num_ranks == 1:
            options.pop("moe_expert_parallel_size", None)
        with LLM(self.model or folder, tensor_parallel_size=num_ranks, **options) as llm:
            found = self.run(llm)
            llm.check_integrity()
            state = llm.server_info()["internal_states"][0]
            if self.accepts:
                assert state["totals"]["speculation"]["acceptance_length"] > 1, state
            if self.options.get("scheduler_config"):
                assert state["num_preemptions"] > 0, state
        return found


def speculating(name: str, **options: Any) -> Case:
    return Case(options={"speculative_config": SPECULATION[name], **options}, accepts=True)


SMALL_CACHE = {
    "kv_cache_config": {"max_tokens": 104, "tokens_per_block": 8},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "max_seq_len": 64,
}
CASES: dict[str, Case] = {
    "eagle3": speculating("eagle3"),
    "adaptive-draft-model": Case(
        options={"speculative_config": DRAFT_MODEL | {"adaptive": {}}}, accepts=True
    ),
    "plain-experts": Case(model=None, run=generate_twice),
    "divided-experts": Case(
        model=None, options={"moe_expert_parallel_size": 2, "speculative_config": NGRAM}
    ),
    "eagle": Case(model=None, options={"speculative_config": EAGLE}, run=generate_twice),
    "draft-model-token-map-one-model": Case(
        options={"speculative_config": DRAFT_MODEL | TOKEN_MAP | {"draft_target_one_model": True}},
        accepts=True,
    ),
    "cancelled": Case(
        model=None, options={"disable_overlap_scheduler": True}, run=generate_and_cancel
    ),
    "preempted": Case(model=None, options=SMALL_CACHE),
}
GPU_CASES = {
    "gpu-eagle3": speculating("eagle3", device="cuda", dtype="float32"),
    "gpu-adaptive": Case(
        options={
            "device": "cuda",
            "dtype": "float32",
            "speculative_config": EAGLE3 | {"adaptive": {}},
        }
    ),
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
