"""Which requests run, and which wait: options of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Literal

from pydantic import field_validator

from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.neighbours import SCHEDULER_IGNORED, Ignored


class SchedulerConfig(ConfigModel):
    """Which requests run, and which wait."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = (
        "GUARANTEED_NO_EVICT"
    )
    """GUARANTEED_NO_EVICT reserves pages for the full length of a request. MAX_UTILIZATION admits
    requests while there are pages, and pauses the youngest when pages run out."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by their clients' turns and by arrival, or by their `priority`
    first."""
    fair_preemption: bool = False
    """Whether a client that has more running requests than another gives up its newest one, for one
    of the other's that waits; once in 64 rounds at most. Needs MAX_UTILIZATION."""

    ignored: ClassVar[Ignored] = SCHEDULER_IGNORED

    @check
    def _check_preemption(self) -> Iterator[str]:
        if self.fair_preemption and self.capacity_scheduler_policy != "MAX_UTILIZATION":
            yield (
                "fair_preemption = True needs capacity_scheduler_policy = MAX_UTILIZATION: under "
                "GUARANTEED_NO_EVICT a request that runs is never preempted"
            )

    @field_validator("capacity_scheduler_policy", mode="before")
    @classmethod
    def _value_of_enum(cls, policy: object) -> object:
        return policy.value if isinstance(policy, Enum) else policy
