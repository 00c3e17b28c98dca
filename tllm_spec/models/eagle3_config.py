"""The shape of an EAGLE-3 draft head, read from its `config.json`.

A head is one Llama layer and a little more, so its configuration is a Llama's and a little more.
Which layers of the target are captured in the end, weights and devices are unknown here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_spec.models.config import ModelConfig, read_json

ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
# Variants that compute something else, each with the one value that is served; a missing key means
# that value.
_SERVED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
}


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """`vocab_size` is the target's: the head reads its tokens."""

    draft_vocab_size: int | None
    """Tokens that the head proposes; None: all of the target's, with the target's output layer."""
    target_hidden_size: int
    capture_layers: tuple[int, ...] | None
    """Layers of the target whose outputs the head was trained on, in the order of its input."""
    num_aux_hidden_states: int | None
    """How many of them, where the config says so."""
    norm_output: bool
    """The recurrent hidden state is taken after the final norm instead of before."""
    fc_norm: bool
    """Each captured state has a norm of its own before `fc`."""
    bias: bool
    """Of `fc`."""

    @property
    def output_size(self) -> int:
        """The width of the head's logits."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_lm_head(self) -> bool:
        """Else the output layer is the target's, or its embedding."""
        return self.draft_vocab_size is not None and not self.tie_word_embeddings

    @classmethod
    def from_pretrained(cls, path: Path) -> "Eagle3Config":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        return cls.from_dict(read_json(path / "config.json"))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Eagle3Config":
        """The same, from the parsed file."""
        architecture = _architecture(raw)
        llama = ModelConfig.from_dict(raw | {"architectures": ["LlamaForCausalLM"]})
        eagle: dict[str, Any] = raw.get("eagle_config") or {}
        _refuse_unserved(raw | eagle, llama)
        captured = eagle.get("eagle_aux_hidden_state_layer_ids")
        config = cls(
            **vars(llama) | {"architecture": architecture},
            draft_vocab_size=raw.get("draft_vocab_size"),
            target_hidden_size=int(raw.get("target_hidden_size") or llama.hidden_size),
            capture_layers=tuple(captured) if captured else None,
            num_aux_hidden_states=raw.get("num_aux_hidden_states"),
            norm_output=bool(raw.get("norm_output")),
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            bias=bool(raw.get("bias")),
        )
        _check_vocabulary(config)
        return config

    def check_target(self, target: ModelConfig, num_captured: int) -> None:
        """Raises ValueError unless the head was trained for such a target with so many captured
        layers."""
        for key, own, wanted in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if own != wanted:
                raise ValueError(
                    f"{key} of the EAGLE-3 head is {own}, the target's is {wanted}; the head reads "
                    "the target's "
                    "embeddings and hidden states, so it must be the same."
                )
        from_layers = None if self.capture_layers is None else len(self.capture_layers)
        for key, trained in (
            ("eagle_aux_hidden_state_layer_ids", from_layers),
            ("num_aux_hidden_states", self.num_aux_hidden_states),
        ):
            if trained not in (None, num_captured):
                raise ValueError(
                    f"{num_captured} layers of the target are captured; the EAGLE-3 head reads "
                    f"{trained} "
                    f"({key} of its config.json). Set eagle3_layers_to_capture to so many layers."
                )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"architectures of the EAGLE-3 head is {names}; served is one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    return str(names[0])


def _refuse_unserved(raw: dict[str, Any], llama: ModelConfig) -> None:
    for key, served in _SERVED.items():
        value = raw.get(key)
        if value is not None and value != served:
            raise ValueError(f"{key} of the EAGLE-3 head is {value!r}; only {served} is served.")
    if llama.sliding_window is not None:
        raise ValueError(
            f"sliding_window of the EAGLE-3 head is {llama.sliding_window}; its attention is "
            "served over the "
            "whole text only."
        )


def _check_vocabulary(config: Eagle3Config) -> None:
    if not 0 < config.output_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}; it must be 1 to vocab_size, which is "
            f"{config.vocab_size}, or null."
        )
    if config.tie_word_embeddings and config.output_size != config.vocab_size:
        raise ValueError(
            f"tie_word_embeddings is true and draft_vocab_size is {config.draft_vocab_size}; "
            "embeddings of all "
            f"{config.vocab_size} tokens cannot be the output layer of fewer."
        )
