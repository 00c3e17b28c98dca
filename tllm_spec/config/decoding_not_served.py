"""Options of speculation in TensorRT-LLM that are not served, each with the reason."""

from collections.abc import Mapping

from tllm_spec.config.option_checks import NotServed

NO_GATE = (
    "it is one of TensorRT-LLM's older names; use acceptance_rate_threshold with "
    "acceptance_rate_window_size"
)
OLD_SA_NAME = "it is one of TensorRT-LLM's older names; use sa_config"

DECODING_NOT_SERVED: Mapping[str, NotServed] = {
    "acceptance_length_threshold": NotServed((None,), NO_GATE),
    "acceptance_window": NotServed((None, 0), NO_GATE),
    "allow_advanced_sampling": NotServed(
        (True, False), "every sampling option works with speculation"
    ),
    "draft_tensor_parallel_size": NotServed(
        (None,), "target and drafter share tensor_parallel_size"
    ),
    "parallel_drafting": NotServed(
        (None, False), "a P-EAGLE head and a PARD model draft all tokens at once without it"
    ),
    "use_heterogeneous_vocab": NotServed(
        (None, True, False), "another tokenizer of a draft model is always mapped"
    ),
    "max_batch_size": NotServed(
        (None,), "the batch is bounded by the model's own max_batch_size", ignored=(int,)
    ),
    "min_runtime_draft_len": NotServed(
        (None, 0), "draft_len_schedule and adaptive say how short drafts may become"
    ),
    "enable_penalty": NotServed((True, False), "penalties always work with speculation"),
    "advanced_sampling_mode": NotServed(("full",), "no sampling filter is left out"),
    "moe_backend": NotServed((None, "AUTO"), "only dense draft models are served"),
    "sa_spec_threshold": NotServed((None, 4), OLD_SA_NAME),
    "spec_dec_variant": NotServed((None,), "decoding_type names the method"),
    "speculative_model_subfolder": NotServed(
        (None, ""), "speculative_model is the folder that has config.json"
    ),
    "use_sa_spec": NotServed((False,), OLD_SA_NAME),
}
