"""Recorded traffic of a target that counts to 12."""

from pathlib import Path
from typing import Any

from tllm_spec.recording.traffic_folder import TrafficFolder
from tllm_spec.recording.traffic_record import TrafficRecord

SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "end_ids": [],
    "stop_token_ids": [],
}


def counted(first: int, prompt_len: int, output_len: int) -> TrafficRecord:
    tokens = [(first + place) % 12 for place in range(prompt_len + output_len)]
    return TrafficRecord(
        id=f"{first}-{prompt_len}",
        client="",
        user="",
        arrived_us=first,
        prompt=tokens[:prompt_len],
        output=tokens[prompt_len:],
        seed=0,
        sampling=SAMPLING,
        max_tokens=output_len,
        draft_limit=None,
        guided=False,
        finish_reason="length",
        rounds=[],
        num_rounds=0,
        num_emitted=0,
        drafted=[],
        accepted=[],
        cached_tokens=0,
        num_preemptions=0,
        draft_version=0,
    )


def write_traffic(folder: Path, num_records: int) -> list[TrafficRecord]:
    """Texts of several lengths."""
    records = [counted(each % 12, 12 + each // 3, 24 + each % 5) for each in range(num_records)]
    TrafficFolder(folder).append([record.to_line() for record in records])
    return records
