"""The results of `adaptive_h200.py`: their data classes, bars and tables. Measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tllm_spec.config.adaptive_config import PRESETS

LADDER = (0, 1, 2, 3, 5)
MIN_STEADY, MIN_MOVING, MAX_ZERO = 0.98, 1.05, 1.02
COST_MODEL = "cost_model"


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of a round. `zero` is draft length 0, measured in turns with `plain`.
    `by_draft_len` was measured after them. `of_dummies`: dummy requests with empty contexts."""

    batch_size: int
    plain: float
    zero: float
    by_draft_len: Mapping[int, float]
    of_dummies: Mapping[int, float]

    @property
    def zero_over_plain(self) -> float:
        return self.zero / self.plain


@dataclass(frozen=True)
class Cell:
    """Tokens per second of a steady batch size and acceptance."""

    batch_size: int
    acceptance: float
    static: Mapping[int, float]
    adaptive: float
    counted: float  # as `adaptive`, from the tokens that came out
    settling: float  # of the adaptive engine before it had settled
    rounds_by_draft_len: Mapping[int, int]  # of the adaptive engine after it had settled
    expected_ms: Mapping[str, float]  # of a round by draft length, in the controller at the end
    switches: Sequence[str]  # the last ones: old and new length, and the reason

    @property
    def best(self) -> int:
        return max(self.static, key=self.static.__getitem__)

    @property
    def over_best(self) -> float:
        return self.adaptive / self.static[self.best]


@dataclass(frozen=True)
class Phase:
    traffic: str
    batch_size: int
    acceptance: float
    static: Mapping[int, float]
    policies: Mapping[str, float]
    rounds_by_draft_len: Mapping[int, int]  # of the cost model


@dataclass
class Found:
    times: list[RoundTimes] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def over_best_static(phases: list[Phase]) -> tuple[int, dict[str, float]]:
    """The single draft length with the most tokens over all phases, which are equally long, and
    each policy's tokens over its tokens."""
    totals = {length: sum(phase.static[length] for phase in phases) for length in LADDER}
    best = max(totals, key=totals.__getitem__)
    return best, {
        policy: sum(phase.policies[policy] for phase in phases) / totals[best]
        for policy in (COST_MODEL, *PRESETS)
    }


def times_table(rows: list[RoundTimes]) -> list[str]:
    """Milliseconds of a round."""
    columns = [f"K={length}" for length in LADDER]
    lines = [
        f"| batch | plain | K=0 in turn | K=0 / plain (bar {MAX_ZERO}) | {' | '.join(columns)} |",
        "|" + "---|" * (4 + len(columns)),
    ]
    for row in sorted(rows, key=lambda row: row.batch_size):
        values = " | ".join(f"{row.by_draft_len[length]:.3f}" for length in LADDER)
        head = (
            f"| {row.batch_size} | {row.plain:.3f} | {row.zero:.3f} | {row.zero_over_plain:.3f} |"
        )
        lines.append(f"{head} {values} |")
    return lines


def cells_table(cells: list[Cell]) -> list[str]:
    columns = [f"K={length}" for length in LADDER]
    lines = [
        f"| batch | acceptance | {' | '.join(columns)} | adaptive | / best (bar {MIN_STEADY}) | "
        "while settling |",
        "|" + "---|" * (5 + len(columns)),
    ]
    for cell in sorted(cells, key=lambda cell: (cell.batch_size, cell.acceptance)):
        values = " | ".join(f"{cell.static[length]:.0f}" for length in LADDER)
        shares = f"**{cell.over_best:.3f}** | {cell.settling / cell.static[cell.best]:.3f}"
        lines.append(
            f"| {cell.batch_size} | {cell.acceptance} | {values} | {cell.adaptive:.0f} | {shares} |"
        )
    return lines


def traffic_table(phases: list[Phase]) -> list[str]:
    lines = [
        f"| traffic | best static K | {' | '.join(PRESETS)} | {COST_MODEL} (bar {MIN_MOVING}) |",
        "|" + "---|" * (3 + len(PRESETS)),
    ]
    for name in dict.fromkeys(phase.traffic for phase in phases):
        best, shares = over_best_static([phase for phase in phases if phase.traffic == name])
        values = " | ".join(f"{shares[preset]:.3f}" for preset in PRESETS)
        lines.append(f"| {name} | {best} | {values} | **{shares[COST_MODEL]:.3f}** |")
    return lines


def misses(found: Found) -> list[str]:
    """One line for each missed bar and for each part that was not measured."""
    missed = [f"not measured: {what}" for what in found.left_out]
    for row in found.times:
        if row.zero_over_plain > MAX_ZERO:
            missed.append(
                f"draft length 0 at batch {row.batch_size}: {row.zero_over_plain:.3f} of plain's "
                "time"
            )
    for cell in found.cells:
        if cell.over_best < MIN_STEADY:
            missed.append(
                f"batch {cell.batch_size}, acceptance {cell.acceptance}: {cell.over_best:.3f}"
            )
    for name in dict.fromkeys(phase.traffic for phase in found.phases):
        _, shares = over_best_static([phase for phase in found.phases if phase.traffic == name])
        if shares[COST_MODEL] < MIN_MOVING:
            missed.append(f"{name}: {shares[COST_MODEL]:.3f}")
    return missed
