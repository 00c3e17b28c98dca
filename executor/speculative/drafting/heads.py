"""The kinds of heads, in one table: no other module asks which kind a head is.

A head reads hidden states of the target. Its row says how its configuration is read, which layers
of the target it reads, how its weights are loaded, and how it drafts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.config.speculative_config import DecodingBaseConfig, DraftBackend
from tllm_spec.executor.engine.rows import SinkWindow
from tllm_spec.executor.speculative.drafting.drafter import When
from tllm_spec.models.config_file import read_config
from tllm_spec.models.dflash import DFlashConfig, DFlashHead, load_dflash_head
from tllm_spec.models.draft_head import DraftHead, HeadSource, head_kind, target_modules
from tllm_spec.models.draft_kind import ASSISTANT, HeadKind, naming_draft
from tllm_spec.models.eagle import EagleConfig, EagleHead, load_eagle_head
from tllm_spec.models.eagle3 import Eagle3Head, load_eagle3_head
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant, load_assistant
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules, exported_config, load_nextn
from tllm_spec.models.registry import blank_placement
from tllm_spec.zoo.registry import resolve_model


@dataclass(frozen=True)
class DraftPlan:
    """Which draft weights are to be loaded, and when their network drafts.

    config: the options of the mode. kinds: of heads that it takes, of which a folder that does not
    say has the first one; none: it takes a language model."""

    config: DecodingBaseConfig
    kinds: tuple[HeadKind, ...]
    when: When

    def option(self, name: str) -> Any:
        """An option of the mode; None where it is null, or the decoding type has no such option."""
        return getattr(self.config, name, None)

    @property
    def path(self) -> str | None:
        """None: the target's checkpoint has the weights."""
        path: str | None = self.option("speculative_model")
        return path

    @property
    def backend(self) -> DraftBackend:
        return self.option("draft_backend") or "torch"

    @property
    def capture_layers(self) -> tuple[int, ...] | None:
        """Layers of the target that a head reads; None: the head's own choice or the default."""
        own = self.option("eagle3_layers_to_capture"), self.option("target_layer_ids")
        return next((layers for layers in own if layers is not None), None)

    @property
    def sees(self) -> SinkWindow | None:
        """First and last tokens that it sees; None: as its own config.json says, or the last ones
        of its window."""
        sink, size = self.option("draft_sink_size"), self.option("draft_window_size")
        return None if size is None or sink is None else SinkWindow(sink, size)

    @property
    def is_head(self) -> bool:
        return bool(self.kinds)

    @property
    def num_modules(self) -> int:
        """MTP modules: one for all drafts or one for each; 0: the network is none."""
        if self.kinds[:1] != ("MTP",) or self.is_assistant:
            return 0
        return self.config.max_draft_len if self.option("use_mtp_vanilla") else 1

    @property
    def is_assistant(self) -> bool:
        """Whether the folder has Gemma 4's assistant, which reads the target's keys."""
        if "Gemma 4 assistant" not in self.kinds or self.path is None:
            return False
        return read_config(draft_folder(self)).get("architectures") == [ASSISTANT]

    @property
    def drafts_at_once(self) -> bool:
        """Whether a draft model reads mask tokens and drafts all tokens at once."""
        return not self.kinds and hasattr(self.config, "mask_token_id")

    @property
    def shares_pages(self) -> bool:
        """Whether its layers are extra layers of the target's pages."""
        return self.when is not When.DEVICE

    @property
    def rows_before(self) -> int:
        """Entries that drafting writes besides those of drafts, on the target's pages: a model's
        of the newest token, and a block's of its last mask, too."""
        return HEADS[self.kinds[0]].rows_before if self.kinds else 1


@dataclass(frozen=True)
class Head:
    """A row of the table.

    read_config: of the head in a folder, with the options of the plan. layers: those of the target
    that it reads, by the plan, that configuration and how many layers there are; this number stands
    for the final norm. load: from a source, with the configuration and the number of these layers.
    blank: for a blank target of a device, with the same; it has the weights that are not the
    target's, as far as config.json tells of them. All raise ValueError for what is not served.

    rows_before: see `DraftPlan`. runs_outside: its layers can be
    a network outside torch."""

    read_config: Callable[[DraftPlan, Path], Any]
    layers: Callable[[DraftPlan, Any, int], tuple[int, ...]]
    load: Callable[[DraftPlan, HeadSource, Any, int], DraftHead]
    blank: Callable[[DraftPlan, CausalLM, Any, int, torch.device], nn.Module]
    rows_before: int = 0
    runs_outside: bool = False


def draft_folder(plan: DraftPlan) -> Path:
    """The folder of draft weights that are not the target's. Raises ValueError with the option's
    name if it does not exist."""
    assert plan.path is not None
    with naming_draft():
        return resolve_model(plan.path)


def kind_of_head(plan: DraftPlan, folder: Path) -> HeadKind:
    """What the head in the folder is; one that does not say is of the mode's first kind."""
    if plan.num_modules:
        return plan.kinds[0]
    return head_kind(folder) or plan.kinds[0]


