"""Gemma 4's assistant: its drafts are those of transformers after every token, and it writes
nothing. test_families.py compares texts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.gemma4 import FULL, SLIDING, save_assistant, save_gemma4, save_larger
from tests.models.helpers import random_tokens
from tests.models.test_gemma4 import TOKENS
from tllm_spec.executor.speculative.drafting.network_drafter import KeyReadingDrafter
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

K = 3
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_seq_len": 64, "max_batch_size": 3}
# Of transformers 5.24: the first logits of the first step, and three drafts.
EXPECTED: dict[bool, tuple[list[float], list[int]]] = {
    False: ([-0.131, -0.79715, -0.15413, 0.78231, 1.9262, 0.02554], [4, 13, 4]),
    True: ([-2.28393, -2.28393, 1.32703, -2.28393, -0.22619, -2.28393], [2, 10, 4]),
}


def assisted(folder: Path, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "MTP", "speculative_model": str(folder), "max_draft_len": K}
    return {"speculative_config": own | options}


def steps_of(target: Any, assistant: Any, tokens: list[int]) -> list[tuple[torch.Tensor, int]]:
    """The logits and the drafts of transformers after `tokens`, of which the target has read all
    but the last one."""
    with torch.no_grad():
        read = torch.tensor([tokens[:-1]])
        options = {"output_hidden_states": True, "return_shared_kv_states": True}
        found = target(read, use_cache=True, **options)
        shared = {kind: tuple(pair) for kind, pair in found.shared_kv_states.items()}
        state, last, steps = found.hidden_states[-1][:, -1:], tokens[-1], []
        for _ in range(K):
            embedded = target.get_input_embeddings()(torch.tensor([[last]]))
            step = assistant(
                inputs_embeds=torch.cat((embedded, state), -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=shared,
                attention_mask=None,
            )
            last, state = int(step.logits.argmax()), step.last_hidden_state
            steps.append((step.logits[0, 0], last))
    return steps


Found = list[tuple[int, int, list[int]]]


@contextmanager
def recorded(texts: list[list[int]]) -> Iterator[Found]:
    """What is drafted: the text's length with the newest token, this token, and the drafts. Drafts
    that continue one of the texts are verified instead, so that all are accepted."""
    found: Found = []
    propose = KeyReadingDrafter.propose

    def kept(self: KeyReadingDrafter, seen: Any, group: Any, shape: Any) -> Any:
        drafts = propose(self, seen, group, shape)
        if drafts is None:
            return None
        ends = (self._slots.kv_lens[group.slots] + 1).tolist()
        newest = self._slots.window[group.slots, 0].tolist()
        own = list(zip(ends, newest, drafts.tokens.tolist(), strict=True))
        found.extend(own)
        given = drafts.tokens.clone()
        for row, (end, token, _) in enumerate(own):
            for text in texts:
                if text[end - 1 : end] == [token] and len(text) >= end + K:
                    given[row] = torch.tensor(text[end : end + K])
        return replace(drafts, tokens=given)

    with mock.patch.object(KeyReadingDrafter, "propose", kept):
        yield found


@pytest.mark.parametrize("ordered", EXPECTED)
def test_drafts_are_those_of_transformers(ordered: bool, tmp_path: Path) -> None:
    target = save_gemma4(tmp_path, attention_k_eq_v=False)
    assistant = save_assistant(tmp_path / "assistant", target, ordered=ordered)
    with (
        recorded([]) as found,
        LLM(str(tmp_path), **assisted(tmp_path / "assistant"), **OPTIONS) as llm,
    ):
        output = llm.generate(TOKENS, SamplingParams(max_tokens=6, ignore_eos=True))
    first, drafts = EXPECTED[ordered]
    assert output.outputs[0].token_ids[0] == 23 and found[0] == (13, 23, drafts)
    steps = steps_of(target, assistant, [*TOKENS, 23])
    torch.testing.assert_close(steps[0][0][:6], torch.tensor(first), rtol=0, atol=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "one after the other": {"max_batch_size": 1},
    "together": {},
    "two models": {"disable_overlap_scheduler": True},
    "chunks": {"enable_chunked_prefill": True, "max_num_tokens": 12},
    "pages of one token": {"kv_cache_config": {"tokens_per_block": 1}},
    "pages of four": {"kv_cache_config": {"tokens_per_block": 4}},
    "triton": {"attn_backend": "TRITON"},
}


@pytest.mark.parametrize("kind", ["dense", "per layer"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.thinned(4)
def test_after_every_accepted_token_drafts_are_those_of_a_cold_start(
    setting: str, kind: str, tmp_path: Path
) -> None:
    """Twice, so that the second time finds prefixes cached."""
    target = save_larger(tmp_path, kind)
    types = [SLIDING, FULL, SLIDING, FULL]
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": 4, "layer_types": types}
    assistant = save_assistant(tmp_path / "assistant", target, **sizes)
    prompts = [random_tokens(19, seed=1), random_tokens(30, seed=2), random_tokens(2, seed=3)]
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        plain = llm.generate(prompts, params)
    ends = [each.outputs[0].token_ids for each in plain]
    texts = [[*prompt, *end] for prompt, end in zip(prompts, ends, strict=True)]
    options = OPTIONS | SETTINGS[setting]
    spec = assisted(tmp_path / "assistant", mtp_eagle_one_model=setting != "two models")
    with recorded(texts) as found, LLM(str(tmp_path), **spec, **options) as llm:
        again = [llm.generate(prompts, params) for _ in range(2)]
        llm.check_integrity()
    for outputs in again:
        assert [each.outputs[0].token_ids for each in outputs] == ends
        assert all(each.speculative_decoding.acceptance_length > 3 for each in outputs)
    begun = {(end, text[end - 1]): text[:end] for text in texts for end in range(3, len(text) + 1)}
    # A round may be in flight when a text has its last token.
    compared = {(end, token): drafts for end, token, drafts in found if (end, token) in begun}
    assert len(compared) > 12
    for each, drafts in compared.items():
        steps = steps_of(target, assistant, begun[each])
        assert drafts == [token for _, token in steps], each


def test_an_assistant_for_another_target_is_refused(tmp_path: Path) -> None:
    target = save_larger(tmp_path)
    folder = tmp_path / "assistant"
    save_assistant(folder, target)
    raw = json.loads((folder / "config.json").read_text())
    for change, problem in (
        ({"backbone_hidden_size": 32}, "backbone_hidden_size: 32, and 64 of the target"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids is 7"),
        ({"text_config": raw["text_config"] | {"vocab_size": 64}}, "vocab_size: 64, and 128"),
    ):
        (folder / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ValueError, match=problem):
            LLM(str(tmp_path), **assisted(folder), **OPTIONS)
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="use_mtp_vanilla = True is refused"):
        LLM(str(tmp_path), **assisted(folder, use_mtp_vanilla=True), **OPTIONS)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.k_proj.weight": torch.ones(8)}, file)
    with pytest.raises(ValueError, match=r"missing none; surplus layers\.0\.self_attn\.k_proj"):
        LLM(str(tmp_path), **assisted(folder), **OPTIONS)
    del tensors["pre_projection.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing pre_projection\.weight; surplus none"):
        LLM(str(tmp_path), **assisted(folder), **OPTIONS)
    eagle: Any = {
        "speculative_config": {"decoding_type": "Eagle3", "speculative_model": str(folder)}
    }
    eagle["speculative_config"]["max_draft_len"] = K
    with pytest.raises(ValueError, match="use it with decoding_type: MTP"):
        LLM(str(tmp_path), **eagle, **OPTIONS)


def test_dummy_weights_of_both_need_only_their_configs(tmp_path: Path) -> None:
    folder = tmp_path / "assistant"
    save_assistant(folder, save_larger(tmp_path, "per layer"), ordered=True)
    for each in (tmp_path, folder):
        (each / "model.safetensors").unlink()
    prompt, params = random_tokens(20), SamplingParams(max_tokens=9, ignore_eos=True)
    texts = []
    for spec in ({}, assisted(folder)):
        with LLM(str(tmp_path), load_format="dummy", **spec, **OPTIONS) as llm:
            texts.append(llm.generate(prompt, params).outputs[0].token_ids)
    assert texts[0] == texts[1]
