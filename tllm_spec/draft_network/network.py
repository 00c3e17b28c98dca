"""The network of a draft model or EAGLE-3 head that runs outside torch: its definition in torch,
which is exported to ONNX for all backends, and its run in onnxruntime.

The KV pool is an input that the network only reads. The keys and values of the step's tokens are
outputs, which the caller writes into the pool. So pages, prefix reuse and rewinds are as for a
draft model in torch."""

import functools
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.eagle3 import Eagle3Head, Eagle3Layer
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import MLP, Attention, CausalLM, DecoderLayer, DecoderModel

# TensorRT asks for addresses at multiples of so many bytes. torch allocates at multiples of 512.
ALIGNMENT = 256
BATCH, WINDOW, CACHED, KV_ROWS = "batch", "window", "cached", "kv_rows"
TOKEN_IDS, POSITIONS, OWN_KEYS = "token_ids", "positions", "own_keys"
CACHED_ROWS, LOGITS = "cached_rows", "logits"
STATES, WANTED, NEXT_STATES = "states", "wanted", "next_states"  # of heads
NEVER = 1 << 40  # a position that no token has
OPSET = 18

NetworkModel = CausalLM | Eagle3Head
Tensors = Mapping[str, torch.Tensor]


class Network(Protocol):
    """A `StepNetwork` that runs outside torch."""

    @property
    def may_be_captured(self) -> bool:
        """Whether a CUDA graph can hold a run."""

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        """All tensors are contiguous, on the network's device and at multiples of `ALIGNMENT` in
        their storage; `outputs` have the right shapes and are overwritten. On CUDA the run is in
        order with torch's current stream."""


@dataclass(frozen=True)
class ExternalDraft:
    """A draft model, or the layers of a head, whose network runs outside torch. `head`: what is
    left to torch, which is `fuse`; None: it is a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    network: Network
    head: DraftHead | None = None

    @property
    def num_logits(self) -> int:
        """Logits of one row."""
        return self.config.vocab_size if self.head is None else self.head.num_logits


def pool_inputs(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values in the pool."""
    return f"keys.{layer}", f"values.{layer}"


def new_outputs(layer: int) -> tuple[str, str]:
    """Names of the keys and values that a layer has computed."""
    return f"new_keys.{layer}", f"new_values.{layer}"


