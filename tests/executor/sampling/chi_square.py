"""Pearson's chi-square test, without scipy."""

import torch


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The probability of counts that differ from `expected` as much as `observed` does, both `[N]`.

    Cells that expect fewer than 5 are pooled into one.
    """
    observed, expected = observed.double(), expected.double()
    large = expected >= 5
    observed = torch.cat((observed[large], observed[~large].sum().view(1)))
    expected = torch.cat((expected[large], expected[~large].sum().view(1)))
    used = expected > 0
    assert not observed[~used].any(), "something happened that cannot happen"
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum().double() - 1) / 2, statistic / 2))
