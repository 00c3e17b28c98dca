"""Draft weights on the device, and the hidden states that a head needs from the target."""

from dataclasses import dataclass
from pathlib import Path

from tllm_spec.attention.interface import AttentionBackend
from tllm_spec.attention.spec_metadata import SpecMetadata, default_capture_layers
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.draft_network.network import DraftNetwork
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.draft_net import (
    CausalNet,
    DraftNet,
    Eagle3Net,
    NextnNet,
)
from tllm_spec.executor.speculative.modes import DraftModel
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.deepseek import DeepseekForCausalLM
from tllm_spec.models.eagle3 import Eagle3Head, load_eagle3_head
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.mtp import NextnModules, load_nextn
from tllm_spec.models.registry import LoadFormat
from tllm_spec.zoo.registry import resolve_model


@dataclass(frozen=True)
class LoadedDraft:
    """`spec`: the hidden states that the target captures for a head."""

    plan: DraftModel
    net: CausalLM | Eagle3Head | NextnModules | DraftNetwork
    spec: SpecMetadata | None

    def layers(self, backend: AttentionBackend, rows: RowBuilder, vocab_size: int) -> DraftLayers:
        """The network as layers on the target's pages; `vocab_size` is the target's."""
        net: DraftNet
        if isinstance(self.net, Eagle3Head):
            assert self.spec is not None
            net = Eagle3Net(self.net, self.spec)
        elif isinstance(self.net, NextnModules):
            assert self.spec is not None
            net = NextnNet(self.net, self.spec)
        else:
            assert not isinstance(self.net, DraftNetwork)
            net = CausalNet(self.net, vocab_size)
        return DraftLayers(net, backend, rows)


def draft_folder(plan: DraftModel) -> Path:
    """The folder of draft weights that are not the target's. Raises ValueError with the option's
    name if it does not exist."""
    assert plan.path is not None
    try:
        return resolve_model(plan.path)
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None


def load_mtp(
    plan: DraftModel,
    target: CausalLM,
    folder: Path,
    load_format: LoadFormat,
    *,
    max_num_tokens: int,
    communicator: Communicator = SINGLE,
) -> LoadedDraft:
    """Load MTP modules from the target's checkpoint or the plan's. Raises ValueError if tensors are
    missing or surplus."""
    assert isinstance(target, DeepseekForCausalLM)
    is_exported = plan.path is not None
    modules = load_nextn(
        folder, target, load_format, plan.num_modules, communicator, is_exported=is_exported
    )
    config = target.config
    spec = SpecMetadata(
        (config.num_layers,), config.hidden_size, max_num_tokens, target.dtype, target.device
    )
    return LoadedDraft(plan, modules, spec)


def load_head(
    plan: DraftModel,
    target: CausalLM,
    *,
    max_positions: int,
    max_num_tokens: int,
    communicator: Communicator = SINGLE,
) -> LoadedDraft:
    """Load an EAGLE-3 head. Raises ValueError if the head does not fit the target, or if the target
    lacks the layers to capture."""
    folder, num_layers = draft_folder(plan), target.config.num_layers
    layers = plan.capture_layers or Eagle3Config.from_pretrained(folder).capture_layers
    layers = layers or default_capture_layers(num_layers)
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"eagle3_layers_to_capture = {list(layers)}: the target has layers 0 to "
            f"{num_layers - 1}, and not {outside}"
        )
    head = load_eagle3_head(
        folder,
        target,
        num_captured=len(layers),
        load_format=plan.load_format,
        max_positions=max_positions,
        communicator=communicator,
    )
    spec = SpecMetadata(
        layers, target.config.hidden_size, max_num_tokens, target.dtype, target.device
    )
    return LoadedDraft(plan, head, spec)
