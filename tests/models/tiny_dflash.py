"""Random DFlash, DFlash2 and DSpark heads of a few thousand parameters in both published spellings,
and a transcription of the formats in plain torch."""

import json
from pathlib import Path
from typing import Any, Literal

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
    markov: Literal["vanilla", "gated", "rnn"] | None = None,
    markov_rank: int = 8,
    selector: dict[str, int] | None = None,
    seed: int = 0,
    sizes: dict[str, int] = SIZES,
    **config: Any,
) -> Path:
    """Fills `folder`. layers: of the target, by their outputs. With a draft vocabulary the head has
    an output layer of its own, and with `target_hidden_size` an embedding, too. markov: of a
    DSpark head; selector: DFlash2's keys; neither: it is a DFlash head."""
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
    method = "DFlash"
    if markov is not None:
        method = "DSpark"
        config = {"markov_head_type": markov, "markov_rank": markov_rank} | config
        own_tensors = random_tensors(_dspark_shapes(sizes, draft_vocab_size, config), generator)
        # So that the token before changes which drafts are the best.
        tensors |= {name: tensor * 8 for name, tensor in own_tensors.items()}
    if selector is not None:
        method = "DFlash2"
        tensors |= random_tensors(_dflash2_shapes(sizes, selector), generator)
        tensors["candidate_selector.successor_codebook"] *= 4
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", tensors)
    own: dict[str, Any] = {"block_size": block_size, "architectures": [f"{method}DraftModel"]}
    if speculators:
        own |= {
            "speculators_model_type": method.lower(),
            "transformer_layer_config": LAYER | sizes,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "mask_token_id": mask_token,
            "sample_from_anchor": method == "DSpark",
            **(selector or {}),
        }
    else:
        named = {"mask_token_id": mask_token, "target_layer_ids": list(layers)} | (selector or {})
        own |= LAYER | sizes | (named if method == "DSpark" else {"dflash_config": named})
    (folder / "config.json").write_text(json.dumps(own | config))
    return folder


