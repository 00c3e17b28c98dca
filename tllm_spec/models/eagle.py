"""The draft head of EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858): `fc` of a token's
embedding and a hidden state, then Llama layers without a final norm.

The state is the target's after its final norm, or the head's own output of the step before.
Embedding and output layer are the target's, unless the checkpoint has others. Requests, pages and
the drafting loop are not known here."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.drafts.draft_input import draft_input
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import DraftHead, HeadRows, HeadSource, drop_copies, head_tensors
from tllm_spec.models.eagle3_config import DECODER_KEYS, check_layers, unknown_keys
from tllm_spec.models.layers import Placement, specialize_for_cpu
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.weights import fill, fill_random

# The shape of an EAGLE-1 or EAGLE-2 draft head, read from its `config.json`.
#
# A head is one or more Llama layers with a different input, so its configuration is a
# `ModelConfig` with further fields. EAGLE-2 changed the drafting only, not the head.


# `architectures` of a head -> the architecture whose attention and MLP its layers have.
_LAYERS = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "LlamaForCausalLMEagle": "LlamaForCausalLM",
    "EagleLlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "MistralForCausalLMEagle": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
}
_READ = DECODER_KEYS | {"bias", "qkv_bias"}


@dataclass(frozen=True)
class EagleConfig(ModelConfig):
    """`vocab_size` is the target's: the head reads its tokens."""

    bias: bool | None
    """Whether `fc` has one; None: the checkpoint decides."""

    @classmethod
    def from_pretrained(cls, path: Path) -> "EagleConfig":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        raw = read_config(path)
        names = raw.get("architectures") or []
        if len(names) != 1 or names[0] not in _LAYERS:
            raise ValueError(
                f"architectures of the EAGLE-1/2 head is {names}; served is one of "
                f"{', '.join(_LAYERS)}."
            )
        unknown = unknown_keys(raw, _READ, {}, "EAGLE-1/2")
        own = raw | {"architectures": [_LAYERS[names[0]]]}
        shape = vars(model_config_of(own))
        if raw.get("qkv_bias") is not None:
            shape = shape | {"qkv_bias": bool(raw["qkv_bias"])}
        config = cls(**shape | {"unknown_keys": unknown}, bias=raw.get("bias"))
        check_layers(config, "EAGLE-1/2")
        return config

    def check_target(self, target: ModelConfig) -> None:
        """Raises ValueError unless the head was trained for such a target."""
        for key in ("hidden_size", "vocab_size"):
            own, wanted = getattr(self, key), getattr(target, key)
            if own != wanted:
                raise ValueError(
                    f"{key} of the EAGLE-1/2 head is {own}, the target's is {wanted}; they must be "
                    "equal, since the head reads the target's embeddings and hidden states and "
                    "has its output layer."
                )


# The rotary table is computed.
_UNUSED = ("rotary_emb.inv_freq",)
_INPUT_NORM, _FC_BIAS = "layers.0.input_layernorm.weight", "fc.bias"


class EagleHead(DraftHead):
    """Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

    def __init__(
        self,
        config: EagleConfig,
        target: CausalLM,
        max_positions: int,
        placement: Placement,
        *,
        has_bias: bool,
        has_input_norm: bool,
        owns: Collection[str] = (),
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=has_bias, placement=placement)
        layers = [DecoderLayer(config, layer, placement) for layer in range(config.num_layers)]
        if not has_input_norm:
            layers[0].input_layernorm = None
        self.layers = nn.ModuleList(layers)
        ends = target, owns, max_positions, placement
        self._add_ends(*ends, rows=config.vocab_size, is_tied=False)

    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        input_ids, positions, hidden = rows
        embedding, rotary = self.embedding, Rotary(self.cos_sin, positions)
        given = draft_input(*embedding.lookup(input_ids), hidden, None, rotary, input_ids[:0])
        total = self.fc.forward(given.both)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            wanted = context.wanted if number == last else None
            total = layer.forward(total, given.rotary, context, wanted)
        return total


def load_eagle_head(source: HeadSource) -> EagleHead:
    """The checkpoint says whether `fc` has a bias, unless config.json does, and whether the first
    layer has an input norm.

    Raises:
        ValueError: the config or the checkpoint is not served or does not fit the target; the
        message says why.
    """
    config, placement = EagleConfig.from_pretrained(source.path), source.placement
    config = config.within(source.max_positions)
    config.check_target(source.target.config)
    is_dummy = source.load_format == "dummy"
    tensors = {} if is_dummy else head_tensors(source.path, "EAGLE-1/2", _UNUSED, {})
    drop_copies(tensors, source)
    head = EagleHead(
        config,
        source.target,
        source.max_positions,
        placement,
        has_bias=_FC_BIAS in tensors if config.bias is None else config.bias,
        has_input_norm=_INPUT_NORM in tensors,
        owns=tensors,
    )
    if is_dummy:
        fill_random(head)
    else:
        misfit = (
            f"The checkpoint in {source.path} does not fit an EAGLE-1/2 head of its config.json"
        )
        fill(head, tensors.items(), misfit)
    specialize_for_cpu(head, placement)
    return head
