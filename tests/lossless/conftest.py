"""What the lossless tests share: prompts, cases, and plain decoding's outputs, made once a
session."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.lossless.cases import (
    OUTPUT_LEN,
    Case,
    border_crossing_stop,
    fixed_length_cases,
    generate,
    heldout_prompts,
    latest_new_token,
)
from tests.lossless.fitted_eagle import write_fitted_eagle, write_fitted_latent
from tests.lossless.oracle import GetOracle, Oracle
from tests.lossless.other_tokenizer import write_draft_with_another_tokenizer
from tests.models.helpers import load
from tests.models.tiny_dflash import SIZES, write_tiny_dflash
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer, load_tokenizer
from tllm_spec.zoo.registry import resolve_model

PROMPT_LEN = 60
# Of `fitted_file`.
HEAD, LATENT_HEAD, HOT = "head", "latent_head", "hot.pt"
DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
OTHER_TOKENIZER, CORPUS = "other_tokenizer", "corpus.jsonl"
FILES = (HEAD, LATENT_HEAD, DFLASH, DFLASH2, DSPARK, HOT, OTHER_TOKENIZER, CORPUS)
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
BLOCK_HEADS: dict[str, dict[str, Any]] = {
    DFLASH: {},
    DFLASH2: {"selector": _SELECTOR},
    DSPARK: {"markov": "gated", **_WINDOWS},
}
STOPPING = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.8, ignore_eos=True, seed=7)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("zoo:llama")


@pytest.fixture(scope="session")
def plain_llm() -> Iterator[LLM]:
    """Decoding with nothing that could go wrong: one request at a time, no speculation, no reuse,
    no chunks, and every round is read before the next one starts."""
    options = {"kv_cache_config": {"enable_block_reuse": False}, "disable_overlap_scheduler": True}
    with LLM("zoo:llama", max_batch_size=1, **options) as llm:
        yield llm


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return heldout_prompts(tokenizer, 10, PROMPT_LEN)


@pytest.fixture(scope="session")
def unstopped(plain_llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """What the last two cases would go on to say if they did not stop."""
    return [
        output.outputs[0].token_ids
        for output in generate(plain_llm, [Case("", prompt, STOPPING) for prompt in prompts[8:]], 1)
    ]


@pytest.fixture(scope="session")
def cases(tokenizer: Tokenizer, prompts: list[list[int]], unstopped: list[list[int]]) -> list[Case]:
    """Ten requests; the last two end early, at a stop string that no token has alone and at a stop
    token."""
    stop = border_crossing_stop(tokenizer, unstopped[0], OUTPUT_LEN // 3 + 1)
    by_string = replace(STOPPING, stop=[stop, "never to be found"])
    by_token = replace(
        STOPPING,
        stop_token_ids=[latest_new_token(unstopped[1][:-10])],
        include_stop_str_in_output=True,
    )
    return [
        *fixed_length_cases(tokenizer, prompts[:8]),
        Case("stop_string", prompts[8], by_string),
        Case("stop_token", prompts[9], by_token),
    ]


@pytest.fixture(scope="session")
def plain(plain_llm: LLM, cases: list[Case]) -> list[RequestOutput]:
    """What every other way of running must produce."""
    outputs = generate(plain_llm, cases, 1)
    assert all(output.error is None for output in outputs)
    return outputs


@pytest.fixture(scope="session")
def known_texts(
    prompts: list[list[int]], plain: list[RequestOutput], unstopped: list[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """Prompt to output; where a stop cuts the output, what would come after it, too, so that runs
    of drafts cross it."""
    texts = [output.outputs[0].token_ids for output in plain[:8]] + unstopped
    return {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}


@pytest.fixture(scope="session")
def fitted_file(
    cases: list[Case],
    plain: list[RequestOutput],
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """By name an EAGLE-1/2 head that knows the cases' texts, an EAGLE-3 head with latents, heads
    that fill in blocks and do not, a token map of half of the tokens that they have, a draft model
    with another tokenizer, and a corpus of the texts. Made when it is first asked for."""

    @cache
    def get(name: str) -> Path:
        path = tmp_path_factory.mktemp("fitted") / name
        if name == OTHER_TOKENIZER:
            return write_draft_with_another_tokenizer(path)
        if name in BLOCK_HEADS:
            sizes = SIZES | {"hidden_size": 192, "vocab_size": 2048}
            own = BLOCK_HEADS[name]
            return write_tiny_dflash(path, layers=(1, 5, 8), mask_token=1, sizes=sizes, **own)
        texts = [
            case.prompt + output.outputs[0].token_ids
            for case, output in zip(cases, plain, strict=True)
        ]
        if name in (HEAD, LATENT_HEAD):
            write = write_fitted_eagle if name == HEAD else write_fitted_latent
            return write(path, load(resolve_model("zoo:llama"), max_positions=512), texts)
        if name == CORPUS:
            path.write_text("\n".join(json.dumps(tokenizer.decode(text)) for text in texts))
            return path
        assert name == HOT
        counts = Counter(token for text in texts for token in text)
        hot = [token for token, _ in counts.most_common(len(counts) // 2)]
        torch.save(torch.tensor(hot), path)
        return path

    return get


@pytest.fixture(scope="session")
def oracle() -> GetOracle:
    """Loads transformers' model when it is first called."""
    made: list[Oracle] = []

    def get() -> Oracle:
        if not made:
            from transformers import AutoModelForCausalLM

            made.append(
                Oracle(
                    AutoModelForCausalLM.from_pretrained(
                        resolve_model("zoo:llama"), dtype=torch.float32
                    )
                )
            )
        return made[0]

    return get


@pytest.fixture(scope="module")
def exact_attention() -> Iterator[None]:
    """Attention in float64, rounded once. In float32 its last bits depend on the shape of the
    batch, which gives one of some 100,000 activations the next code, up to an eighth away, and
    moves logits by 0.1 or more. All else of a row is the same in every batch."""
    attend = F.scaled_dot_product_attention

    def attend_exactly(*tensors: Any, **options: Any) -> torch.Tensor:
        wide = [each if each is None else each.double() for each in tensors]
        return attend(*wide, **options).to(tensors[0].dtype)

    with patch.object(F, "scaled_dot_product_attention", attend_exactly):
        yield
