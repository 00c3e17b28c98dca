"""Training of the zoo's EAGLE-3 head: unrolled chains equal entries computed one by one, and the
loss."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from tests.training.eagle3_entries import (
    DRAFT_IDS,
    FOLDER,
    SHAPE,
    EntryByEntryHead,
    learn,
    settings,
)
from tests.zoo.runs import SELF_TEXT, ZOO, call, read_json, write_shape
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.registry import model_config
from tllm_spec.training import draft_head as training
from tllm_spec.training.acceptance import chain_rounds, evaluate, summary
from tllm_spec.training.draft_head import DraftHead, target_states
from tllm_spec.training.head_files import (
    build_head,
    draft_vocabulary,
    load_head,
    read_shape,
    save_head,
)
from tllm_spec.training.language_model import ARGMAX_SHARE, TokenData, continuations
from tllm_spec.zoo import train
from tllm_spec.zoo.registry import resolve_model


def unrolled(
    head: DraftHead, target: LlamaForCausalLM, tokens: Tensor, unroll: int
) -> tuple[Tensor, Tensor]:
    batch = training.Batch.whole(tokens, unroll)
    return training.unrolled(head, target, batch, unroll)


@torch.no_grad()
def test_unrolled_training_equals_sequential_drafting_from_every_start(
    target: LlamaForCausalLM, head: DraftHead
) -> None:
    tokens, unroll = torch.randint(12, (2, 17)), 5
    features, _ = target_states(target, tokens, None)
    embeddings = target.get_input_embeddings()(tokens)
    states = training.step_states(head, target, features, tokens, unroll)
    steps = torch.stack([head.logits(hidden) for hidden, _ in states])
    assert steps.shape == (unroll, 2, 17 - unroll, 9)
    for row in range(2):
        reference = EntryByEntryHead(head, features[row], embeddings[row])
        for start in range(17 - unroll):
            along = [embeddings[row, start + step + 1] for step in range(unroll)]
            expected = torch.stack(
                reference.chain(start, unroll, lambda step, _, along=along: along[step])
            )
            torch.testing.assert_close(steps[:, row, start], expected, atol=1e-4, rtol=0)


def test_captured_states_are_the_outputs_of_a_low_a_middle_and_a_high_layer(
    target: LlamaForCausalLM,
) -> None:
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_hook(
            lambda _, __, output, index=index: outputs.update(
                {index: output if isinstance(output, Tensor) else output[0]}
            )
        )
    features, logits = target_states(target, torch.randint(12, (2, 5)), None)
    assert torch.equal(features, torch.cat([outputs[1], outputs[4], outputs[6]], -1))
    assert torch.equal(logits, target.lm_head(target.model.norm(outputs[9])))


def test_the_loss_is_kl_over_the_draft_vocabulary_and_nll_of_a_best_token_inside_it() -> None:
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(1, 6, 12) * 2, torch.randn(1, 6, 9)
    wanted, floor, best = training.labels(target_logits, DRAFT_IDS)
    losses = (floor - (wanted * draft_logits.log_softmax(-1)).sum(-1))[0]

    is_inside = []
    for position in range(6):
        p, log_q = target_logits[0, position].softmax(-1), draft_logits[0, position].log_softmax(-1)
        inside = p[DRAFT_IDS]
        kl = F.kl_div(log_q, inside / inside.sum(), reduction="sum")
        chosen = (p.argmax() == DRAFT_IDS).nonzero().flatten().tolist()
        is_inside.append(bool(chosen))
        nll = -log_q[chosen].sum()
        expected = (1 - ARGMAX_SHARE) * inside.sum() * kl + ARGMAX_SHARE * nll
        torch.testing.assert_close(losses[position], expected, atol=1e-6, rtol=1e-5)
        assert best[0, position] == p.argmax()
    assert True in is_inside and False in is_inside


@torch.no_grad()
def test_each_step_is_compared_with_the_targets_logits_for_the_same_token(
    target: LlamaForCausalLM, head: DraftHead
) -> None:
    tokens, unroll = torch.randint(12, (2, 8 + 3)), 3
    losses, agreements = unrolled(head, target, tokens, unroll)
    features, target_logits = target_states(target, tokens, None)
    wanted, floor, best = training.labels(target_logits, DRAFT_IDS)
    expected_losses, expected_agreements = torch.zeros(unroll), torch.zeros(unroll)
    states = training.step_states(head, target, features, tokens, unroll)
    for step, logits in enumerate(head.logits(hidden) for hidden, _ in states):
        for start in range(8):
            at = start + step + 1  # the target's logits that predict token start + step + 2, too
            log_probs = logits[:, start].log_softmax(-1)
            expected_losses[step] += (floor[:, at] - (wanted[:, at] * log_probs).sum(-1)).sum() / 16
            expected_agreements[step] += (DRAFT_IDS[log_probs.argmax(-1)] == best[:, at]).sum() / 16
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(agreements, expected_agreements)


@torch.no_grad()
def test_logits_are_of_tokens_that_count(target: LlamaForCausalLM, head: DraftHead) -> None:
    tokens, unroll = torch.randint(12, (3, 8 + 3)), 3
    counts = torch.rand(3, 11) < 0.4
    own_tokens, share = tokens[1:], slice(1, None)
    batch = training.Batch(own_tokens, counts, share)
    found = training.unrolled(head, target, batch, unroll)
    every = list(training.steps_along(head, target, own_tokens, unroll))
    some = training.steps_along(head, target, own_tokens, unroll, counts=counts[share])
    for step, (whole, part) in enumerate(zip(every, some, strict=True)):
        own = counts[1:, whole.rows].flatten()
        torch.testing.assert_close(part.losses, whole.losses[own])
        assert torch.equal(part.is_best, whole.is_best[own])
        number = counts[:, whole.rows].sum()
        torch.testing.assert_close(found[0][step], whole.losses[own].sum() / number)
        torch.testing.assert_close(found[1][step], whole.is_best[own].sum() / number)


def test_later_steps_have_less_weight() -> None:
    torch.testing.assert_close(
        training.weighted(torch.tensor([1.0, 0.0, 0.0])), torch.tensor(1 / 2.71)
    )


def test_a_late_step_trains_all_weights_through_the_heads_own_outputs(
    target: LlamaForCausalLM, head: DraftHead
) -> None:
    """The slope along the gradient equals its norm only if no path to the weights is detached."""
    tokens, weight = torch.randint(12, (2, 20)), head.fc.weight
    torch.autograd.backward(unrolled(head, target, tokens, 3)[0][2])
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert weight.grad is not None
    norm, eps = weight.grad.norm(), 1e-3
    with torch.no_grad():
        weight += eps * weight.grad / norm
        above = unrolled(head, target, tokens, 3)[0][2]
        weight -= 2 * eps * weight.grad / norm
        below = unrolled(head, target, tokens, 3)[0][2]
    torch.testing.assert_close((above - below) / (2 * eps), norm, rtol=0.03, atol=0)


def test_the_draft_vocabulary_weighs_both_texts_equally_whatever_their_sizes() -> None:
    large = TokenData(torch.tensor([2] * 50 + [5] * 30 + [7] * 20, dtype=torch.int16), 0)
    small = TokenData(torch.tensor([9, 9, 9, 7], dtype=torch.int16), 0)
    shape = replace(SHAPE, draft_vocab_size=3)
    assert draft_vocabulary([large, small], shape)[0].tolist() == [2, 7, 9]


def test_sequences_too_short_for_a_chain_are_refused(
    target: LlamaForCausalLM, head: DraftHead
) -> None:
    with pytest.raises(ValueError, match="--length is 12; with --unroll 5 it must be 13 or more"):
        unrolled(head, target, torch.randint(12, (1, 12)), 5)


def test_a_fresh_head_starts_from_the_targets_output_layer(target: LlamaForCausalLM) -> None:
    run = settings(dropout=0.5)
    head = build_head(SHAPE, target, DRAFT_IDS, run)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    torch.testing.assert_close(head.norm.weight, target.model.norm.weight)
    hidden = torch.randn(1, 40, 16)
    inputs = hidden, hidden, torch.arange(40)
    assert not torch.equal(head(*inputs)[0], head(*inputs)[0])  # dropout
    head.eval()
    assert torch.equal(head(*inputs)[0], head(*inputs)[0])


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_layers=2, mask_token=5)])
def test_a_few_steps_reduce_the_loss(target: LlamaForCausalLM, shape: Eagle3Config) -> None:
    _, losses = learn(target, 40, shape)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


# Acceptance of the zoo's EAGLE-3 head equals a loop that drafts and verifies, and the training
# command.


STEPS = 80


@pytest.mark.slow
def test_measured_acceptance_equals_that_of_a_loop_that_drafts_and_verifies(
    target: LlamaForCausalLM,
) -> None:
    for matrix in (
        parameter for parameter in target.model.layers.parameters() if parameter.dim() > 1
    ):
        matrix.mul_(0.5)  # a target that a head can sometimes predict after 60 steps
    head, _ = learn(target, 60)
    heldout = TokenData(torch.randint(12, (301,), dtype=torch.int16), 0)
    figures = evaluate(target, head, heldout, prompts=4, new_tokens=40, draft_len=3)

    prompts = torch.stack([heldout.tokens[start : start + 256] for start in (0, 15, 30, 45)]).long()
    accepted = []
    for text in continuations(target, prompts, 40, do_sample=False):
        features, embeddings = (
            target_states(target, text[None], None)[0][0],
            target.get_input_embeddings()(text),
        )
        reference = EntryByEntryHead(head, features, embeddings)
        committed = 257  # the prompt and the first token
        while committed + 3 < len(text):
            drafts = draft_chain(reference, target, committed - 2, 3)
            same = [
                draft == token
                for draft, token in zip(drafts, text[committed:].tolist(), strict=False)
            ]
            accepted.append([*same, False].index(False))
            committed += accepted[-1] + 1
    assert len(set(accepted)) > 1
    assert figures == summary(accepted, 3)


def draft_chain(
    reference: EntryByEntryHead, target: LlamaForCausalLM, start: int, draft_len: int
) -> list[int]:
    """The head's best tokens; each step reads the previous one."""

    def token(logits: Tensor) -> Tensor:
        return DRAFT_IDS[logits.argmax()]

    embedding = target.get_input_embeddings()
    chain = reference.chain(start, draft_len, lambda _, logits: embedding(token(logits)))
    return [int(token(logits)) for logits in chain]


