"""The sizes of models whose rounds `benchmarks.scaling_model` predicts."""

from dataclasses import dataclass, replace

BLOCK = 128  # of FP8 weights that share a scale, in both dimensions


@dataclass(frozen=True)
class Shape:
    """Elements; bytes of a weight's element. `attention`: of a layer's matrices. `mlp`: of a layer
    without experts. `expert`: of one, a third of them in its down projection, which has
    `expert_inner` inputs; `shared`: of what every token takes next to them. `kv_bytes`: of a token
    in a layer; `kv_parts`: the most devices that can divide it."""

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: float
    mlp: float
    kv_bytes: int
    kv_parts: int
    weight_bytes: int = 2
    dense_layers: int = 0  # of a model with experts
    experts: int = 0
    top_k: int = 0
    expert: float = 0
    expert_inner: int = 0
    shared: float = 0
    is_latent: bool = False
    # The EAGLE-3 head: its fusion, its layer, and its vocabulary.
    head_fc: float = 0
    head_layer: float = 0
    head_vocab: int = 32000

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def expert_bytes(self, slices: int) -> float:
        """Bytes of an element, on average, if each expert is cut into `slices`. Slices of an FP8
        down projection that cut its blocks have 16 bits. No other layer of these models is cut
        so."""
        is_cut = slices > 1 and self.expert_inner % (slices * BLOCK) > 0
        return (2 * self.weight_bytes + 2) / 3 if is_cut else self.weight_bytes

    def total_bytes(self, slices: int) -> float:
        """Bytes of weights on all devices, with each expert in so many slices."""
        dense = self.layers * self.attention + (self.layers - self.sparse_layers) * self.mlp
        num_bytes = self.weight_bytes * (dense + self.sparse_layers * self.shared)
        experts = self.sparse_layers * self.experts * self.expert
        return num_bytes + self.expert_bytes(slices) * experts + 4 * self.vocab * self.hidden


def llama(name: str, layers: int, hidden: int, inner: int, heads: int, **options: int) -> Shape:
    """With 8 KV heads of 128, a head like a layer with twice the input, and 128,256 tokens."""
    kv, mlp = 1024, 3 * hidden * inner
    attention = hidden * (heads * 128 + 2 * kv) + heads * 128 * hidden
    head = 2 * hidden * (heads * 128 + 2 * kv) + heads * 128 * hidden + mlp
    sizes = {"attention": attention, "mlp": mlp, "head_fc": 3 * hidden**2, "head_layer": head}
    return Shape(name, layers, hidden, 128256, kv_bytes=4 * kv, kv_parts=8, **sizes, **options)


LLAMA_8B = llama("Llama 3.1 8B, bf16", 32, 4096, 14336, 32)
# The models of `benchmarks.experts`, to check against their rounds.
QWEN3_30B = Shape(
    "Qwen3 30B-A3B, bf16", *(48, 2048, 151936), attention=2048 * (4096 + 1024) + 4096 * 2048,
    mlp=0, kv_bytes=4 * 512, kv_parts=4, experts=128, top_k=8, expert=3 * 2048 * 768,
    expert_inner=768,
)  # fmt: skip
V3_STYLE = Shape(
    "V3-style, bf16", *(27, 2048, 129280),
    attention=2048 * (1536 + 576) + 16 * (128 * 2048 + 1536 * 192 + 512 * 256),
    mlp=3 * 2048 * 10944, kv_bytes=2 * 576, kv_parts=1, dense_layers=1, experts=64, top_k=8,
    expert=3 * 2048 * 1408, expert_inner=1408, shared=3 * 2048 * 1408, is_latent=True,
)  # fmt: skip
QWEN3_235B = Shape(
    "Qwen3 235B-A22B, FP8", *(94, 4096, 151936), attention=4096 * (8192 + 1024) + 8192 * 4096,
    mlp=0, kv_bytes=4 * 512, kv_parts=4, weight_bytes=1, experts=128, top_k=8,
    expert=3 * 4096 * 1536, expert_inner=1536, head_fc=3 * 4096**2,
    head_layer=2 * 4096 * 9216 + 8192 * 4096 + 3 * 4096 * 12288,
)  # fmt: skip
DEEPSEEK_V3 = Shape(
    "DeepSeek V3, FP8", *(61, 7168, 129280), attention=187e6, mlp=3 * 7168 * 18432,
    kv_bytes=2 * 576, kv_parts=1, weight_bytes=1, dense_layers=3, experts=256, top_k=8,
    expert=3 * 7168 * 2048, expert_inner=2048, shared=3 * 7168 * 2048, is_latent=True,
    head_fc=3 * 7168**2, head_layer=2 * 7168 * 9216 + 8192 * 7168 + 3 * 7168 * 18432,
)  # fmt: skip
LLAMA_70B = llama("Llama 3.3 70B, bf16", 80, 8192, 28672, 64)
LLAMA_70B_HALF = replace(LLAMA_70B, name="Llama 3.3 70B, 40 layers", layers=40)
QWEN3_235B_PART = replace(QWEN3_235B, name="Qwen3 235B-A22B, 61 layers", layers=61, weight_bytes=2)
SHAPES = (
    LLAMA_8B,
    LLAMA_70B,
    replace(QWEN3_235B, name="Qwen3 235B-A22B, bf16", weight_bytes=2),
    QWEN3_235B,
    replace(DEEPSEEK_V3, name="DeepSeek V3, bf16", weight_bytes=2),
    DEEPSEEK_V3,
)
