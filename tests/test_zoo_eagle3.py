"""The EAGLE-3 head of the zoo in training: its chains against entries computed one by one, its
loss, its files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tllm_spec.zoo import eagle3_training as training
from tllm_spec.zoo import train
from tllm_spec.zoo.distill import ARGMAX_SHARE
from tllm_spec.zoo.eagle3 import Eagle3Head, Eagle3Shape, save_head, target_states
from tllm_spec.zoo.evaluate import chain_rounds, evaluate, summary
from tllm_spec.zoo.registry import resolve_model
from tllm_spec.zoo.self_text import continuations
from tllm_spec.zoo.token_data import TokenData
from tllm_spec.zoo.trainer import Settings

SIZES = {
    "vocab_size": 12,
    "draft_vocab_size": 9,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = Eagle3Shape(
    **SIZES, **HEADS, max_position_embeddings=512, rope_theta=1e4, rms_norm_eps=1e-5
)
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 6, 7, 8, 10, 11])
FOLDER = resolve_model("zoo:llama-eagle3")
STEPS = 80


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Ten layers, so that the three captured ones (1, 4, 6) are not evenly spaced."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 10}
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    return lively(LlamaForCausalLM(config)).requires_grad_(False).eval()


@pytest.fixture
def head() -> Eagle3Head:
    torch.manual_seed(2)
    return lively(Eagle3Head(SHAPE, DRAFT_IDS))


def lively(model: Any) -> Any:
    """Large random weights, the norms' too: else a model repeats one token and every chain looks
    alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


