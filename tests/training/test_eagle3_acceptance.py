"""Acceptance of the zoo's EAGLE-3 head equals a loop that drafts and verifies, and the training
command."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.training.eagle3_entries import DRAFT_IDS, EntryByEntryHead, learn
from tests.zoo.runs import SELF_TEXT, ZOO, call, read_json, write_shape
from tllm_spec.training.acceptance import chain_rounds, evaluate, summary
from tllm_spec.training.eagle3 import target_states
from tllm_spec.training.language_model import TokenData, continuations
from tllm_spec.zoo import train

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


def test_the_training_command_trains_a_head_whose_drafts_are_accepted(tiny_run: Path) -> None:
    metrics = read_json(tiny_run / "head" / "metrics.json")
    assert metrics["step"] == STEPS
    assert min(metrics[f"agreement_{draft}"] for draft in (1, 2, 3)) > 0.7  # 1/12 is chance
    folders = ["--target", tiny_run / "target", "--draft", tiny_run / "head", "--output", tiny_run]
    call(train.evaluate, "--data", tiny_run, *folders, "--prompts", 2, "--new-tokens", 16)
    assert read_json(tiny_run / "acceptance.json")["acceptance_length"] > 3