def test_a_round_advances_by_one_more_than_it_accepted() -> None:
    #                    prompt's ^ 2 + 1      ^ 0 + 1  ^ 4 + 1 would need token 9
    assert chain_rounds([9, 2, 9, 9, 0, 4, 9, 9, 9], draft_len=3) == [2, 0, 4]
    assert chain_rounds([9, 2, 9, 9, 0, 4, 9, 9], draft_len=3) == [2, 0]


@pytest.fixture(scope="module")
def tiny_run(counting_run: Path) -> Path:
    """The folder of a target that counts, with a head for it that a command of the zoo trained."""
    root = counting_run
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "intermediate_size": 32}
    write_shape(
        root / "head-shape", ZOO / "llama-eagle3", **sizes, vocab_size=64, draft_vocab_size=16
    )
    run = f"--steps {STEPS} --windows 4 --length 64 --warmup-steps 10 --dropout 0 --unroll 3"
    paths = ["--data", root, "--shape", root / "head-shape", "--target", root / "target"]
    call(train.eagle3, "--output", root / "head", *paths, SELF_TEXT, run, "--learning-rate", 5e-3)
    return root


@pytest.mark.slow
def test_the_training_command_trains_a_head_whose_drafts_are_accepted(tiny_run: Path) -> None:
    metrics = read_json(tiny_run / "head" / "metrics.json")
    assert metrics["step"] == STEPS
    assert min(metrics[f"agreement_{draft}"] for draft in (1, 2, 3)) > 0.7  # 1/12 is chance
    folders = ["--target", tiny_run / "target", "--draft", tiny_run / "head", "--output", tiny_run]
    call(train.evaluate, "--data", tiny_run, *folders, "--prompts", 2, "--new-tokens", 16)
    assert read_json(tiny_run / "acceptance.json")["acceptance_length"] > 3


