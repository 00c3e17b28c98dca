"""Training of the zoo's EAGLE-3 head: unrolled chains equal entries computed one by one, and the
loss."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from tests.training.eagle3_entries import DRAFT_IDS, SHAPE, EntryByEntryHead, learn, settings
from tllm_spec.training import head_loss as training
from tllm_spec.training.eagle3 import Eagle3Head, FeatureHead, target_states
from tllm_spec.training.head_files import build_head, draft_vocabulary
from tllm_spec.training.language_model import ARGMAX_SHARE, TokenData


def unrolled(
    head: FeatureHead, target: LlamaForCausalLM, tokens: Tensor, unroll: int
) -> tuple[Tensor, Tensor]:
    batch = training.Batch.whole(tokens, unroll)
    return training.unrolled(head, target, batch, unroll)


@torch.no_grad()
def test_unrolled_training_equals_sequential_drafting_from_every_start(
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    tokens, unroll = torch.randint(12, (2, 17)), 5
    features, _ = target_states(target, tokens, None)
    embeddings = target.get_input_embeddings()(tokens)
    states = training.chain_states(head, features, embeddings, unroll)
    steps = torch.stack(list(map(head.logits, states)))
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
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    tokens, unroll = torch.randint(12, (2, 8 + 3)), 3
    losses, agreements = unrolled(head, target, tokens, unroll)
    features, target_logits = target_states(target, tokens, None)
    wanted, floor, best = training.labels(target_logits, DRAFT_IDS)
    expected_losses, expected_agreements = torch.zeros(unroll), torch.zeros(unroll)
    states = training.chain_states(head, features, target.get_input_embeddings()(tokens), unroll)
    for step, logits in enumerate(map(head.logits, states)):
        for start in range(8):
            at = start + step + 1  # the target's logits that predict token start + step + 2, too
            log_probs = logits[:, start].log_softmax(-1)
            expected_losses[step] += (floor[:, at] - (wanted[:, at] * log_probs).sum(-1)).sum() / 16
            expected_agreements[step] += (DRAFT_IDS[log_probs.argmax(-1)] == best[:, at]).sum() / 16
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(agreements, expected_agreements)


@torch.no_grad()
def test_logits_are_of_tokens_that_count(target: LlamaForCausalLM, head: Eagle3Head) -> None:
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
    target: LlamaForCausalLM, head: Eagle3Head
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
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    with pytest.raises(ValueError, match="--length is 12; with --unroll 5 it must be 13 or more"):
        unrolled(head, target, torch.randint(12, (1, 12)), 5)


def test_a_fresh_head_starts_from_the_targets_output_layer(target: LlamaForCausalLM) -> None:
    run = settings(dropout=0.5)
    head = build_head(SHAPE, target, DRAFT_IDS, run)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    torch.testing.assert_close(head.norm.weight, target.model.norm.weight)
    inputs = torch.randn(1, 40, 16)
    assert not torch.equal(head(inputs, inputs)[0], head(inputs, inputs)[0])  # dropout
    head.eval()
    assert torch.equal(head(inputs, inputs)[0], head(inputs, inputs)[0])


def test_a_few_steps_reduce_the_loss(target: LlamaForCausalLM) -> None:
    _, losses = learn(target, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
