"""Checkpoints of models that write a given text: each token has one successor.

The layers add nothing, the embedding is one-hot, and the output matrix is a permutation. So what
follows depends on the last token only, and a script has no piece twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

END = "<|end|>"
HEAD_DIM = 64
# The logit of the successor is this times the root of the hidden size; those of others are 0.
SHARPNESS = 4.0


def save_scripted(
    folder: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str,
    *,
    special: Sequence[str] = (),
    tokens: Sequence[str] = (),
) -> Path:
    """A checkpoint with tokenizer. scripts: by the piece that a prompt ends with, the pieces that
    the model writes after it, then END. Each piece is a token of its own; the others are bytes.
    special: pieces that are special tokens. tokens: others that are tokens, too. Returns the
    folder."""
    tokenizer = _tokenizer(scripts, special, tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    size = -(-len(tokenizer) // HEAD_DIM) * HEAD_DIM
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=size // HEAD_DIM,
        num_key_value_heads=size // HEAD_DIM,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(_weights(scripts, tokenizer, size), folder / "model.safetensors")
    return folder


def _tokenizer(
    scripts: Mapping[str, Sequence[str]], special: Sequence[str], tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(letters)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(each, special=True) for each in (END, *special)])
    pieces = [*tokens, *(each for start in scripts for each in (start, *scripts[start]))]
    bare.add_tokens([AddedToken(each, normalized=False) for each in dict.fromkeys(pieces)])
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=END)


def _weights(
    scripts: Mapping[str, Sequence[str]], tokenizer: PreTrainedTokenizerFast, size: int
) -> dict[str, torch.Tensor]:
    head = torch.zeros(size, size)
    for start, script in scripts.items():
        ids = tokenizer.convert_tokens_to_ids([start, *script, END])
        for token, successor in pairwise(ids):
            assert not head[:, token].any(), "a piece comes twice"
            head[successor, token] = SHARPNESS
    layer = "model.layers.0."
    square = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    wide = {"mlp.gate_proj": (HEAD_DIM, size), "mlp.up_proj": (HEAD_DIM, size)}
    shapes = square | wide | {"mlp.down_proj": (size, HEAD_DIM)}
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        "model.embed_tokens.weight": torch.eye(size),
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(size),
        **{f"{layer}{name}.weight": torch.ones(size) for name in norms},
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
    }
