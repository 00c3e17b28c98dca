"""Texts with FLASHINFER are those with TRITON, up to near ties of 16-bit numbers, and its logits
are as near to float32. The models are the zoo's, made wider."""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.cases import (
    GPU_TOLERANCE,
    Case,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.oracle import Oracle
from tests.lossless.wide_zoo import write_wide
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks next to windows": {"enable_chunked_prefill": True, "max_num_tokens": 70},
    "speculation": {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and head."""
    folder = tmp_path_factory.mktemp("wide")
    return write_wide("zoo:llama", folder / "target"), write_wide(
        "zoo:llama-eagle3", folder / "head"
    )


def test_a_model_with_wider_heads_is_the_same_model(
    tokenizer: Tokenizer, wide: tuple[Path, Path]
) -> None:
    prompts, params = (
        heldout_prompts(tokenizer, 2, 60),
        SamplingParams(max_tokens=25, ignore_eos=True),
    )
    texts, lengths = [], []
    for target, head in ((Path("zoo:llama"), "zoo:llama-eagle3"), (wide[0], str(wide[1]))):
        config = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": head}
        with LLM(str(target), dtype="float32", device="cpu", speculative_config=config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert isinstance(outputs, list)
        texts.append([output.outputs[0].token_ids for output in outputs])
        lengths.append([output.speculative_decoding.acceptance_length for output in outputs])
    assert texts[0] == texts[1]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1) and min(lengths[0]) > 1.5


def options_of(setting: str, wide: tuple[Path, Path]) -> dict[str, Any]:
    options = dict(SETTINGS[setting])
    if "speculative_config" in options:
        options["speculative_config"] = options["speculative_config"] | {
            "speculative_model": str(wide[1])
        }
    return options


@cache
def oracle_of(folder: Path) -> Oracle:
    from transformers import AutoModelForCausalLM

    return Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_those_of_triton(
    setting: str,
    dtype: str,
    tokenizer: Tokenizer,
    wide: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("flashinfer")
    options = options_of(setting, wide) | {"dtype": dtype}
    prompts = heldout_prompts(tokenizer, 8, 150)
    cases = fixed_length_cases(
        tokenizer, [*prompts[:7], prompts[0][:100] + prompts[7]]
    )  # a prefix hit
    found = {}
    for backend in ("TRITON", "FLASHINFER"):
        with LLM(str(wide[0]), attn_backend=backend, max_batch_size=3, **options) as llm:
            found[backend] = generate(llm, cases, 3)
            llm.check_integrity()
    ours = [record for record in caplog.records if record.name.startswith("tllm_spec")]
    assert not [record for record in ours if record.levelno >= logging.WARNING], (
        "FlashInfer runs all layers"
    )
    for case, output, plain in zip(cases, found["FLASHINFER"], found["TRITON"], strict=True):
        assert_same(case, output, plain, lambda: oracle_of(wide[0]), GPU_TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_are_as_near_to_float32_as_tritons(
    setting: str, tokenizer: Tokenizer, wide: tuple[Path, Path]
) -> None:
    """The root mean square error, against float32, of the gaps between the best five log
    probabilities of every token."""
    pytest.importorskip("flashinfer")
    cases = fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 150))
    cases = [replace(case, params=replace(case.params, logprobs=5)) for case in cases]
    errors = {}
    for backend in ("TRITON", "FLASHINFER"):
        options = options_of(setting, wide) | {"dtype": "bfloat16"}
        with LLM(str(wide[0]), attn_backend=backend, max_batch_size=3, **options) as llm:
            outputs = generate(llm, cases, 3)
        found = [
            errors_of(case, output, oracle_of(wide[0]))
            for case, output in zip(cases, outputs, strict=True)
        ]
        errors[backend] = torch.cat(found).square().mean().sqrt().item()
    assert 0.01 < errors["TRITON"] < 0.06  # bfloat16 at 16 is good for 0.04 to 0.06
    assert errors["FLASHINFER"] < 1.15 * errors["TRITON"], errors


def errors_of(case: Case, output: RequestOutput, oracle: Oracle) -> torch.Tensor:
    """Errors of the differences between a token's best candidate and the next four."""
    text = output.outputs[0]
    logits = oracle.logits(case.prompt + text.token_ids)[len(case.prompt) - 1 : -1].double()
    assert len(text.logprobs) == len(logits) > 0
    found = []
    for row, entry in zip(logits, text.logprobs, strict=True):
        ids = sorted(entry, key=lambda token: -entry[token].logprob)[:5]
        ours = torch.tensor([entry[token].logprob for token in ids], dtype=torch.float64)
        found.append((ours - ours[0]) - (row[ids] - row[ids[0]]))
    return torch.cat([errors[1:] for errors in found])
