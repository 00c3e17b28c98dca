"""The next-token-prediction layer of a Qwen3-Next checkpoint, which has attention."""

from dataclasses import replace

from torch import nn

from tllm_spec.kernels.drafts.draft_input import DraftInputNorms
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import OffsetRMSNorm, RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import LlamaForCausalLM
from tllm_spec.models.module import Module, Placement
from tllm_spec.models.nextn_step import NextnStep
from tllm_spec.models.qwen3_next import Qwen3NextLayer


class Qwen3NextModule(NextnStep, Module):
    """Module paths are the checkpoint's names below `mtp.`."""

    eh_proj: Linear

    def __init__(self, target: LlamaForCausalLM, index: int, placement: Placement) -> None:
        super().__init__()
        assert index == 0, "a checkpoint has one module"
        config = target.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OffsetRMSNorm(size, eps, placement)
        self.pre_fc_norm_hidden = OffsetRMSNorm(size, eps, placement)
        self.norms = DraftInputNorms(
            self.pre_fc_norm_embedding.weight, self.pre_fc_norm_hidden.weight, eps
        )
        fc = Linear(2 * size, size, bias=False, placement=placement)
        self.add_under("fc", "eh_proj", fc)
        self.layers = nn.ModuleList([Qwen3NextLayer(_of_one_layer(config), 0, placement)])
        self.norm = OffsetRMSNorm(size, eps, placement)
        # Not a submodule: the target's weights are not this module's.
        self.__dict__["target"] = target

    @staticmethod
    def prefix(number: int) -> str:
        return "mtp."

    @property
    def layer(self) -> Qwen3NextLayer:
        [layer] = self.layers
        assert isinstance(layer, Qwen3NextLayer)
        return layer

    @property
    def last_norm(self) -> RMSNorm:
        return self.norm


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    """The layer has experts if any of the model's has."""
    sparse = frozenset({0}) if config.sparse_layers else config.sparse_layers
    return replace(config, num_layers=1, delta=None, sparse_layers=sparse)
