"""Random DFlash heads of a few thousand parameters in both published spellings, and a transcription
of the format in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.models.eagle3_reference import Eagle3Reference
from tests.models.tiny_eagle3 import layer_shapes, random_tensors, save
from tllm_spec.models.checkpoint import OUTPUT
from tllm_spec.models.draft_head import EMBEDDING
from tllm_spec.models.llama import CausalLM

LAYER = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SIZES = {
    "hidden_size": 32,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}


def write_tiny_dflash(
    folder: Path,
    *,
    layers: tuple[int, ...] = (0, 1),
    mask_token: int = 63,
    block_size: int = 8,
    draft_vocab_size: int | None = None,
    speculators: bool = False,
    seed: int = 0,
    sizes: dict[str, int] = SIZES,
    **config: Any,
) -> Path:
    """Fills `folder`. layers: of the target, by their outputs. With a draft vocabulary the head has
    an output layer of its own, and with `target_hidden_size` an embedding, too."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(_shapes(sizes, len(layers)), generator)
    if (target_size := config.get("target_hidden_size")) is not None:
        size = sizes["hidden_size"]
        shapes = {"fc.weight": (size, len(layers) * target_size)}
        shapes |= dict.fromkeys((EMBEDDING, OUTPUT), (sizes["vocab_size"], size))
        tensors |= random_tensors(shapes, generator)
    if draft_vocab_size is not None:
        chosen = torch.randperm(sizes["vocab_size"], generator=generator)[:draft_vocab_size]
        chosen = chosen.sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        shape = draft_vocab_size, sizes["hidden_size"]
        tensors |= random_tensors({"lm_head.weight": shape}, generator)
        config["draft_vocab_size"] = draft_vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", tensors)
    own: dict[str, Any]
    if speculators:
        own = {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "transformer_layer_config": LAYER | sizes,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "mask_token_id": mask_token,
            "block_size": block_size,
            "sample_from_anchor": False,
        }
    else:
        nested = {"mask_token_id": mask_token, "target_layer_ids": list(layers)}
        own = {"architectures": ["DFlashDraftModel"], "block_size": block_size}
        own |= LAYER | sizes | {"dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(own | config))
    return folder


def _shapes(sizes: dict[str, int], num_captured: int) -> dict[str, tuple[int, ...]]:
    size, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_captured * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for layer in range(sizes["num_hidden_layers"]):
        own = layer_shapes(size, size, (q_size, kv_size), inner)
        own |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


class DFlashReference(Eagle3Reference):
    """The head over a whole text without a cache, on the checkpoint's own tensors."""

    def __init__(self, folder: Path, target: CausalLM) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        self.config = raw | raw.get("transformer_layer_config", {}) | raw.get("dflash_config", {})
        weights = target.state_dict()
        self.embedding = self.tensors.get(EMBEDDING, weights["model.embed_tokens.weight"])
        self.output = self.tensors.get("lm_head.weight", weights["lm_head.weight"])

    def block(self, newest: int, captured: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """The logits of all drafts, `[K, V_draft]`. captured `[T, n * H]`: the target's states of
        the text before the newest token."""
        text = self.norm("hidden_norm", self.linear("fc", captured))
        ids = torch.tensor([newest, *[self.config["mask_token_id"]] * num_drafts])
        hidden = self.embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = self.norm(f"{name}.input_layernorm", hidden)
            hidden = hidden + self.block_attention(f"{name}.self_attn", x, text)
            x = self.norm(f"{name}.post_attention_layernorm", hidden)
            gate, up = (self.linear(f"{name}.mlp.{kind}_proj", x) for kind in ("gate", "up"))
            hidden = hidden + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        return F.linear(self.norm("norm", hidden[1:]), self.output)

    def block_attention(self, name: str, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Every row of the block sees the text and the whole block."""
        dim, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        both = torch.cat((text, x))
        q = self.linear(f"{name}.q_proj", x).view(len(x), -1, dim)
        k, v = (self.linear(f"{name}.{kind}_proj", both).view(len(both), -1, dim) for kind in "kv")
        q = self.rotated(self.norm(f"{name}.q_norm", q), len(text))
        k = self.rotated(self.norm(f"{name}.k_norm", k))
        group, outputs = q.shape[1] // kv_heads, []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T * dim**-0.5
            outputs.append(scores.softmax(-1) @ v[:, head // group])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))
