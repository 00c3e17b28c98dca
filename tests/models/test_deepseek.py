"""DeepSeek's published configurations, what is refused, and V3.2 in texts of up to `index_topk`
tokens, where the indexer chooses all keys."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import is_projection, quantise
from tests.models.helpers import (
    PagedRunner,
    check_same_logits,
    load,
    quantised_pair,
    random_tokens,
    reference_logits,
)
from tests.models.mtp_reference import save_with_mtp
from tests.models.published import FP8, V2_LITE, V3, V3_2
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.llm import LLM
from tllm_spec.models.registry import model_config_of
from tllm_spec.sampling_params import SamplingParams


def test_v2_lite_is_read_as_published() -> None:
    config = model_config_of(V2_LITE)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank is None
    assert config.sparse_layers == frozenset(range(1, 27)) and config.num_nextn_layers == 0
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.normalise_top_k) == ("softmax", 6, 1, False)
    assert moe.shared_intermediate_size == 2 * 1408 and not moe.has_correction_bias
    scale = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert config.layer_groups(SINGLE_RANK)[0].geometry == LatentGeometry(
        27, 16, 512, 64, 128, 128, pytest.approx(scale)
    )


def test_v3_is_read_as_published() -> None:
    config = model_config_of(V3)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank == 1536 and mla.is_interleaved
    assert config.quantisation.fp8 is not None and config.num_nextn_layers == 1
    assert config.sparse_layers == frozenset(range(3, 61))
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.top_groups) == ("sigmoid", 8, 8, 4)
    assert moe.normalise_top_k and moe.has_correction_bias and moe.routed_scaling_factor == 2.5


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (V3, {"attention_bias": True}, "attention_bias is true"),
        (V3, {"topk_method": "lottery"}, "topk_method is 'lottery'"),
        (V3, {"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true with topk_method 'greedy'"),
        (V3, {"num_experts_per_tok": 300}, "num_experts_per_tok is 300.* 256"),
        (V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok is 0"),
        (
            V3,
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "other quantized checkpoints are not served",
        ),
        (
            V3_2,
            {"mlp_layer_types": ["sparse"] * 61},
            r"mlp_layer_types is .*'dense' for the first.* = 3",
        ),
        (V3_2, {"layer_types": ["full_attention"] * 61}, "layer_types is .*served is 'indexed_att"),
        (V3_2, {"index_topk": None}, "index_topk is null"),
    ],
)
def test_what_is_not_served_is_named(
    base: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        model_config_of(base | change)


TOPK = 16
TOKENS = random_tokens(40, seed=3)


def save(folder: Path, **config: Any) -> Any:
    return save_deepseek(folder, "DeepseekV32", index_topk=TOPK, **config)


def test_logits_equal_transformers_up_to_index_topk_and_no_further(tmp_path: Path) -> None:
    expected = reference_logits(save(tmp_path), TOKENS)
    runner = PagedRunner(load(tmp_path))
    parts = [runner.step({0: TOKENS[:10]})[0], runner.step(windows={0: TOKENS[10 : TOPK + 1]})[0]]
    found = torch.cat(parts)
    torch.testing.assert_close(found[:TOPK], expected[:TOPK], rtol=0, atol=1e-4)
    assert (found[TOPK] - expected[TOPK]).abs().max() > 0.01, "the indexer changes nothing"


@pytest.mark.parametrize(("options", "length"), [({}, 64), ({"max_seq_len": TOPK + 1}, TOPK + 1)])
def test_longer_texts_are_refused_with_the_reason(
    options: dict[str, int], length: int, tmp_path: Path
) -> None:
    save(tmp_path)
    problem = rf"max_seq_len = {length} exceeds index_topk = {TOPK} of.*the indexer, which chooses"
    with pytest.raises(ValueError, match=problem):
        LLM(str(tmp_path), skip_tokenizer_init=True, **options)  # type: ignore[arg-type]


def test_the_layer_that_predicts_a_further_token_is_served_without_its_indexer(
    tmp_path: Path,
) -> None:
    save_with_mtp(tmp_path)  # a model of V3, which gets indexers
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.indexer.wk.weight"] = torch.ones(16, 64)
    save_file(tensors, file)
    newer = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": TOPK}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | newer))
    mtp = {"decoding_type": "MTP", "max_draft_len": 2}
    texts = []
    for drafts in (None, mtp):
        options: dict[str, Any] = {"speculative_config": drafts, "max_seq_len": TOPK}
        with LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
            output = llm.generate(TOKENS[:5], SamplingParams(max_tokens=11, ignore_eos=True))
            llm.check_integrity()
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_quantised_weights_of_the_indexer_are_left_out_with_their_scales(tmp_path: Path) -> None:

    def wants(name: str) -> bool:
        return is_projection(name) or name.endswith(("indexer.wq_b.weight", "indexer.wk.weight"))

    own = partial(save, hidden_size=128, q_lora_rank=128)
    change = partial(quantise, wants=wants, granularity="deepseek")
    models = [load(each, fp8_activations=False) for each in quantised_pair(tmp_path, own, change)]
    check_same_logits(*models, tokens=TOKENS[:TOPK])


def test_a_tensor_next_to_the_indexer_and_an_indexer_of_v3_are_surplus(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.index.weight": torch.ones(8)}, file)
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.index\.weight\."):
        load(tmp_path)
    save_deepseek(tmp_path, "DeepseekV3")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.indexer\."):
        load(tmp_path)


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_the_types_of_layers_that_transformers_writes_say_nothing(name: str) -> None:
    assert model_config_of(V3_2 | {"layer_types": [name] * 61}) == model_config_of(V3_2)


def test_the_published_config_is_read() -> None:
    config = model_config_of(V3_2)
    assert config.mla is not None and config.mla.index_topk == 2048 and config.mla.is_interleaved
    assert config.quantisation.fp8 is not None and config.num_nextn_layers == 1
    assert config.sparse_layers == frozenset(range(3, 61)) and config.max_positions == 163840
