"""Heads that know a few texts of the zoo's target by heart: `fc` is fitted to them by ridge
regression. So their drafts are accepted, which those of random weights hardly ever are: all of an
EAGLE-1/2 head, and the first one of an EAGLE-3 head, whose `fc` has no part in the others."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.eagle3_runner import captured_states
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.models.llama import CausalLM

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
    weight, bias = fitted(torch.cat(inputs), torch.cat(outputs))
    tensors = load_file(folder / "model.safetensors")
    save_fitted(folder, tensors, weight, bias, "layers.0")
    return folder


@torch.inference_mode()
def write_fitted_latent(folder: Path, target: CausalLM, texts: list[list[int]]) -> Path:
    """An EAGLE-3 head with latent attention, of the target's sizes."""
    config = target.config
    write_tiny_eagle3(
        folder,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=None,
        latent=True,
        bias=True,
    )
    layers = (*default_capture_layers(config.num_layers), config.num_layers - 1)
    states = [captured_states(target, text, layers) for text in texts]
    size = config.hidden_size
    given = torch.cat([each[:-1, :-size] for each in states])
    weight, bias = fitted(given, torch.cat([each[1:, -size:] for each in states]))
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = target.state_dict()["model.norm.weight"]
    save_fitted(folder, tensors, weight, bias, "midlayer")
    return folder


def fitted(given: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the linear layer from `[N, in]` to `[N, out]`."""
    given = torch.cat((given, torch.ones(len(given), 1)), -1)
    gram = given.T @ given + RIDGE * torch.eye(given.shape[1])
    weight = torch.linalg.solve(gram, given.T @ wanted).T
    return weight[:, :-1].contiguous(), weight[:, -1].clone()


def save_fitted(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    layer: str,
) -> None:
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{layer}.{name}.weight"] *= LAYER_SCALE
    tensors["fc.weight"], tensors["fc.bias"] = weight, bias
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
