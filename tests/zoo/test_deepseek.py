"""Training of the zoo's DeepSeek V3 with MTP modules, on a tiny shape: losses fall, experts share
the load, and the checkpoint is that of the engine and of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.helpers import PagedRunner, load, reference_logits
from tests.models.mtp_reference import PlainMTP, modules_of
from tests.models.test_mtp import ModuleRunner
from tests.training.eagle3_entries import settings
from tests.zoo.runs import SELF_TEXT, call, counting, read_json, read_weights, write_shape
from tllm_spec.models.deepseek import DeepseekForCausalLM
from tllm_spec.training.acceptance import head_matches
from tllm_spec.training.deepseek import (
    SHAPE,
    NextnModules,
    balance,
    build_modules,
    build_target,
    deepseek_config,
    load_target,
    mixtures,
    modules_figures,
    published,
)
from tllm_spec.training.language_model import TokenData, mixed
from tllm_spec.zoo import train

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}
CPU = torch.device("cpu")
RUN = settings()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that was trained to count to 50 with the command of the zoo."""
    root = tmp_path_factory.mktemp("deepseek")
    counting(root, 50)
    shape = root / "shape"
    write_shape(shape, SHAPE, **TINY)
    sizes = "--steps 60 --windows 4 --length 64 --warmup-steps 1 --dropout 0"
    mtp = "--mtp-steps 40 --mtp-windows 4 --unroll 2 --learning-rate 1e-2"
    paths = ["--data", root, "--output", root / "model", "--shape", shape]
    call(train.deepseek, *paths, sizes, SELF_TEXT, mtp)
    return root


@pytest.fixture(scope="module")
def modules(runs: Path) -> NextnModules:
    return NextnModules.from_pretrained(runs / "model", load_target(runs / "model", CPU))


def test_both_trainings_reach_the_expected_figures(runs: Path) -> None:
    assert read_json(runs / "model" / "target" / "metrics.json")["loss"] < math.log(50) / 3
    figures = read_json(runs / "model" / "metrics.json")
    assert figures["agreement_2"] > 0.9 and figures["vanilla_2"] > 0.9


def test_the_checkpoint_has_published_names_and_types(runs: Path) -> None:
    tensors = read_weights(runs / "model")
    for number in (1, 2):
        bias = tensors[f"model.layers.{number}.mlp.gate.e_score_correction_bias"]
        assert bias.dtype == torch.float32 and bias.any()
    for number in (1, 2, 3):
        assert tensors[f"model.layers.{number}.mlp.experts.7.up_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.3.eh_proj.weight"].shape == (32, 64)
    assert {x.dtype for name, x in tensors.items() if "bias" not in name} == {torch.bfloat16}
    assert (runs / "model" / "tokenizer.json").is_file()


def test_engine_training_and_transformers_have_the_same_logits(
    runs: Path, modules: NextnModules
) -> None:
    tokens = [7, 8, 9, 30, 31, 2, 60, 61, 5, 6, 7, 8]
    folder = runs / "model"
    official = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference_logits(official, tokens)
    ours = modules.target(torch.tensor([tokens]), use_cache=False).logits[0]
    engine = load(folder)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        PagedRunner(engine).step({0: tokens})[0], expected, rtol=0, atol=1e-4
    )


def test_the_engines_module_equals_the_trained_one(runs: Path, modules: NextnModules) -> None:
    tokens = torch.tensor([[7, 8, 9, 30, 31, 2, 60, 61, 5, 6, 7, 8]])
    hidden = modules.target_states(modules.target, tokens)[0][:, :-1]
    embeddings = modules.target.get_input_embeddings()(tokens)[:, 1:]
    states, _ = modules(hidden, embeddings, torch.arange(len(hidden[0])))
    engine = load(runs / "model")
    assert isinstance(engine, DeepseekForCausalLM)
    runner = ModuleRunner(modules_of(runs / "model", engine))
    found = runner.predict(tokens[0, 1:].tolist(), hidden[0])
    torch.testing.assert_close(found, states[0], rtol=0, atol=1e-4)


def plain(modules: NextnModules, folder: Path, index: int) -> PlainMTP:
    prefix = f"model.layers.{modules.config.num_hidden_layers + index}."
    stored = {name: tensor.float() for name, tensor in published(modules.checkpoint())}
    own = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
    return PlainMTP(modules.target, own, folder)


