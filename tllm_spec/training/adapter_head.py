"""A LoRA of a draft head for the traffic of one adapter of the target: `tllm-train head --adapter`.
The head itself stays, and serves all other requests."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tllm_spec.adapters.adapted import kind_of
from tllm_spec.adapters.adapter_folder import CONFIG, DRAFT, PREFIX, TENSORS, Adapter, read_adapter
from tllm_spec.config.option_checks import ADAPTER_NAME, shown
from tllm_spec.lora_request import name_of_version, target_version
from tllm_spec.training.draft_head import DraftHead
from tllm_spec.training.texts import Text

MAX_RANK = 1024  # of the target's adapter
DEFAULT_RANK = 16
LEARNING_RATE = 2e-3  # its B is zero at first


@dataclass(frozen=True)
class TargetAdapter:
    """The target's adapter that the head is trained for."""

    name: str
    folder: Path
    adapter: Adapter

    @classmethod
    def read(cls, given: str) -> "TargetAdapter":
        """given: `NAME=FOLDER`. Raises ValueError for anything else, and for a folder that is
        none."""
        name, equals, folder = given.partition("=")
        if not equals or not ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"--adapter {shown(given)}: NAME=FOLDER is needed")
        return cls(name, Path(folder), read_adapter(Path(folder), MAX_RANK))

    def own(self, texts: Sequence[Text], data: Path) -> list[Text]:
        """The texts that were recorded with this adapter. Raises ValueError if there are none."""
        by_version: dict[str, list[Text]] = {}
        for text in texts:
            if text.record is not None and (version := text.record.adapter) is not None:
                by_version.setdefault(target_version(version), []).append(text)
        found = by_version.get(f"{self.name}@{self.adapter.content_hash}", [])
        if not found:
            is_known = self.name in map(name_of_version, by_version)
            reason = f"other weights than {self.folder}" if is_known else "other adapters, or none"
            raise ValueError(f"--adapter {self.name}: {data} has only texts of {reason}")
        return found

    @torch.no_grad()
    def merge(self, target: Any) -> None:
        """Into the weights of transformers' model. Raises ValueError where they have no such
        layer."""
        for name, pair in self.adapter.pairs.items():
            module = dict(target.named_modules()).get(name)
            if not isinstance(module, nn.Linear) or pair.a.dim() != 2:
                raise ValueError(
                    f"--adapter {self.name}: {name} is no linear layer of transformers' model; "
                    "texts with hidden states are read without it (--record_hidden_states 1.0)"
                )
            device = module.weight.device
            delta = pair.b.to(device) @ pair.a.float().to(device)
            module.weight += delta.to(module.weight.dtype)

    @contextmanager
    def lora_config(self, draft: Path | None, rank: int) -> Iterator[dict[str, Any]]:
        """That of an engine which serves it, with the LoRA of the draft head in the folder
        `draft`."""
        with TemporaryDirectory() as root:
            folder = Path(root) / self.name
            folder.mkdir()
            for file in (CONFIG, TENSORS):
                (folder / file).symlink_to((self.folder / file).resolve())
            if draft is not None:
                (folder / DRAFT).symlink_to(draft.resolve())
            yield {
                "lora_dir": {self.name: str(folder)},
                "lora_target_modules": sorted(set(map(kind_of, self.adapter.pairs))),
                "max_lora_rank": self.adapter.rank,
                "max_draft_lora_rank": rank,
                "max_loras": 1,
            }


class LowRankDelta(nn.Module):
    """A weight `[out, in]` plus `B A`, of which only these are trained. The scale is 1."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.randn(rank, inputs, device=weight.device) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def add_low_rank(head: DraftHead, rank: int) -> None:
    """To all linear layers of the head's decoder layers. Nothing else of the head is trained."""
    head.requires_grad_(False)
    for module in [each for each in head.layers.modules() if isinstance(each, nn.Linear)]:
        delta = LowRankDelta(module.weight, min(rank, *module.weight.shape))
        parametrize.register_parametrization(module, "weight", delta)


def save_low_rank(head: DraftHead, output: Path) -> None:
    """As PEFT does."""
    tensors, ranks = dict[str, Tensor](), dict[str, int]()
    for name, module in head.named_modules():
        if isinstance(module, LowRankDelta):
            own = name.removesuffix(".parametrizations.weight.0")
            ranks[own] = len(module.a)
            for side, matrix in (("A", module.a), ("B", module.b)):
                stored = matrix.detach().to(torch.bfloat16).cpu().contiguous()
                tensors[f"{PREFIX}{own}.lora_{side}.weight"] = stored
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        "bias": "none",
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {name: own for name, own in ranks.items() if own != rank},
    }
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / TENSORS, metadata={"format": "pt"})
    (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
