"""Plain-torch transcription of an MTP module (arXiv 2412.19437, section 2.2), and checkpoints that
have one."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.glm4_moe import save_glm4_moe
from tllm_spec.models.draft_head import HeadSource
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules, load_nextn

SAVERS: dict[str, Callable[..., Any]] = {
    **{
        name: partial(save_deepseek, architecture=name)
        for name in ("DeepseekV3", "DeepseekV32", "GlmMoeDsa")
    },
    "Glm4Moe": save_glm4_moe,
}
NORMS = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


def modules_of(
    folder: Path, target: CausalLM, count: int = 1, *, is_exported: bool = False, **options: Any
) -> NextnModules:
    options = {"load_format": "auto", "max_positions": 0} | options
    return load_nextn(HeadSource(folder, target, **options), count, is_exported=is_exported)


def save_with_mtp(
    folder: Path,
    num_modules: int = 1,
    noise: float = 1.0,
    family: str = "DeepseekV3",
    **config: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model of SAVERS with MTP modules after its layers. Returns transformers' model
    without them, and the first module's tensors, by their names below `model.layers.N.`
    (`module_tensors` reads the others'). `noise`: of the module's projection, next to one that
    passes the embedding on."""
    model = SAVERS[family](folder, **config)
    tensors = load_file(folder / "model.safetensors")
    number, size = model.config.num_hidden_layers, model.config.hidden_size
    layer, prefix = f"model.layers.{number - 1}.", f"model.layers.{number}."
    generator = torch.Generator().manual_seed(5)
    first: dict[str, torch.Tensor] = {}
    for index in range(num_modules):
        own = {
            name.removeprefix(layer): tensor
            + 0.1 * torch.randn(tensor.shape, generator=generator) * tensor.std()
            for name, tensor in tensors.items()
            if name.startswith(layer)
        }
        for name in NORMS:
            own[name] = 1 + 0.3 * torch.randn(size, generator=generator)
        own["eh_proj.weight"] = noise * torch.randn(size, 2 * size, generator=generator) * 0.1
        own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        prefix = f"model.layers.{number + index}."
        tensors |= {prefix + name: tensor for name, tensor in own.items()}
        first = first or own
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["num_nextn_predict_layers"] = num_modules
    (folder / "config.json").write_text(json.dumps(raw))
    return model, first


