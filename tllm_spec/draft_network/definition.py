"""Which definition the network of a model has, and what it is made of."""

from collections.abc import Iterator
from itertools import chain

import torch

from tllm_spec.draft_network.decoder import Decoder
from tllm_spec.draft_network.emitter import Emitter, Value
from tllm_spec.draft_network.head_decoder import HeadDecoder
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.llama import CausalLM

NetworkModel = CausalLM | Eagle3Head


def emit_network(emitter: Emitter[Value], model: NetworkModel) -> None:
    if isinstance(model, Eagle3Head):
        HeadDecoder(emitter, model).emit()
    else:
        Decoder(emitter, model).emit()


def weights_of(model: NetworkModel) -> Iterator[torch.Tensor]:
    """Everything that the network's constants are made of."""
    if isinstance(model, Eagle3Head):
        others = model.embedding.weight, model.output.weight, model.cos_sin
        return chain(model.parameters(), others)
    return chain(model.parameters(), (model.model.cos_sin,))
