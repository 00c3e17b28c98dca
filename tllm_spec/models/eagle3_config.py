"""The shape of an EAGLE-3 draft head, read from its `config.json`.

A head is a Llama, Qwen3 or DeepSeek layer with a different input, so its configuration is a
`ModelConfig` with further fields. `eagle3_format.py` knows the published spellings."""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_kind import HeadKind
from tllm_spec.models.eagle3_format import check_layers, flat_config
from tllm_spec.models.head_checkpoint import EMBEDDING
from tllm_spec.models.tied_output import OUTPUT

Own = TypeVar("Own", bound="Eagle3Config")


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """`vocab_size` is the target's: the head reads its tokens."""

    kind: ClassVar[HeadKind] = "EAGLE-3"

    draft_vocab_size: int | None
    """Tokens that the head proposes; None: all of the target's."""
    target_hidden_size: int
    capture_layers: tuple[int, ...] | None
    """Layers of the target whose outputs the head was trained on, in the order of its input."""
    num_aux_hidden_states: int | None
    """How many captured states the head reads, if the config says so."""
    norm_before_fc: bool
    """One RMSNorm over all captured states together, before `fc_norm` and `fc`."""
    fc_norm: bool
    """An RMSNorm for each captured state, before `fc`."""
    norm_before_residual: bool
    """The first layer's residual is the normed hidden state instead of the hidden state."""
    norm_output: bool
    """The next step reads the hidden state after the final norm instead of before it."""
    bias: bool
    """Whether `fc` has one."""
    unknown_keys: tuple[str, ...] = field(compare=False)
    """Those of config.json, taken to change nothing."""
    mask_token: int | None
    """P-EAGLE: the token that stands for drafts in the rows that draft all tokens at once; None:
    the head drafts one token after the other."""

    @property
    def output_size(self) -> int:
        """The width of the head's logits."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_width(self) -> bool:
        """Whether the target's embedding and output layer are of another width."""
        return self.hidden_size != self.target_hidden_size

    @property
    def has_own_lm_head(self) -> bool:
        """Without a checkpoint. Otherwise the output layer is the target's, or an embedding."""
        if self.tie_word_embeddings:
            return self.output_size < self.vocab_size
        return self.draft_vocab_size is not None or self.has_own_width

    @property
    def own_modules(self) -> Set[str]:
        """`EMBEDDING` and `OUTPUT`, if the head has its own without a checkpoint."""
        names = {EMBEDDING: self.has_own_width, OUTPUT: self.has_own_lm_head}
        return {name for name, is_own in names.items() if is_own}

    @classmethod
    def from_pretrained(cls, path: Path) -> "Eagle3Config":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        return cls.from_dict(read_config(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Eagle3Config":
        """The same, from the parsed file."""
        flat = flat_config(raw)
        decoder = ModelConfig.from_dict(flat)
        if decoder.mla is not None:  # trainers of heads give all norms the same epsilon
            decoder = replace(decoder, mla=replace(decoder.mla, norm_eps=decoder.rms_norm_eps))
        config = cls(
            **vars(decoder),
            draft_vocab_size=_draft_vocab_size(flat),
            target_hidden_size=int(flat.get("target_hidden_size") or flat["hidden_size"]),
            capture_layers=flat["capture_layers"],
            num_aux_hidden_states=flat.get("num_aux_hidden_states"),
            norm_before_fc=bool(flat.get("norm_before_fc")),
            fc_norm=bool(flat.get("fc_norm") or flat.get("use_aux_norm")),
            norm_before_residual=bool(flat.get("norm_before_residual")),
            norm_output=bool(flat.get("norm_output")),
            bias=bool(flat.get("bias")),
            unknown_keys=flat["unknown_keys"],
            mask_token=flat["mask_token"],
        )
        check_head(config)
        return config

    def for_target(self: Own, target: ModelConfig, num_captured: int) -> Own:
        """The configuration with the target's vocabulary, which may be padded to another size or
        have added tokens if the head proposes only some of it, and with the width of the target's
        states, which some heads of another width do not name. Raises ValueError unless the head was
        trained for such a target with `num_captured` captured layers."""
        names_width = self.target_hidden_size != self.hidden_size
        may_differ = self.output_size < min(self.vocab_size, target.vocab_size)
        for key, own, wanted, is_free in (
            ("target_hidden_size", self.target_hidden_size, target.hidden_size, not names_width),
            ("vocab_size", self.vocab_size, target.vocab_size, may_differ),
        ):
            if own != wanted and not is_free:
                raise ValueError(
                    f"{key} of the {self.kind} head is {own}, the target's is {wanted}; they must "
                    "be equal, since the head reads the target's tokens and hidden states."
                )
        from_layers = None if self.capture_layers is None else len(self.capture_layers)
        for key, trained in (
            ("eagle_aux_hidden_state_layer_ids", from_layers),
            ("num_aux_hidden_states", self.num_aux_hidden_states),
        ):
            if trained not in (None, num_captured):
                raise ValueError(
                    f"{num_captured} layers of the target are captured; the {self.kind} head reads "
                    f"{trained} ({key} of its config.json). Set eagle3_layers_to_capture to "
                    f"{trained} layers."
                )
        if self.mask_token is not None and not 0 <= self.mask_token < target.vocab_size:
            raise ValueError(
                f"the mask token of the head is {self.mask_token}; it must be a token of the "
                f"target, 0 to {target.vocab_size - 1}."
            )
        return replace(self, vocab_size=target.vocab_size, target_hidden_size=target.hidden_size)


def _draft_vocab_size(flat: dict[str, Any]) -> int | None:
    """`truncated_vocab_size` is another name for it; there the whole vocabulary's size means that
    nothing is truncated."""
    size, truncated = flat.get("draft_vocab_size"), flat.get("truncated_vocab_size")
    if truncated in (None, flat["vocab_size"]):
        return size
    if size not in (None, truncated):
        raise ValueError(
            f"draft_vocab_size of the EAGLE-3 head is {size} and truncated_vocab_size is "
            f"{truncated}; they must be equal."
        )
    return int(truncated)


def check_head(config: Eagle3Config) -> None:
    """Raises ValueError for quantised weights, and for vocabularies that do not fit each other."""
    check_layers(config, config.kind)
    if not 0 < config.output_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}; it must be 1 to vocab_size, which is "
            f"{config.vocab_size}, or null."
        )
