"""An EAGLE-3 head with latent attention (arXiv 2405.04434, section 2.1) in plain torch."""

import math

import torch

from tests.models.eagle3_reference import Eagle3Reference


class LatentReference(Eagle3Reference):
    """Keys and values of all heads are computed from the latents, which are not kept."""

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        config, length = self.config, len(x)
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        if config["q_lora_rank"] is None:
            queries = self.linear(f"{name}.q_proj", x)
        else:
            low = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x))
            queries = self.linear(f"{name}.q_b_proj", low)
        queries = queries.view(length, heads, nope + rope)
        latent, shared = self.linear(f"{name}.kv_a_proj_with_mqa", x).split((rank, rope), -1)
        both = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", latent))
        keys, values = both.view(length, heads, -1).split((nope, config["v_head_dim"]), -1)
        turned, shared = self.rotated(queries[..., nope:]), self.rotated(shared[:, None])[:, 0]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            scores = queries[:, head, :nope] @ keys[:, head].T + turned[:, head] @ shared.T
            scores = scores * (nope + rope) ** -0.5 * self.mscale("mscale_all_dim") ** 2
            outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ values[:, head])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))

    def mscale(self, key: str) -> float:
        """YaRN's factor (arXiv 2309.00071, section 3.4) with the weight `key`."""
        fields = self.config.get("rope_scaling") or {}
        return 0.1 * fields.get(key, 0.0) * math.log(fields.get("factor", 1.0)) + 1.0

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Neighbours are real and imaginary parts: `[T, heads, rope]`."""
        angles = torch.outer(torch.arange(len(heads)).float(), self.frequencies(heads.shape[-1]))
        factor = self.mscale("mscale") / self.mscale("mscale_all_dim")
        turns = torch.polar(torch.full_like(angles, factor), angles)[:, None]
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def frequencies(self, size: int) -> torch.Tensor:
        theta, fields = self.config.get("rope_theta", 10000.0), self.config.get("rope_scaling")
        pair = torch.arange(size // 2)
        plain = theta ** (-2 * pair / size)
        if fields is None:
            return plain
        length = fields["original_max_position_embeddings"]

        def pair_of(turns: float) -> float:
            """The pair that turns so often within the original length."""
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair_of(fields["beta_fast"])), 0)
        last = min(math.ceil(pair_of(fields["beta_slow"])), size - 1)
        slowed = ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
        return plain * (1 - slowed) + plain / fields["factor"] * slowed