@dataclass(frozen=True)
class StepNetwork:
    """One step of a dense decoder of the Llama family, or of an EAGLE-3 head, over pages of KV, in
    operations that every backend has. Norms, rotation and softmax are computed in float32.

    Inputs, with B sequences, W tokens of each, and L entries before them: `token_ids` `[B, W]` and
    `positions` `[B, W]` int64; `own_keys` `[B, W]` int64: the positions, but `NEVER` for padding,
    which no row sees; `cached_rows` `[B, L]` int64: rows of the pool with the keys and values
    before the window, in any order, -1 for none; of a head `states` `[B, W, H]`, and `wanted` `[B]`
    int64: one row of each window, counted through all windows; `keys.i` and `values.i`
    `[kv_rows, Hkv, D]`: the pool's layer i.

    Outputs: `logits` `[B, V]` after the last token of each window, or after the head's wanted row,
    whose `next_states` `[B, H]` follow; `new_keys.i` and `new_values.i` `[B, W, Hkv, D]`.

    A head's `fc`, which makes a state of the target's, is not part of it, since steps after the
    first read the head's own state."""

    config: ModelConfig
    head: Eagle3Config | None
    """The same of a head."""
    dtype: torch.dtype
    weights: Tensors
    """On the host; matrices are `[K, N]`."""

    @classmethod
    def of(cls, model: NetworkModel) -> "StepNetwork":
        weights = {name: each.detach().cpu().contiguous() for name, each in _weights_of(model)}
        head = model.config if isinstance(model, Eagle3Head) else None
        return cls(model.config, head, model.dtype, weights)

    @property
    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """Shapes of the inputs, in order. A dimension with a name is known when the network
        runs."""
        config, window = self.config, (BATCH, WINDOW)
        found: dict[str, tuple[int | str, ...]] = {TOKEN_IDS: window, POSITIONS: window}
        found |= {OWN_KEYS: window, CACHED_ROWS: (BATCH, CACHED)}
        if self.head is not None:
            found |= {STATES: (*window, config.hidden_size), WANTED: (BATCH,)}
        for layer in range(config.num_layers):
            pool = KV_ROWS, config.num_kv_heads, config.head_dim
            found |= dict.fromkeys(pool_inputs(layer), pool)
        return found

    @property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """The dimensions of the outputs that have names, in order."""
        found: dict[str, tuple[str, ...]] = {LOGITS: (BATCH,)}
        if self.head is not None:
            found[NEXT_STATES] = (BATCH,)
        for layer in range(self.config.num_layers):
            found |= dict.fromkeys(new_outputs(layer), (BATCH, WINDOW))
        return found

    @functools.cached_property
    def onnx_graph(self) -> bytes:
        """The network as an ONNX model. Its initializers have the weights' names, and their data
        elsewhere."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "network.onnx"
            self._export(path)
            model = onnx.load_model(path)
        parameters = list(model.graph.input)
        del model.graph.input[:]
        for each in parameters:
            if each.name in self.inputs:
                model.graph.input.append(each)
                continue
            constant = model.graph.initializer.add(
                name=each.name,
                dims=self.weights[each.name].shape,
                data_type=each.type.tensor_type.elem_type,
                data_location=onnx.TensorProto.EXTERNAL,
            )
            constant.external_data.add(key="location", value="weights")
        return bytes(model.SerializeToString())

    def _export(self, path: Path) -> None:
        """Writes an ONNX model whose last inputs are the weights."""
        # Shapes are enough. Dimensions of 1 might be taken for those that are broadcast.
        sizes = {BATCH: 2, WINDOW: 3, CACHED: 4, KV_ROWS: 5}
        example = {
            name: torch.empty(
                [size if isinstance(size, int) else sizes[size] for size in shape],
                dtype=self.dtype if isinstance(shape[-1], int) else torch.int64,
                device="meta",
            )
            for name, shape in self.inputs.items()
        }
        example |= {name: weight.to("meta") for name, weight in self.weights.items()}
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            # The exporter that is to replace it takes 30 times as long and needs more packages.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                _Exported(self),
                tuple(example.values()),
                path,
                dynamo=False,
                do_constant_folding=False,
                opset_version=OPSET,
                input_names=list(example),
                output_names=list(self.outputs),
                dynamic_axes={
                    name: {i: size for i, size in enumerate(shape) if isinstance(size, str)}
                    for name, shape in (self.inputs | self.outputs).items()
                },
            )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        own_keys: torch.Tensor,
        cached_rows: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        is_cached, rows = cached_rows >= 0, cached_rows.clamp(min=0)
        # Entries of the cache come before the whole window.
        before = cached_rows.clamp(max=0).masked_fill(~is_cached, NEVER)
        keys = torch.cat((before, own_keys), 1)
        visible = positions[:, None, None, :, None] >= keys[:, None, None, None, :]
        is_absent = ~is_cached[:, :, None, None]
        rotary = self.weights["cos_sin"][positions]
        hidden, wanted, pools = self.weights["embedding"][token_ids], None, others
        if self.head is not None:
            states, wanted, pools = others[0], others[1], others[2:]
        kv: list[torch.Tensor] = []
        last = self.config.num_layers - 1
        for layer in range(last + 1):
            normed = self._norm(hidden, f"input_norm_{layer}")
            if self.head is not None and not layer:
                own = self._norm(states, "hidden_norm")
                normed = torch.cat((normed, own), 2)
                hidden = own if self.head.norm_before_residual else states
            # Rows that do not count become zeros: they may be another request's, and a weight of
            # zero times NaN is NaN.
            pool = pools[2 * layer : 2 * layer + 2]
            cached = [each[rows].masked_fill(is_absent, 0.0) for each in pool]
            attended, new_kv = self._attend(layer, normed, cached, visible, rotary)
            kv += new_kv
            if layer == last:
                hidden, attended = (_taken(each, wanted) for each in (hidden, attended))
            hidden = self._add_branches(layer, hidden, attended)
        normed = self._norm(hidden, "norm")
        logits = self._linear(normed, "output")
        if self.head is None:
            return logits, *kv
        return logits, normed if self.head.norm_output else hidden, *kv

    def _attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        cached: list[torch.Tensor],
        visible: torch.Tensor,
        rotary: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """`[B, W, Hq * D]`: attention of the window's rows to the cache `[B, L, Hkv, D]` and to the
        window; and the window's keys and values. visible: `[B, 1, 1, W, L + W]`; rotary:
        `[B, W, 2, 1, D]`."""
        heads, size = self.config.num_kv_heads, self.config.head_dim
        window = rotary.shape[:2]
        parts = self._linear(hidden, f"qkv_{layer}").reshape(*window, -1, size)
        q, k, v = parts.split_with_sizes((self.config.num_heads, heads, heads), 2)
        q = self._rotated(q, rotary, f"q_norm_{layer}") * size**-0.5
        k = self._rotated(k, rotary, f"k_norm_{layer}").to(self.dtype)
        # [B, Hkv, G, W, D] and [B, Hkv, 1, L + W, D]: a group of query heads shares its KV head.
        q = q.to(self.dtype).reshape(*window, heads, -1, size).permute(0, 2, 3, 1, 4)
        keys, values = (
            torch.cat(both, 1).transpose(1, 2).unsqueeze(2)
            for both in zip(cached, (k, v), strict=True)
        )
        scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~visible, -torch.inf)
        attended = scores.softmax(-1).to(self.dtype) @ values
        return attended.permute(0, 3, 1, 2, 4).reshape(*window, -1), (k, v)

    def _rotated(self, heads: torch.Tensor, rotary: torch.Tensor, norm: str) -> torch.Tensor:
        """`[B, W, H, D]` in float32 with the rotary embedding, after the norm if there is one."""
        heads = heads.float()
        if norm in self.weights:
            heads = self._normed(heads, norm)
        swapped = torch.cat(heads.split_with_sizes([self.config.head_dim // 2] * 2, -1)[::-1], -1)
        return heads * rotary[:, :, 0] + swapped * rotary[:, :, 1]

    def _add_branches(
        self, layer: int, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after the output projection of attention, and the MLP."""
        hidden = hidden + self._linear(attended, f"o_{layer}")
        normed = self._norm(hidden, f"mlp_norm_{layer}")
        sizes = [self.config.intermediate_size] * 2
        gate, up = self._linear(normed, f"gate_up_{layer}").split_with_sizes(sizes, -1)
        return hidden + self._linear(F.silu(gate) * up, f"down_{layer}")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._normed(x.float(), name).to(self.dtype)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm of float32 x over its last dimension."""
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config.rms_norm_eps) * self.weights[name]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        output, bias = x @ self.weights[name], self.weights.get(f"{name}_bias")
        return output if bias is None else output + bias


class _Exported(nn.Module):
    """A network that is given its weights after its inputs: the exporter compares the data of
    parameters, and leaves out equal ones."""

    def __init__(self, network: StepNetwork) -> None:
        super().__init__()
        self._network = network

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names, num_inputs = list(self._network.weights), len(self._network.inputs)
        weights = dict(zip(names, tensors[num_inputs:], strict=True))
        return replace(self._network, weights=weights).forward(*tensors[:num_inputs])


def _taken(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """`[B, N]` of `[B, W, N]`: the wanted rows, or the last ones."""
    return x[:, -1] if wanted is None else x.flatten(0, 1)[wanted]


def _weights_of(model: NetworkModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The network's constants by name; matrices are `[K, N]`."""
    inner: Eagle3Head | DecoderModel
    if isinstance(model, Eagle3Head):
        inner, embedding, output = model, model.embedding, model.output
    else:
        inner, embedding, output = model.model, model.model.embed_tokens, model.lm_head
    yield from (("embedding", embedding.weight), ("cos_sin", inner.cos_sin.float()))
    linears: dict[str, Linear] = {"output": output}
    norms: dict[str, torch.Tensor] = {"norm": inner.norm.weight}
    for index, layer in enumerate(inner.layers):
        assert isinstance(layer, DecoderLayer | Eagle3Layer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, Attention) and isinstance(mlp, MLP)
        assert layer.input_layernorm is not None
        linears |= {f"qkv_{index}": attention.qkv_proj, f"o_{index}": attention.o_proj}
        linears |= {f"gate_up_{index}": mlp.gate_up_proj, f"down_{index}": mlp.down_proj}
        norms[f"input_norm_{index}"] = layer.input_layernorm.weight
        norms[f"mlp_norm_{index}"] = layer.post_attention_layernorm.weight
        if isinstance(layer, Eagle3Layer):
            norms["hidden_norm"] = layer.hidden_norm.weight
        if (heads := attention.qk_norm) is not None:
            norms[f"q_norm_{index}"], norms[f"k_norm_{index}"] = heads.weight[[0, heads.num_heads]]
    yield from ((name, weight.float()) for name, weight in norms.items())
    for name, linear in linears.items():
        yield name, linear.full_weight().t()
        if linear.bias is not None:
            yield f"{name}_bias", linear.bias


class OnnxRuntimeNetwork:
    """Runs the network of a float32 model in onnxruntime, on a CPU. It shares the weights' memory
    with the model."""

    may_be_captured = False

    def __init__(self, model: NetworkModel, num_threads: int) -> None:
        import onnxruntime

        network = StepNetwork.of(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        # Waiting threads would take time from the target's.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        weights = network.weights
        self._weights = [
            onnxruntime.OrtValue.ortvalue_from_numpy(weight.numpy()) for weight in weights.values()
        ]
        options.add_external_initializers(list(weights), self._weights)
        self._session = onnxruntime.InferenceSession(
            network.onnx_graph, options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        types = {torch.float32: "float32", torch.int64: "int64"}
        binding = self._session.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                assert tensor.is_contiguous()
                bind(name, "cpu", 0, types[tensor.dtype], tensor.shape, tensor.data_ptr())
        self._session.run_with_iobinding(binding)
