"""Drafts accepted by chance, at a probability that changes while an engine serves. Its text means
nothing then."""

import torch

from tllm_spec.executor.py_executor import PyExecutor


def script_acceptance(executor: PyExecutor, acceptance: float) -> list[float]:
    """Of every draft, given that those before it were accepted; graphs read it from the tensor
    written here. The probabilities that all of the first 1, 2, ... drafts are accepted.
    `synthetic_acceptance_rates` must be in the engine's options, with any values."""
    synthetic = executor.parts.sampler._synthetic
    assert synthetic is not None
    rates = [acceptance ** (1 + draft) for draft in range(len(synthetic.rates))]
    synthetic.rates.copy_(torch.tensor(rates, dtype=synthetic.rates.dtype))
    return rates