class SlowHead:
    """One text, one entry at a time, from the checkpoint's names and the conventions alone: no code
    of the head's."""

    def __init__(self, head: Eagle3Head, features: Tensor, embeddings: Tensor) -> None:
        """`features` `[T, 3H]`, `embeddings` `[T, H]`."""
        self.weights, self.shape = head.state_dict(), head.config
        rope = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_theta=10000.0)
        self.rotary = LlamaRotaryEmbedding(rope)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.outputs = [
            self.entry(self.linear("fc", feature), embedding, position, self.keys, self.values)
            for position, (feature, embedding) in enumerate(
                zip(features[:-1], embeddings[1:], strict=True)
            )
        ]

    def linear(self, name: str, vector: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ vector

    def norm(self, name: str, vector: Tensor) -> Tensor:
        return F.rms_norm(
            vector, vector.shape, self.weights[f"{name}.weight"], self.shape.rms_norm_eps
        )

    def entry(
        self,
        hidden: Tensor,
        embedding: Tensor,
        position: int,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Appends to `keys` and `values`; returns the sum before the final norm."""
        layer = "midlayer"
        both = torch.cat(
            [
                self.norm(f"{layer}.input_layernorm", embedding),
                self.norm(f"{layer}.hidden_norm", hidden),
            ]
        )
        query, key, value = (
            self.linear(f"{layer}.self_attn.{name}_proj", both).view(-1, 8) for name in "qkv"
        )
        cos, sin = self.rotary(hidden, torch.tensor([[position]]))
        query, key = (
            part[0, :, 0]
            for part in apply_rotary_pos_emb(query[None, :, None], key[None, :, None], cos, sin)
        )
        keys.append(key)
        values.append(value)
        heads = []
        for index, one in enumerate(query):
            scores = torch.stack([key[index // 2] @ one for key in keys]) / math.sqrt(8)
            heads.append(scores.softmax(0) @ torch.stack([value[index // 2] for value in values]))
        hidden = hidden + self.linear(f"{layer}.self_attn.o_proj", torch.cat(heads))
        normed = self.norm(f"{layer}.post_attention_layernorm", hidden)
        gate, up = (self.linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
        return hidden + self.linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)

    def logits(self, output: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", output))

    def chain(
        self, start: int, num_steps: int, next_embedding: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Logits of the steps: a prefill up to `start`, then entries made from the head's own
        outputs.

        `next_embedding(step, logits)` is what step `step` reads, given what the step before said.
        """
        keys, values = self.keys[: start + 1], self.values[: start + 1]
        output, said = self.outputs[start], [self.logits(self.outputs[start])]
        for step in range(1, num_steps):
            output = self.entry(output, next_embedding(step, said[-1]), start + step, keys, values)
            said.append(self.logits(output))
        return said


@torch.no_grad()
def test_unrolled_training_is_sequential_drafting_from_every_start(
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    tokens, unroll = torch.randint(12, (2, 17)), 5
    features, _ = target_states(target, tokens)
    embeddings = target.get_input_embeddings()(tokens)
    steps = torch.stack(list(training.chain_logits(head, features, embeddings, unroll)))
    assert steps.shape == (unroll, 2, 17 - unroll, 9)
    for row in range(2):
        slow = SlowHead(head, features[row], embeddings[row])
        for start in range(17 - unroll):
            along = [embeddings[row, start + step + 1] for step in range(unroll)]
            expected = torch.stack(
                slow.chain(start, unroll, lambda step, _, along=along: along[step])
            )
            torch.testing.assert_close(steps[:, row, start], expected, atol=1e-4, rtol=0)


def test_the_captured_states_are_outputs_of_a_low_a_middle_and_a_high_layer(
    target: LlamaForCausalLM,
) -> None:
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_hook(
            lambda _, __, output, index=index: outputs.update(
                {index: output if isinstance(output, Tensor) else output[0]}
            )
        )
    features, logits = target_states(target, torch.randint(12, (2, 5)))
    assert torch.equal(features, torch.cat([outputs[1], outputs[4], outputs[6]], -1))
    assert torch.equal(logits, target.lm_head(target.model.norm(outputs[9])))


def test_the_loss_is_the_kl_over_the_draft_vocabulary_by_its_mass_and_a_best_token_that_can_be_said() -> (
    None
):
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(1, 6, 12) * 2, torch.randn(1, 6, 9)
    wanted, floor, best = training.labels(target_logits, DRAFT_IDS)
    losses = (floor - (wanted * draft_logits.log_softmax(-1)).sum(-1))[0]

    can_say = []
    for position in range(6):
        p, log_q = target_logits[0, position].softmax(-1), draft_logits[0, position].log_softmax(-1)
        inside = p[DRAFT_IDS]
        kl = F.kl_div(log_q, inside / inside.sum(), reduction="sum")
        chosen = (p.argmax() == DRAFT_IDS).nonzero().flatten().tolist()
        can_say.append(bool(chosen))
        nll = -log_q[chosen].sum()
        expected = (1 - ARGMAX_SHARE) * inside.sum() * kl + ARGMAX_SHARE * nll
        torch.testing.assert_close(losses[position], expected, atol=1e-6, rtol=1e-5)
        assert best[0, position] == p.argmax()
    assert True in can_say and False in can_say


@torch.no_grad()
def test_each_step_is_compared_with_what_the_target_says_of_the_same_token(
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    tokens, unroll = torch.randint(12, (2, 8 + 3)), 3
    losses, agreements = training.unrolled(head, target, tokens, unroll)
    features, target_logits = target_states(target, tokens)
    wanted, floor, best = training.labels(target_logits, DRAFT_IDS)
    expected_losses, expected_agreements = torch.zeros(unroll), torch.zeros(unroll)
    steps = training.chain_logits(head, features, target.get_input_embeddings()(tokens), unroll)
    for step, logits in enumerate(steps):
        for start in range(8):
            at = (
                start + step + 1
            )  # the target's logits here and the head both speak of token start + step + 2
            spoken = logits[:, start].log_softmax(-1)
            expected_losses[step] += (floor[:, at] - (wanted[:, at] * spoken).sum(-1)).sum() / 16
            expected_agreements[step] += (DRAFT_IDS[spoken.argmax(-1)] == best[:, at]).sum() / 16
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(agreements, expected_agreements)


def test_later_steps_weigh_less() -> None:
    torch.testing.assert_close(
        training.weighted(torch.tensor([1.0, 0.0, 0.0])), torch.tensor(1 / 2.71)
    )


def test_a_late_step_teaches_all_of_the_head_through_the_heads_own_outputs(
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    """The slope along the gradient is its norm only if no path to the weights is cut."""
    tokens, weight = torch.randint(12, (2, 20)), head.fc.weight
    torch.autograd.backward(training.unrolled(head, target, tokens, 3)[0][2])
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert weight.grad is not None
    norm, eps = weight.grad.norm(), 1e-3
    with torch.no_grad():
        weight += eps * weight.grad / norm
        above = training.unrolled(head, target, tokens, 3)[0][2]
        weight -= 2 * eps * weight.grad / norm
        below = training.unrolled(head, target, tokens, 3)[0][2]
    torch.testing.assert_close((above - below) / (2 * eps), norm, rtol=0.03, atol=0)


def test_the_draft_vocabulary_is_the_most_frequent_of_both_texts_whatever_their_sizes() -> None:
    large = TokenData(torch.tensor([2] * 50 + [5] * 30 + [7] * 20, dtype=torch.int16), 0)
    small = TokenData(torch.tensor([9, 9, 9, 7], dtype=torch.int16), 0)
    shape = Eagle3Shape(**vars(SHAPE) | {"draft_vocab_size": 3})
    assert training.draft_vocabulary([large, small], shape).tolist() == [2, 7, 9]


def test_the_checkpoint_is_the_public_format_and_loads_again(tmp_path: Path) -> None:
    """Names and shapes as in published EAGLE-3 heads; the size is that of the head that the zoo
    ships."""
    shape = Eagle3Shape.read(FOLDER)
    ids = torch.randperm(2048)[:1024].sort().values
    head = Eagle3Head(shape, ids)
    save_head(head, FOLDER, tmp_path)
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

    loaded = Eagle3Head.from_pretrained(tmp_path)
    assert torch.equal(loaded.draft_ids, ids)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name).bfloat16().float()), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"norm_output": True}, "norm_output"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
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
        Eagle3Shape.read(tmp_path)


def test_a_head_of_another_width_than_the_target_is_refused(target: LlamaForCausalLM) -> None:
    SHAPE.check_target(target.config)
    with pytest.raises(ValueError, match=r"hidden_size of the EAGLE-3 head is 20.*16"):
        Eagle3Shape(**vars(SHAPE) | {"hidden_size": 20}).check_target(target.config)


def test_windows_too_short_for_a_chain_are_refused(
    target: LlamaForCausalLM, head: Eagle3Head
) -> None:
    with pytest.raises(ValueError, match="--length is 12; with --unroll 5 it must be 13 or more"):
        training.unrolled(head, target, torch.randint(12, (1, 12)), 5)


def test_a_fresh_head_starts_from_the_targets_output_layer(target: LlamaForCausalLM) -> None:
    run = Settings(1, 1, 1, 16, 1e-3, 0.0, 0.5, 1, False)
    head = training.build_head(SHAPE, target, DRAFT_IDS, run)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    inputs = torch.randn(1, 40, 16)
    assert not torch.equal(head(inputs, inputs)[0], head(inputs, inputs)[0])  # dropout
    head.eval()
    assert torch.equal(head(inputs, inputs)[0], head(inputs, inputs)[0])


def learn(target: LlamaForCausalLM, num_steps: int) -> tuple[Eagle3Head, list[float]]:
    """A head after a few steps on random text, and the losses of the steps."""
    data = TokenData(torch.randint(12, (400,), dtype=torch.int16), 0)
    head = training.build_head(
        SHAPE, target, DRAFT_IDS, Settings(1, 1, 1, 16, 1e-3, 0.0, 0.0, 1, False)
    )
    loss_of = training.eagle3_loss(head, target, data, data, unroll=4)
    optimizer, losses = torch.optim.AdamW(head.parameters(), 1e-2), []
    for _ in range(num_steps):
        loss = loss_of(4, 44)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return head, losses


def test_a_few_steps_reduce_the_loss(target: LlamaForCausalLM) -> None:
    _, losses = learn(target, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_measured_acceptance_is_that_of_a_loop_that_drafts_and_verifies(
    target: LlamaForCausalLM,
) -> None:
    for matrix in (
        parameter for parameter in target.model.layers.parameters() if parameter.dim() > 1
    ):
        matrix.mul_(0.5)  # a target calm enough that 60 steps teach a head to be right now and then
    head, _ = learn(target, 60)
    heldout = TokenData(torch.randint(12, (301,), dtype=torch.int16), 0)
    figures = evaluate(target, head, heldout, prompts=4, new_tokens=40, draft_len=3)

    prompts = torch.stack([heldout.tokens[start : start + 256] for start in (0, 15, 30, 45)]).long()
    accepted = []
    for text in continuations(target, prompts, 40, do_sample=False):
        features, embeddings = (
            target_states(target, text[None])[0][0],
            target.get_input_embeddings()(text),
        )
        slow, committed = (
            SlowHead(head, features, embeddings),
            257,
        )  # the prompt and the first token
        while committed + 3 < len(text):
            drafts = draft_chain(slow, target, committed - 2, 3)
            same = [
                draft == token
                for draft, token in zip(drafts, text[committed:].tolist(), strict=False)
            ]
            accepted.append([*same, False].index(False))
            committed += accepted[-1] + 1
    assert len(set(accepted)) > 1
    assert figures == summary(accepted, 3)


def draft_chain(slow: SlowHead, target: LlamaForCausalLM, start: int, draft_len: int) -> list[int]:
    """The head's best tokens, each read before the next is drafted."""

    def token(logits: Tensor) -> Tensor:
        return DRAFT_IDS[logits.argmax()]

    chain = slow.chain(start, draft_len, lambda _, said: target.get_input_embeddings()(token(said)))
    return [int(token(logits)) for logits in chain]


def test_rounds_of_chains_move_on_by_one_more_than_was_accepted() -> None:
    #                    prompt's ^ 2 + 1      ^ 0 + 1  ^ 4 + 1 would need token 9
    assert chain_rounds([9, 2, 9, 9, 0, 4, 9, 9, 9], draft_len=3) == [2, 0, 4]
    assert chain_rounds([9, 2, 9, 9, 0, 4, 9, 9], draft_len=3) == [2, 0]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a tiny target learned to count to 12 and a head to draft for it, with the
    shipped commands."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("training", "heldout"):
        np.savez(root / f"{name}.npz", tokens=np.arange(4096, dtype=np.uint16) % 12, num_bytes=8192)
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 64}
    for name, more in (
        ("llama", {"num_hidden_layers": 7}),
        ("llama-eagle3", {"draft_vocab_size": 16}),
    ):
        (root / f"{name}-shape").mkdir()
        config = read_json(resolve_model(f"zoo:{name}") / "config.json") | sizes | more
        (root / f"{name}-shape" / "config.json").write_text(json.dumps(config))
    (root / "llama-shape" / "generation_config.json").write_text("{}")

    common = [
        "--data",
        root,
        "--steps",
        STEPS,
        "--windows",
        4,
        "--length",
        64,
        "--warmup-steps",
        10,
    ]
    common += ["--dropout", 0, "--learning-rate", 5e-3]
    call(train.target, "--output", root / "target", "--shape", root / "llama-shape", *common)
    own = [
        "--self-text-minutes",
        0,
        "--self-text-batch",
        4,
        "--self-text-tokens",
        16,
        "--unroll",
        3,
    ]
    shape = ["--shape", root / "llama-eagle3-shape", "--target", root / "target"]
    call(train.eagle3, "--output", root / "head", *shape, *own, *common)
    return root


def call(command: click.Command, *arguments: object) -> None:
    CliRunner().invoke(command, [*map(str, arguments), "--device", "cpu"], catch_exceptions=False)


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_the_command_trains_a_head_whose_chains_are_accepted(tiny_run: Path) -> None:
    metrics = read_json(tiny_run / "head" / "metrics.json")
    assert metrics["step"] == STEPS
    assert min(metrics[f"agreement_{draft}"] for draft in (1, 2, 3)) > 0.7  # 1/12 is chance
    folders = ["--target", tiny_run / "target", "--draft", tiny_run / "head", "--output", tiny_run]
    call(train.evaluate, "--data", tiny_run, *folders, "--prompts", 2, "--new-tokens", 16)
    assert read_json(tiny_run / "acceptance.json")["acceptance_length"] > 3
