"""An EAGLE-1/2 head that knows a few texts of the zoo's target by heart: `fc` is fitted to them by
ridge regression. So its drafts are accepted, which those of random weights hardly ever are."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.eagle3_runner import captured_states
from tests.models.tiny_eagle import write_tiny_eagle
from tllm_spec.models.causal_lm import CausalLM

RIDGE = 1e-3
LAYER_SCALE = 0.05  # of what the layer adds: enough that a wrong cache changes drafts


@torch.inference_mode()
def write_fitted_eagle(folder: Path, target: CausalLM, texts: list[list[int]]) -> Path:
    """A head of one layer in `folder`, of the target's sizes."""
    config = target.config
    write_tiny_eagle(
        folder,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=True,
    )
    embedding = target.state_dict()["model.embed_tokens.weight"]
    inputs, outputs = [], []
    for text in texts:
        states = captured_states(target, text, (config.num_layers,))
        inputs.append(torch.cat((embedding[torch.tensor(text[1:])], states[:-1]), -1))
        outputs.append(states[1:])
    given, wanted = torch.cat(inputs), torch.cat(outputs)
    given = torch.cat((given, torch.ones(len(given), 1)), -1)
    gram = given.T @ given + RIDGE * torch.eye(given.shape[1])
    weight = torch.linalg.solve(gram, given.T @ wanted).T
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] *= LAYER_SCALE
    tensors["fc.weight"], tensors["fc.bias"] = weight[:, :-1].contiguous(), weight[:, -1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
