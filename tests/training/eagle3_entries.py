"""A tiny EAGLE-3 head of the zoo, and its entries computed one by one: the reference of the
unrolled training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.registry import model_config_of
from tllm_spec.training import draft_head as training
from tllm_spec.training.draft_head import DraftHead
from tllm_spec.training.head_files import build_head
from tllm_spec.training.language_model import TokenData, mixed
from tllm_spec.training.trainer import Settings
from tllm_spec.zoo.registry import resolve_model

SIZES = {
    "vocab_size": 12,
    "draft_vocab_size": 9,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = Eagle3Config.from_dict(
    {
        **SIZES,
        **HEADS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
)
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 6, 7, 8, 10, 11])
FOLDER = resolve_model("zoo:llama-eagle3")


def settings(**changes: Any) -> Settings:
    """Settings of one step, without dropout."""
    values = {"minutes": 1, "steps": 1, "windows": 1, "length": 16, "learning_rate": 1e-3}
    values |= {"weight_decay": 0.0, "dropout": 0.0, "warmup_steps": 1, "compile": False}
    return Settings(**values | {"checkpoint_steps": 1, "seed": 0} | changes)


def model_config(target: LlamaForCausalLM) -> ModelConfig:
    return model_config_of(target.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


def with_large_weights(model: Any) -> Any:
    """Large random weights, also of norms: with small ones a model repeats one token, and all
    chains are equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


class EntryByEntryHead:
    """The head over one text, one entry at a time, from the checkpoint's tensors, without the code
    of the head."""

    def __init__(self, head: DraftHead, features: Tensor, embeddings: Tensor) -> None:
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
        """Appends to `keys` and `values`; returns the hidden state before the final norm."""
        layer = "layers.0"
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
        """Logits of the steps: a prefill up to `start`, then entries from the head's own outputs.

        `next_embedding(step, logits)` is the embedding that step `step` reads, given the logits of
        the step before.
        """
        keys, values = self.keys[: start + 1], self.values[: start + 1]
        output, logits = self.outputs[start], [self.logits(self.outputs[start])]
        for step in range(1, num_steps):
            output = self.entry(
                output, next_embedding(step, logits[-1]), start + step, keys, values
            )
            logits.append(self.logits(output))
        return logits


def learn(
    target: LlamaForCausalLM, num_steps: int, shape: Eagle3Config = SHAPE
) -> tuple[DraftHead, list[float]]:
    """A head after a few training steps on random text, and their losses."""
    data = TokenData(torch.randint(12, (400,), dtype=torch.int16), 0)
    head = build_head(shape, target, DRAFT_IDS, settings())
    optimizer, losses = torch.optim.AdamW(head.parameters(), 1e-2), []
    for _ in range(num_steps):
        loss = training.head_figures(head, target, 4, mixed(data, data, 4, 44))["loss"]
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return head, losses
