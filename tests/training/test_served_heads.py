"""Heads of every variant that is trained: the trained module's logits are those of the head that is
served from its export, after a prompt and in the recurrent steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.eagle3_runner import HeadRunner, captured_states, load_head
from tests.models.helpers import load, random_tokens
from tllm_spec.models.eagle3 import Eagle3Head as ServedHead
from tllm_spec.models.llama import CausalLM
from tllm_spec.training.draft_head import DraftHead, step_states
from tllm_spec.training.head_files import NORMS, Format, config_json, new_shape, save_head
from tllm_spec.training.head_files import load_head as load_trained

VOCAB_SIZE, UNROLL = 64, 4
TOKENS = [token % VOCAB_SIZE for token in random_tokens(20)]
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain": (1, ()),
    "three layers": (3, ()),
    **{norm: (1, (norm,)) for norm in NORMS},
    "two layers and all norms": (2, NORMS),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load(write_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=7))


def exported(
    target: CausalLM, num_layers: int, norms: tuple[str, ...], form: Format, folder: Path
) -> Path:
    torch.manual_seed(3)
    shape = new_shape(target.config, 48, num_layers, None, norms)
    shape = replace(shape, capture_layers=(0, 2, 5))
    head = DraftHead(shape, torch.randperm(VOCAB_SIZE)[:48].sort().values)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    save_head(head, config_json(shape, target.config, form), folder)
    return folder


def served_chain(head: ServedHead, fused: Tensor, start: int) -> Iterator[Tensor]:
    """The logits of the steps after the entries up to `start`."""
    runner = HeadRunner(head)
    logits, states = runner.draft({0: (TOKENS[1 : start + 2], fused[: start + 1])})[0]
    for step in range(1, UNROLL):
        yield logits[-1]
        logits, states = runner.draft(windows={0: ([TOKENS[start + step + 1]], states[-1:])})[0]
    yield logits[-1]


@pytest.mark.covering
@pytest.mark.parametrize("form", ["eagle", "speculators"])
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_trained_head_has_the_logits_of_the_served_one(
    name: str, form: Format, target: CausalLM, tmp_path: Path
) -> None:
    folder = exported(target, *VARIANTS[name], form, tmp_path)
    trained, served = load_trained(folder, target.config).eval(), load_head(folder, target)
    assert trained.config.capture_layers == served.config.capture_layers == (0, 2, 5)
    captured = captured_states(target, TOKENS, (0, 2, 5))
    embed = served.embedding.forward
    embedder = SimpleNamespace(get_input_embeddings=lambda: lambda ids: embed(ids[0])[None])
    states = step_states(trained, embedder, captured[None], torch.tensor([TOKENS]), UNROLL)
    steps = [trained.logits(hidden) for hidden, _ in states]
    fused = served.fuse(captured)
    for start in (0, 9, len(TOKENS) - UNROLL - 1):
        for step, logits in enumerate(served_chain(served, fused, start)):
            assert logits.std() > 0.3, "values this flat would hide a difference"
            torch.testing.assert_close(steps[step][0, start], logits, rtol=1e-5, atol=1e-5)