@torch.inference_mode()
@pytest.mark.parametrize("is_vanilla", [False, True])
def test_parallel_chains_equal_chains_that_are_drafted_one_by_one(
    is_vanilla: bool, runs: Path, modules: NextnModules
) -> None:
    """At most as many steps as modules, so that both ways have the same length."""
    torch.manual_seed(3)
    text, draft_len = torch.randint(64, (1, 24)), 2
    text[0, 12:] = torch.arange(12)
    steps = [plain(modules, runs / "model", step if is_vanilla else 0) for step in range(draft_len)]
    own = modules.vanilla() if is_vanilla else modules
    counts = head_matches(own, modules.target, text, draft_len)[0].tolist()
    tokens, best = text[0].tolist(), modules.target(text, use_cache=False).logits[0].argmax(-1)
    for start in range(2, 24 - draft_len):
        hidden, read = steps[0].target_states(tokens[: start - 1]), tokens[1:start]
        accepted = 0
        for step, module in enumerate(steps):
            states = module.states(read, hidden)
            draft = int(module.logits(states[-1]).argmax())
            if draft != best[start + step - 1]:
                break
            accepted += 1
            read, hidden = [*read, tokens[start + step]], torch.cat((hidden, states[-1:]))
        assert counts[start] == accepted, start
    assert len(set(counts[2:22])) > 1


def test_acceptance_is_measured_for_both_ways(runs: Path) -> None:
    folders = ["--target", runs / "model", "--draft", runs / "model", "--output", runs]
    for flags in ([], ["--mtp-vanilla"]):
        sizes = ["--prompts", 2, "--new-tokens", 16, "--draft-len", 2]
        call(train.evaluate, "--data", runs, *folders, *sizes, *flags)
        assert read_json(runs / "acceptance.json")["acceptance_length"] > 2.5


def test_the_bias_lowers_experts_with_many_tokens_and_only_the_choice_reads_it(runs: Path) -> None:
    torch.manual_seed(0)
    model = build_target(runs / "shape", RUN, CPU)
    (block,) = mixtures(model)
    block.experts.load.copy_(torch.tensor([9.0, 0, 1, 1, 1, 1, 1, 2]))  # the mean is 2
    balance(model)
    assert block.gate.e_score_correction_bias.sign().tolist() == [-1, 1, 1, 1, 1, 1, 1, 0]
    assert not block.experts.load.any()
    x = torch.randn(1, 5, 32)
    weights = block.gate(x)[1]
    block.gate.e_score_correction_bias.fill_(1)
    assert torch.equal(block.gate(x)[1], weights)


def test_dense_experts_equal_those_of_transformers_with_their_gradients(runs: Path) -> None:
    torch.manual_seed(0)
    config: Any = deepseek_config(runs / "shape")
    official = AutoModelForCausalLM.from_config(config).train()
    ours = build_target(runs / "shape", RUN, CPU)
    ours.load_state_dict(official.state_dict())
    tokens = torch.randint(64, (2, 9))
    gradients: list[dict[str, Tensor]] = []
    for model in (official, ours):
        logits = model(tokens, use_cache=False).logits
        torch.autograd.backward(logits.square().mean() * 100)
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_every_module_is_trained_and_the_target_is_not(runs: Path) -> None:
    torch.manual_seed(0)
    target = load_target(runs / "model", CPU)
    modules = build_modules(target, RUN)
    data = TokenData((torch.arange(4096) % 50).short(), 0)
    forwards = []
    target.model.register_forward_hook(lambda *_: forwards.append(1))
    torch.autograd.backward(modules_figures(modules, 2, mixed(data, data, 2, 32))["loss"])
    assert len(forwards) == 1  # for both ways to draft
    assert all(x.grad is not None and x.grad.any() for x in modules.parameters())
    assert all(x.grad is None for x in target.parameters())


def test_the_published_shape_stays_below_ten_megabytes() -> None:
    config = deepseek_config(SHAPE)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        total = sum(x.numel() for x in target.parameters())
        target.config.num_nextn_predict_layers = 2
        total += sum(x.numel() for x in NextnModules(target).parameters())
    assert 2 * total < 10_000_000