def _blank_eagle(
    plan: DraftPlan, target: CausalLM, config: EagleConfig, num_captured: int, device: torch.device
) -> EagleHead:
    config.check_target(target.config)
    placement = _placement_of(target)
    return EagleHead(config, target, 1, placement, has_bias=False, has_input_norm=False)


def _eagle3_layers(plan: DraftPlan, config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
    own = plan.capture_layers or config.capture_layers or default_capture_layers(num_layers)
    return _within("eagle3_layers_to_capture", own, num_layers)


def _read_dflash(plan: DraftPlan, folder: Path) -> DFlashConfig:
    """The mode's mask token and layers go before. Raises ValueError if there is no mask token, or
    the head was not trained for so many drafts."""
    config = DFlashConfig.from_pretrained(folder)
    own = plan.option("mask_token_id")
    token = own if own is not None else config.mask_token
    if token is None:
        raise ValueError(
            f"speculative_config.mask_token_id is needed, since config.json of {plan.path} names "
            "none"
        )
    if (longest := plan.config.max_draft_len) > config.max_drafts:
        raise ValueError(
            f"max_draft_len = {longest} is refused: the {config.kind} head in {plan.path} has "
            f"block_size {config.block_size}, of which {config.max_drafts} are drafts"
        )
    for name in ("block_size", "markov_rank", "markov_head_type"):
        named, trained = plan.option(name), getattr(config, name)
        if named not in (None, trained):
            raise ValueError(
                f"{name} = {named!r} is refused: the {config.kind} head in {plan.path} was trained "
                f"with {trained!r}"
            )
    layers = plan.capture_layers or config.capture_layers
    return replace(config, mask_token=token, capture_layers=layers)


def _dflash_layers(plan: DraftPlan, config: DFlashConfig, num_layers: int) -> tuple[int, ...]:
    own = config.capture_layers or config.default_layers(num_layers)
    return _within("target_layer_ids", own or default_capture_layers(num_layers), num_layers)


def _blank_with_layers(
    make: type[Eagle3Head] | type[DFlashHead],
    plan: DraftPlan,
    target: CausalLM,
    config: Any,
    num_captured: int,
    device: torch.device,
) -> nn.Module:
    own = config.for_target(target.config, num_captured)
    return make(own, target, num_captured, 1, _placement_of(target), own.own_modules)


def _blank_modules(
    plan: DraftPlan, target: CausalLM, config: None, num_captured: int, device: torch.device
) -> NextnModules:
    own = target.config
    if plan.path is not None:
        own = exported_config(draft_folder(plan), own)
    mapping = _placement_of(target).mapping
    placement = blank_placement(own, target.dtype, device, mapping)
    return NextnModules(target, plan.num_modules, placement)


def _placement_of(target: CausalLM) -> Placement:
    return Placement(target.dtype, target.device, target_modules(target)[1].mapping)


def _within(option: str, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Raises ValueError if the target lacks some of the layers."""
    if outside := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise ValueError(
            f"{option} = {list(layers)}: the target has layers 0 to {num_layers - 1}, and not "
            f"{outside}"
        )
    return layers


def _load_dflash(
    plan: DraftPlan, source: HeadSource, config: DFlashConfig, num_captured: int
) -> DFlashHead:
    """With the mode's calibration of its confidence. Raises ValueError if it has none."""
    head, file = load_dflash_head(source, config, num_captured), "confidence_calibration_path"
    if (given := plan.option(file)) is not None:
        if head.confidence is None:
            raise ValueError(f"{file} = {given!r} is refused: {plan.path} has no confidence head")
        head.confidence.calibrate(Path(given), plan.config.max_draft_len)
    return head


_BLOCK_HEAD = Head(
    read_config=_read_dflash,
    layers=_dflash_layers,
    load=_load_dflash,
    blank=partial(_blank_with_layers, DFlashHead),
    rows_before=2,
)
HEADS: Mapping[HeadKind, Head] = {
    "EAGLE-1/2": Head(
        read_config=lambda _, folder: EagleConfig.from_pretrained(folder),
        layers=lambda _, __, num_layers: (num_layers,),
        load=lambda _, source, *__: load_eagle_head(source),
        blank=_blank_eagle,
    ),
    "EAGLE-3": Head(
        read_config=lambda _, folder: Eagle3Config.from_pretrained(folder),
        layers=_eagle3_layers,
        load=lambda _, source, __, num_captured: load_eagle3_head(source, num_captured),
        blank=partial(_blank_with_layers, Eagle3Head),
        runs_outside=True,
    ),
    "DFlash": _BLOCK_HEAD,
    "DFlash2": _BLOCK_HEAD,
    "DSpark": _BLOCK_HEAD,
    "MTP": Head(
        read_config=lambda *_: None,
        layers=lambda _, __, num_layers: (num_layers,),
        load=lambda plan, source, *_: load_nextn(
            source, plan.num_modules, is_exported=plan.path is not None
        ),
        blank=_blank_modules,
    ),
    "Gemma 4 assistant": Head(
        read_config=lambda _, folder: AssistantConfig.from_pretrained(folder),
        layers=lambda _, __, num_layers: (num_layers,),
        load=lambda _, source, config, __: load_assistant(config, source),
        blank=lambda _, target, config, *__: Gemma4Assistant(
            config, target, 1, _placement_of(target)
        ),
    ),
}
