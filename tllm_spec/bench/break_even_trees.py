"""Break-even of draft trees: an engine that chooses between chains and trees measures acceptance by
depth and rank and the time of every shape's rounds, from which follow the tokens that each shape
has and those that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.break_even_runs import WITHOUT_LIMITS, drafter_of, without_shape
from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.runner import run_requests, sampling_for
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.executor.speculative.draft_length.estimates import by_rank, expected_accepted

if TYPE_CHECKING:
    from tllm_spec.llm import LLM


@dataclass(frozen=True)
class ShapeRow:
    """`tokens`: expected of a request's round. `needed`: with which it is as fast as plain
    decoding."""

    shape: str
    drafts: int
    round_ms: float
    tokens: float
    needed: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.tokens / self.needed}


def parse_tree(text: str) -> DraftShape:
    """`5x8/31`: 5 steps, 8 children of a node, 31 drafts. Raises ValueError for anything else."""
    steps, _, rest = text.partition("x")
    topk, _, drafts = rest.partition("/")
    return DraftShape(int(steps), int(drafts), int(topk))


def with_trees(spec: Mapping[str, Any], trees: Sequence[DraftShape]) -> dict[str, Any]:
    """A drafter's options with these trees to choose from, next to plain decoding and a chain. Half
    of the time may go to probes, so that every rank is seen. Raises ValueError where no
    draft weights make the drafts."""
    if not isinstance(config := drafter_of(spec), DraftTreeDecodingConfig):
        raise ValueError(
            f"--trees is for drafters with draft weights (Draft_Target, Eagle, Eagle3 or MTP), and "
            f"decoding_type is {config.decoding_type}"
        )
    depth = max(tree.depth for tree in trees)
    candidates = [
        {
            "max_draft_len": tree.depth,
            "dynamic_tree_max_topK": tree.topk,
            "max_total_draft_tokens": tree.num_nodes,
        }
        for tree in trees
    ]
    return {
        **without_shape(spec),
        **WITHOUT_LIMITS,
        "max_draft_len": depth,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": max(tree.topk for tree in trees),
        "max_total_draft_tokens": max(tree.num_nodes for tree in trees),
        "adaptive": {
            "candidate_steps": [0, depth],
            "candidate_trees": candidates,
            "probe_time_share": 1.0,
        },
    }


def measured_shapes(
    llm: "LLM", trees: Sequence[DraftShape], requests: Sequence[BenchRequest]
) -> list[ShapeRow]:
    """Runs the requests together; the engine has `with_trees`."""
    run_requests(llm, requests, sampling_for(requests))
    controller = llm.server_info()["internal_states"][0]["controller"]
    (slot,) = controller["slots"].values()
    sizes = controller["round_ms"]
    times = sizes[min(sizes, key=lambda size: abs(int(size) - len(requests)))]
    shares = [0.0, *slot["further_children"]]
    rates = [by_rank(first, shares) for first in slot["acceptance"]]
    depth = max(tree.depth for tree in trees)
    rows = []
    for shape in (chain_of(0), chain_of(depth), *trees):
        gain = slot["tree_gain"] if shape.is_tree else 1.0
        tokens = 1 + gain * expected_accepted(shape, rates)
        needed = times[shape.name] / times["0"]
        rows.append(ShapeRow(shape.name, shape.num_nodes, times[shape.name], tokens, needed))
    return rows