def _dflash2_shapes(sizes: dict[str, int], selector: dict[str, int]) -> dict[str, tuple[int, ...]]:
    size, taps, rank = sizes["hidden_size"], selector["conv_kernel_size"], selector["selector_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.hidden_projection.weight": (rank, size),
        "candidate_selector.predecessor_codebook": (sizes["vocab_size"], rank),
        "candidate_selector.successor_codebook": (sizes["vocab_size"], rank),
    }
    for layer in range(sizes["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            name = f"layers.{layer}.{part}_conv"
            shapes[f"{name}.base_kernel"] = (2, taps, size)
            outputs = 2 * taps * size // selector["conv_group_size"]
            shapes[f"{name}.kernel_projection.weight"] = (outputs, size)
    return shapes


def _dspark_shapes(
    sizes: dict[str, int], draft_vocab_size: int | None, config: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    size, rank, vocab = sizes["hidden_size"], config["markov_rank"], sizes["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab_size or vocab, rank)
    if config["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, size + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, size + 2 * rank)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head", True):
        inputs = size + rank * config.get("confidence_head_with_markov", True)
        shapes["confidence_head.proj.weight"] = (1, inputs)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


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

    def block(self, newest: int, captured: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """The logits of all drafts, `[K, V_draft]`, each after those before it. captured `[T, n *
        H]`: the target's states of the text before the newest token."""
        hidden = self.states(newest, captured, len(drafts))
        logits = F.linear(hidden, self.output)
        if (topk := self.config.get("selector_top_k")) is not None:
            return self.selected(logits, hidden, [newest, *drafts[:-1]], topk)
        kind = self.config.get("markov_head_type")
        if kind is None or not self.config["markov_rank"]:
            return logits
        memory = torch.zeros(self.config["markov_rank"])
        for row, before in enumerate([newest, *drafts[:-1]]):
            own = self.tensors["markov_head.markov_w1.weight"][before]
            if kind == "gated":
                both = torch.cat((hidden[row], own))
                own = own * self.linear("markov_head.gate_proj", both).sigmoid()
            if kind == "rnn":
                joint = self.linear("markov_head.joint_proj", torch.cat((memory, own, hidden[row])))
                gate, new, out = joint.chunk(3)
                memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
                own = out.tanh()
            logits[row] += self.tensors["markov_head.markov_w2.weight"] @ own
        return logits

    def selected(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: list[int], topk: int
    ) -> torch.Tensor:
        """DFlash2's scores of the candidates; other tokens are not drafted."""
        name, scores = "candidate_selector", torch.full_like(logits, -torch.inf)
        predecessor, successor = (
            self.tensors[f"{name}.{which}_codebook"] for which in ("predecessor", "successor")
        )
        for row, token in enumerate(before):
            own = self.linear(f"{name}.hidden_projection", hidden[row])
            for candidate in logits[row].topk(topk).indices:
                added = (predecessor[token] * own * successor[candidate]).sum()
                scores[row, candidate] = logits[row, candidate] + added
        return scores

    def convolved(
        self, name: str, side: int, normed: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Before (0) or after (1) attention or MLP; without a convolution the rows as they are."""
        if (base := self.tensors.get(f"{name}.base_kernel")) is None:
            return rows
        added = self.linear(f"{name}.kernel_projection", normed)
        added = added.view(len(rows), *base.shape[:2], -1)[:, side]
        result = torch.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(base.shape[1], row + 1)):
                group = rows.shape[1] // added.shape[2]
                weight = base[side, tap] + added[row, tap].repeat_interleave(group)
                result[row] += weight * rows[row - tap]
        return result

    def confidence(self, newest: int, captured: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """How likely each draft is to be accepted after those before it, `[K]`."""
        hidden = self.states(newest, captured, len(drafts))
        before = torch.tensor([newest, *drafts[:-1]])
        own = self.tensors["markov_head.markov_w1.weight"][before]
        both = torch.cat((hidden, own), -1)
        return self.linear("confidence_head.proj", both).flatten().sigmoid()

    def states(self, newest: int, captured: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """The states of the drafting rows after the final norm, `[K, H]`."""
        text = self.norm("hidden_norm", self.linear("fc", captured))
        first = 0 if self.config.get("markov_head_type") is not None else 1
        first = 1 - self.config.get("sample_from_anchor", not first)
        masks = [self.config["mask_token_id"]] * (num_drafts - 1 + first)
        hidden = self.embedding[torch.tensor([newest, *masks])]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = self.norm(f"{name}.input_layernorm", hidden)
            conv = f"{name}.attention_conv"
            attended = self.block_attention(layer, self.convolved(conv, 0, x, x), text)
            hidden = hidden + self.convolved(conv, 1, x, attended)
            x = self.norm(f"{name}.post_attention_layernorm", hidden)
            conv = f"{name}.mlp_conv"
            rows = self.convolved(conv, 0, x, x)
            gate, up = (self.linear(f"{name}.mlp.{kind}_proj", rows) for kind in ("gate", "up"))
            rows = self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
            hidden = hidden + self.convolved(conv, 1, x, rows)
        return self.norm("norm", hidden[first:])

    def block_attention(self, layer: int, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Every row of the block sees the text and the whole block; in layers with a window the
        last tokens up to itself, unless the head says otherwise."""
        name, config = f"layers.{layer}.self_attn", self.config
        slides = config.get("layer_types", [""] * 9)[layer] == "sliding_attention"
        if config.get("use_swa") and not slides:
            slides, config = True, config | {"sliding_window_non_causal": True}
        sees_all = config.get("sliding_window_non_causal", "selector_rank" in config)
        is_causal = config.get("is_causal", slides and not sees_all)
        dim, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        both = torch.cat((text, x))
        q = self.linear(f"{name}.q_proj", x).view(len(x), -1, dim)
        k, v = (self.linear(f"{name}.{kind}_proj", both).view(len(both), -1, dim) for kind in "kv")
        q = self.rotated(self.norm(f"{name}.q_norm", q), len(text))
        k = self.rotated(self.norm(f"{name}.k_norm", k))
        group, outputs = q.shape[1] // kv_heads, []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T * dim**-0.5
            ones = torch.ones_like(scores).bool()
            if is_causal:
                scores = scores.masked_fill(ones.triu(1 + len(text)), -torch.inf)
            if slides:
                window = config.get("swa_window_size") or config["sliding_window"]
                scores = scores.masked_fill(ones.tril(len(text) - window), -torch.inf)
            outputs.append(scores.softmax(-1) @ v[:, head // group])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))
