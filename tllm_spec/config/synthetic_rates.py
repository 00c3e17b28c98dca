"""Synthetic acceptance rates, for benchmarks: what they may be."""

from itertools import pairwise

# A number for each draft of a chain, or a list for each depth of a tree.
Rates = tuple[float, ...] | tuple[tuple[float, ...], ...]


def rate_problem(rates: Rates, *, is_tree: bool) -> str | None:
    """What is wrong with synthetic acceptance rates; None: nothing."""
    if any(isinstance(each, tuple) != is_tree for each in rates):
        form = "a list of probabilities for each depth" if is_tree else "one for each draft"
        return f"of a {'tree' if is_tree else 'chain'} they are {form}"
    numbers = [number for each in rates for number in (each if isinstance(each, tuple) else [each])]
    if not all(0 <= number <= 1 for number in numbers):
        return "probabilities are in 0..1"
    if any(sum(each) > 1 + 1e-9 for each in rates if isinstance(each, tuple)):
        return "those of one depth exclude each other, so they add up to 1 at most"
    if not is_tree and any(later > earlier for earlier, later in pairwise(numbers)):
        return "they cannot rise, because a draft is accepted only with all before it"
    return None
