"""Checkpoints of every form fill the parameters exactly; what does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.helpers import CPU, PagedRunner, load, random_tokens, save_checkpoint
from tests.models.test_llama4 import save_llama4
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.checkpoint import INDEX, checkpoint_files
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.registry import model_config, model_type
from tllm_spec.models.weights import weight_table

TOKENS = random_tokens(12)
Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "single", "Llama")
    save_checkpoint(tmp_path / "sharded", "Llama", shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = (load(tmp_path / name).state_dict() for name in ("single", "sharded"))
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_qkv_and_gate_up_are_fused_in_this_order(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Qwen2")
    tensors, layer = load_file(tmp_path / "model.safetensors"), "model.layers.1."
    fused = load(tmp_path).state_dict()
    qkv = [tensors[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
    bias = [tensors[f"{layer}self_attn.{part}_proj.bias"] for part in "qkv"]
    gate_up = [tensors[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(fused[f"{layer}self_attn.qkv_proj.weight"], torch.cat(qkv))
    assert torch.equal(fused[f"{layer}self_attn.qkv_proj.bias"], torch.cat(bias))
    assert torch.equal(fused[f"{layer}mlp.gate_up_proj.weight"], torch.cat(gate_up))


def test_weights_are_converted_to_the_asked_dtype(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    rewrite(tmp_path, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    model = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.state_dict()["model.norm.weight"], stored.float())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_missing_and_surplus_tensors_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(other=tensors.pop("model.layers.0.mlp.up_proj.weight")),
    )
    with pytest.raises(
        ValueError, match=r"missing model\.layers\.0\.mlp\.up_proj\.weight; surplus other\."
    ):
        load(tmp_path)
    save_checkpoint(tmp_path, "Llama")
    rewrite(tmp_path, lambda tensors: tensors.update(other=torch.ones(1)))
    with pytest.raises(ValueError, match=r"missing none; surplus other\."):
        load(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has the shape \[65\].*\[64\]"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_of_a_type_that_its_layer_does_not_read_is_named(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "Llama")
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} is {str(dtype)[6:]}, .*it reads bfloat16"):
        load(tmp_path)


def test_derived_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    before = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for copy in (stored.clone(), stored.double()):
        derived = {
            "lm_head.weight": copy,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        }
        rewrite(tmp_path, lambda tensors, derived=derived: tensors.update(derived))
        model = load(tmp_path)
        assert model.config.tie_word_embeddings
        assert torch.equal(PagedRunner(model).step({0: TOKENS})[0], before)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2Moe", "DeepseekV3"])
def test_an_output_layer_that_differs_from_the_embedding_is_used_although_the_config_ties_them(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if architecture == "DeepseekV3":
        save_deepseek(tmp_path, architecture)
    else:
        save_checkpoint(tmp_path, architecture)
    expected = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert torch.equal(PagedRunner(load(tmp_path)).step({0: TOKENS})[0], expected)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text


def test_a_tied_weight_may_be_stored_as_the_output_layer_only(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    before = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]

    def rename(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path, rename)
    assert torch.equal(PagedRunner(load(tmp_path)).step({0: TOKENS})[0], before)


def test_the_index_decides_which_shard_has_a_tensor(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", shard_size="60KB")
    before = load(tmp_path).state_dict()
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    for shard in set(weight_map.values()) - {weight_map[name]}:
        stale = load_file(tmp_path / shard) | {name: torch.full((64,), 9.0)}
        save_file(stale, tmp_path / shard)
    after = load(tmp_path).state_dict()
    assert all(torch.equal(before[each], after[each]) for each in before)


@pytest.mark.parametrize(
    "shard", ["../w.safetensors", "/tmp/w.safetensors", "a/../../w", "", ".", 5, None, ["a"], "a\0"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(shard: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match=r"weight_map has .* for 'a'; it must be a file in the fo"):
        checkpoint_files(tmp_path)


def test_shards_may_be_links_out_of_the_folder_and_in_a_folder_below(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "blobs", "Llama", shard_size="60KB")
    before = load(tmp_path / "blobs").state_dict()
    (tmp_path / "model" / "shards").mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "model" / name).write_text((tmp_path / "blobs" / name).read_text())
    weight_map = json.loads((tmp_path / "blobs" / INDEX).read_text())["weight_map"]
    for shard in set(weight_map.values()):
        (tmp_path / "model" / "shards" / shard).symlink_to(tmp_path / "blobs" / shard)
    moved = {name: f"./shards/{shard}" for name, shard in weight_map.items()}
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": moved}))
    after = load(tmp_path / "model").state_dict()
    assert all(torch.equal(before[each], after[each]) for each in before)


def test_an_untied_model_without_an_output_weight_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    refused = r"missing lm_head\.weight; surplus none\. .*tie_word_embeddings .*: set it to true if"
    with pytest.raises(ValueError, match=refused):
        load(tmp_path)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", shard_size="60KB")
    index = tmp_path / INDEX
    shard = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    (tmp_path / shard).write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=f"{shard} is not a readable safetensors"):
        load(tmp_path)
    (tmp_path / shard).unlink()
    with pytest.raises(ValueError, match=f"not there: {shard}"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_dummy_weights_need_only_the_config_and_are_the_same_each_time(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Qwen3")
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    logits = [PagedRunner(model).step({0: TOKENS})[0] for model in (first, second)]
    assert torch.equal(*logits)
    assert 0.1 < logits[0].std() < 10
    assert first.state_dict()["model.layers.0.input_layernorm.weight"].eq(1).all()
    assert first.state_dict()["model.layers.0.self_attn.qk_norm.weight"].eq(1).all()
    weights = first.state_dict()
    assert not torch.equal(
        weights["model.layers.0.mlp.down_proj.weight"],
        weights["model.layers.1.mlp.down_proj.weight"],
    )


def test_the_shards_of_a_layer_sum_to_the_whole_layer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", attention_bias=True, mlp_bias=True)
    whole = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def layer(rank: int, tp_size: int) -> DecoderLayer:
        placement = Placement(torch.float32, CPU, Mapping(rank, tp_size, tp_size))
        model = CausalLM(whole.config, 64, placement)
        for name, slot in weight_table(model).items():
            assert tuple(tensors[name].shape) == slot.shape
            slot.load(tensors[name])
        return model.model.layers[0]

    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    full, halves = layer(0, 1), [layer(0, 2), layer(1, 2)]

    def added_by_mlp(layer: DecoderLayer) -> torch.Tensor:
        total = hidden.clone()
        layer.mlp.add_to(total, layer.post_attention_layernorm)
        return total - hidden

    torch.testing.assert_close(sum(added_by_mlp(half) for half in halves), added_by_mlp(full))
    heads = [half.self_attn.qkv_proj.forward(hidden).view(3, -1, 16) for half in halves]
    q, k, v = full.self_attn.qkv_proj.forward(hidden).view(3, -1, 16).split((4, 2, 2), 1)
    torch.testing.assert_close(heads[1], torch.cat((q[:, 2:], k[:, 1:], v[:, 1:]), 1))
    outputs = sum(
        half.self_attn.o_proj.forward(head[:, :2].flatten(1))
        for half, head in zip(halves, heads, strict=True)
    )
    torch.testing.assert_close(outputs, full.self_attn.o_proj.forward(q.flatten(1)))


def test_tensor_parallel_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama", vocab_size=120)
    config = load(tmp_path).config
    with pytest.raises(
        ValueError, match="vocab_size is 120, which tensor_parallel_size 7 does not divide"
    ):
        CausalLM(config, 64, Placement(torch.float32, CPU, Mapping(0, 7, 7)))
    with pytest.raises(
        ValueError, match="num_attention_heads is 4, which tensor_parallel_size 3 does not divide"
    ):
        CausalLM(config, 64, Placement(torch.float32, CPU, Mapping(0, 3, 3)))


@pytest.mark.parametrize(
    ("family", "mapping", "problem"),
    [
        (
            "deepseek",
            Mapping(0, 3, 3),
            "num_attention_heads is 4, which tensor_parallel_size 3 does not divide",
        ),
        (
            "deepseek",
            Mapping(0, 8, 8),
            "num_attention_heads is 4, which tensor_parallel_size 8 does not divide",
        ),
        (
            "llama4",
            Mapping(0, 3, 3),
            "num_attention_heads is 4, which tensor_parallel_size 3 does not divide",
        ),
        (
            "odd experts",
            Mapping(0, 2, 2),
            "moe_intermediate_size is 23, which moe_tensor_parallel_size 2 does not divide",
        ),
        (
            "seven experts",
            Mapping(0, 2, 2, 2),
            "num_experts is 7, which moe_expert_parallel_size 2 does not divide",
        ),
    ],
)
def test_latent_attention_and_experts_that_do_not_divide_are_refused_with_both_numbers(
    family: str, mapping: Mapping, problem: str, tmp_path: Path
) -> None:
    if family == "llama4":
        save_llama4(tmp_path, vocab_size=120)
    elif family == "deepseek":
        save_deepseek(tmp_path, "DeepseekV3", vocab_size=120)
    else:
        odd = {"n_routed_experts": 7, "n_group": 1, "topk_group": 1}
        size = {"moe_intermediate_size": 23, "n_shared_experts": 2}
        save_deepseek(tmp_path, "DeepseekV3", **(odd if "seven" in family else size))
    config = model_config(tmp_path)
    placement = Placement(torch.float32, CPU, mapping)
    with pytest.raises(ValueError, match=problem):
        model_type(config)(config, 32, placement)


def test_ranks_with_more_heads_than_there_are_share_keys_and_values(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    config = load(tmp_path).config
    tensors = load_file(tmp_path / "model.safetensors")
    keys = []
    for rank in range(4):
        model = CausalLM(config, 64, Placement(torch.float32, CPU, Mapping(rank, 4, 4)))
        for name, slot in weight_table(model).items():
            slot.load(tensors[name])
        keys.append(model.model.layers[0].self_attn.qkv_proj.weight[16:32])
    whole = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(torch.cat((keys[0], keys[2])), whole)
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[3])