# Files of the zoo's EAGLE-3 head: the published format, and what cannot be trained is refused.


TARGET = model_config(resolve_model("zoo:llama"))


def test_the_checkpoint_has_the_published_format_and_loads_again(tmp_path: Path) -> None:
    """Names and shapes of published EAGLE-3 heads, in the size of the zoo's head."""
    shape = read_shape(FOLDER, TARGET)
    ids = torch.randperm(2048)[:1024].sort().values
    head = DraftHead(shape, ids)
    save_head(head, (FOLDER / "config.json").read_text(), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()
    assert (tmp_path / "model.safetensors").stat().st_size < 3_000_000

    tensors = load_file(tmp_path / "model.safetensors")
    sizes = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {
        "fc": (192, 576),
        "norm": (192,),
        "lm_head": (1024, 192),
        "d2t": (1024,),
        "t2d": (2048,),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        expected[f"midlayer.{name}"] = (192,)
    for name, size in {"q": (192, 384), "k": (64, 384), "v": (64, 384), "o": (192, 192)}.items():
        expected[f"midlayer.self_attn.{name}_proj"] = size
    for name, size in {"gate": (768, 192), "up": (768, 192), "down": (192, 768)}.items():
        expected[f"midlayer.mlp.{name}_proj"] = size
    assert sizes == expected
    assert all(name.endswith(".weight") for name in tensors.keys() - {"d2t", "t2d"})
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert torch.equal(torch.arange(1024) + d2t, ids) and torch.equal(t2d.nonzero().flatten(), ids)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}

    loaded = load_head(tmp_path, TARGET)
    assert torch.equal(loaded.draft_ids, ids)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name).bfloat16().float()), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"hidden_size": 64}, "hidden_size"),
    ],
)
def test_a_head_that_the_zoo_cannot_train_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = {
        key: value
        for key, value in (read_json(FOLDER / "config.json") | change).items()
        if value is not None
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        read_shape(tmp_path, TARGET)