class PlainMTP:
    """The module over whole sequences, without a cache, around transformers' decoder layer."""

    # The norms of the embedding and of the hidden state, the projection, and the last norm.
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        config: Any = type(model.config).from_pretrained(folder)
        config._attn_implementation = "eager"
        for key, kind in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
            if hasattr(config, key):  # of the decoder's layers
                setattr(config, key, [*getattr(config, key), kind])
        self.model, self.tensors = model, tensors
        family, module = type(model).__name__.removesuffix("ForCausalLM"), type(model).__module__
        kinds: Any = import_module(module)
        self.norm_type = getattr(kinds, f"{family}RMSNorm")
        decoder_layer = getattr(kinds, f"{family}DecoderLayer")
        self.layer = decoder_layer(config, config.num_hidden_layers).eval()
        outer = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head")
        own = {name: x for name, x in tensors.items() if not name.startswith(outer)}
        self.load_layer(own, config.n_routed_experts)
        self.eps = config.rms_norm_eps
        raw = json.loads((folder / "config.json").read_text())
        self.hides_first = raw["architectures"] == ["GlmMoeDsaForCausalLM"]
        if raw.get("index_share_for_mtp_iteration"):
            self.layer.self_attn.indexer.register_forward_hook(self._share)

    hides_first = False
    first: torch.Tensor | None = None
    """Where steps share a choice, the keys `[1, T, n]` that the rows of the first attend to; None:
    it has not run."""

    def _share(self, module: Any, given: Any, chosen: torch.Tensor) -> torch.Tensor | None:
        """Rows of later steps attend to the keys of the first step's last row, and to all keys from
        there to their own."""
        if self.first is None:
            self.first = chosen
            return None
        length = self.first.shape[1]
        later = range(length, chosen.shape[1])
        repeated = self.first[:, :, :1].expand(-1, -1, len(later))
        rows = [torch.cat((self.first, repeated), 2)]
        for row in later:
            own = torch.arange(length, length + len(later)).clamp_max(row)
            rows.append(torch.cat((self.first[0, -1], own))[None, None])
        return torch.cat(rows, 1)

    def load_layer(self, tensors: dict[str, torch.Tensor], num_experts: int) -> None:
        """transformers keeps the experts in two tensors."""

        def expert(index: int, part: str) -> torch.Tensor:
            return tensors.pop(f"mlp.experts.{index}.{part}_proj.weight")

        parts = [[expert(i, part) for part in ("gate", "up", "down")] for i in range(num_experts)]
        if parts:
            tensors["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(p[:2]) for p in parts])
            tensors["mlp.experts.down_proj"] = torch.stack([p[2] for p in parts])
        self.layer.load_state_dict(tensors)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm_type(x.shape[-1], self.eps)
        norm.weight = torch.nn.Parameter(self.tensors[f"{name}.weight"])
        normed: torch.Tensor = norm(x)
        return normed

    @torch.inference_mode()
    def states(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Token j + 1 and hidden state j to the state at position j, `[T, H]`."""
        embedding = self.tensors.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        of_embedding, of_hidden, projection, last = self.names
        embedded = self._norm(of_embedding, embedding[torch.tensor(tokens)])
        embedded[0] *= not self.hides_first
        both = torch.cat((embedded, self._norm(of_hidden, hidden)), -1)
        x = (both @ self.tensors[f"{projection}.weight"].t())[None]
        positions = torch.arange(len(tokens))[None]
        rotary = self.model.model.rotary_emb(x, position_ids=positions)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        x = x[0] if isinstance(x, tuple) else x
        return self._norm(last, x[0])

    @torch.inference_mode()
    def target_states(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden states after its final norm, `[T, H]`."""
        output: torch.Tensor = self.model.model(torch.tensor([tokens]), use_cache=False)[0]
        return output[0]

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        output = self.tensors.get("shared_head.head.weight", self.model.lm_head.weight)
        return states @ output.t()

    def drafts(self, tokens: list[int], count: int, later: "Sequence[PlainMTP]" = ()) -> list[int]:
        """Greedy drafts after `tokens`, whose last one the target has not read: the module reads
        the target's states first, then its own. later: the modules that make the steps after the
        first, in place of this one."""
        hidden, drafted, self.first = self.target_states(tokens[:-1]), list[int](), None
        read = tokens[1:]
        for module in [self, *(later or [self] * count)][:count]:
            states = module.states(read, hidden)
            drafted.append(int(self.logits(states[-1]).argmax()))
            read = [*read, drafted[-1]]
            hidden = torch.cat((hidden, states[-1:]))
        return drafted

    def best_after(
        self, tokens: list[int], path: Sequence[int], topk: int, later: "Sequence[PlainMTP]" = ()
    ) -> list[tuple[int, float]]:
        """The best drafts after `tokens` and the drafts `path`, with their probabilities."""
        hidden, read, self.first = self.target_states(tokens[:-1]), tokens[1:], None
        modules = [self, *(later or [self] * len(path))]
        for module, token in zip(modules, path, strict=False):
            hidden = torch.cat((hidden, module.states(read, hidden)[-1:]))
            read = [*read, token]
        state = modules[len(path)].states(read, hidden)[-1]
        best = self.logits(state).softmax(-1).topk(topk)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def module_tensors(folder: Path, index: int, num_layers: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of module `index` of a checkpoint, by their names below `model.layers.N.`."""
    prefix = f"model.layers.{num_layers + index}."
    tensors = load_file(folder / "model.safetensors").items()
    return {name.removeprefix(prefix): x for name, x in tensors if name.startswith(prefix)}


def export_modules(folder: Path, exported: Path, num_layers: int = 3) -> None:
    """The modules of a checkpoint in a folder of their own, as SGLang exports the only one of
    DeepSeek V3: they become the layers from 0 on, without the copies of the target's weights. The
    checkpoint keeps none."""
    raw = json.loads((folder / "config.json").read_text())
    number = raw["num_nextn_predict_layers"]
    tensors, own = load_file(folder / "model.safetensors"), {}
    for index in range(number):
        prefix = f"model.layers.{num_layers + index}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensor = tensors.pop(name)
            if not name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
                own[name.replace(prefix, f"model.layers.{index}.")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    exported.mkdir()
    file = "nextn_layer_parameters.safetensors"
    save_file(own, exported / file, metadata={"format": "pt"})
    index_of = {"weight_map": dict.fromkeys(own, file)}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index_of))
    changed = {"num_hidden_layers": number, "architectures": [raw["architectures"][0] + "NextN"]}
    (exported / "config.json").write_text(json.dumps(raw | changed))


def save_predictable(folder: Path, num_modules: int = 1, **config: Any) -> None:
    """A checkpoint whose layers add little to the embedding, so that the modules, which pass the
    embedding on, are often right."""
    save_with_mtp(folder, num_modules, **config)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.04
        elif name.endswith("shared_head.norm.weight"):
            tensor.copy_(tensors["model.norm.weight"])
    size = len(tensors["model.norm.weight"])
    passed_on = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    for number in range(3, 3 + num_modules):
        for name in ("enorm.weight", "hnorm.weight"):
            tensors[f"model.layers.{number}.{name}"] = torch.ones(size)
        tensors[f"model.layers.{number}.eh_proj.weight"] = passed_on.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
