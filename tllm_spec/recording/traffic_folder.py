"""The folder of recorded traffic: JSON lines in files that rotate, and files of the target's hidden
states (`record_hidden_states`), readable by their owner only.

All who write lock the folder's `lock` file, so several engines may share it, and records can be
erased while they run. A safetensors file has the states of a request, with its record as metadata;
`read_hidden_states` is what trains and replays draft heads."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time_ns  # noqa: TID251  # files have dates
from typing import TYPE_CHECKING, Any, NamedTuple

from tllm_spec.recording.traffic_record import TrafficHeader, TrafficRecord, json_object, read_line

if TYPE_CHECKING:
    import torch


NUM_FILES = 16  # that the folder's size is divided into
PATTERN = "traffic-*.jsonl"
STATES_PATTERN = "hidden-*.safetensors"
STATES_FORMAT = "tllm_spec hidden states 1"
MADE = ".new"  # the suffix of a file that is being written, to replace one
LOCK_SECONDS = 60.0  # that a recorder waits for others, as for one that erases
POLL_SECONDS = 0.01
NO_CLIENT = ""  # instead of a hash


class RecordName(NamedTuple):
    """Which record it is and whose, as in `TrafficRecord`."""

    id: str
    client: str
    user: str


class TrafficFolder:
    """header: the first line of each file. max_bytes: of all files together, and max_states_bytes
    of those with hidden states; the oldest are dropped first.

    Raises ValueError for a path that cannot be such a folder, or that others may read."""

    def __init__(self, path: Path, header: bytes = b"", max_bytes: int = 1 << 30) -> None:
        self.path = path
        self._header = header
        self._max_bytes, self.max_states_bytes = max_bytes, max_bytes // 2
        self._file: Path | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(path)
            with self._locked():
                self._key = _key_of(path)
        except OSError as error:
            raise ValueError(f"cannot record traffic in {path}: {error}") from error

    def hash_of(self, name: str) -> str:
        """What a record has instead of a client's name: without the folder's key one cannot tell
        whose it is."""
        return hmac.digest(self._key, name.encode(errors="surrogatepass"), "sha256").hex()[:32]

    def hashes_of(self, client: Sequence[str]) -> tuple[str, str]:
        """Hashes a client, and its user; client: as in `LlmRequest`."""
        if not client:
            return NO_CLIENT, NO_CLIENT
        own, *rest = client
        return self.hash_of(own), self.hash_of("\n".join(client)) if any(rest) else NO_CLIENT

    def append(self, lines: Sequence[bytes]) -> None:
        """Adds whole lines. Raises OSError where a line cannot be written; the lines before it
        stay, and nothing of it does."""
        with self._locked():
            for line in lines:
                self._append(line)
            self._drop_oldest()

    def add_states(self, record: TrafficRecord, content: bytes) -> None:
        """Adds a file of hidden states. Raises OSError where it cannot be written."""
        with self._locked():
            file = self.path / f"hidden-{time_ns() // 1000:017d}-{record.id}.safetensors"
            _replace(file, content)
            self._drop_oldest()

    def erase(self, is_unwanted: Callable[[RecordName], bool]) -> int:
        """Removes records and their hidden states, and returns how many records. What a crash has
        damaged is removed, too, as nothing says whose it is. Raises OSError as reading does."""
        number = 0
        with self._locked():
            for file in files_of(self.path):
                lines = file.read_bytes().splitlines(keepends=True)
                kept = [line for line in lines if not _is(is_unwanted, line)]
                if len(kept) < len(lines):
                    _replace(file, b"".join(kept))
                    number += len(lines) - len(kept)
            for file in states_files_of(self.path):
                if _is(is_unwanted, _record_of(file)):
                    file.unlink()
        return number

    def _append(self, line: bytes) -> None:
        if len(self._header) + len(line) > self._max_bytes:
            return
        file = self._file
        size = file.stat().st_size if file is not None and file.exists() else None
        if file is None or size is None or size + len(line) > self._max_bytes // NUM_FILES:
            file = self.path / f"traffic-{time_ns() // 1000:017d}-{os.getpid()}.jsonl"
            line = self._header + line
        _write(file, line)
        self._file = file

    def _drop_oldest(self) -> None:
        """Hidden states have half of the room at most, so that they do not push out records."""
        num_bytes = _drop_oldest(states_files_of(self.path), self.max_states_bytes)
        _drop_oldest(files_of(self.path), self._max_bytes - num_bytes)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            take_lock(lock, LOCK_SECONDS)
            for left in self.path.glob(f"*{MADE}"):  # by one who was killed
                left.unlink()
            yield
        finally:
            os.close(lock)


def take_lock(descriptor: int, seconds: float) -> None:
    """Locks a file against other processes and threads. Raises TimeoutError, which is an OSError,
    where another one has it for longer."""
    deadline = monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                raise TimeoutError(f"another process has had its lock for {seconds:g} s") from None
        sleep(POLL_SECONDS)


def files_of(path: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path.glob(PATTERN))


def states_files_of(path: Path) -> list[Path]:
    """Files of hidden states, oldest first."""
    return sorted(path.glob(STATES_PATTERN))


def states_files(path: Path) -> dict[str, Path]:
    """Files of hidden states by the `id` of their record."""
    return {file.stem.split("-", 2)[2]: file for file in states_files_of(path)}


def metadata_of(file: Path) -> dict[str, str]:
    """What a file in the format of safetensors says of its tensors. Raises ValueError for any other
    file."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header: Any = json.loads(content.read(min(size, file.stat().st_size)))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    found = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f"cannot read {file}: it has no metadata")
    return found


def read_traffic(path: Path) -> Iterator[TrafficRecord | TrafficHeader]:
    """The records of a folder or file in order, each file's after its header. The line that is just
    being written is left out. Raises ValueError that names a line that is not in the format, and
    for a folder without records."""
    files = files_of(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no recorded traffic: no {PATTERN}")
    for file in files:
        for number, line in enumerate(read_lines(file), start=1):
            try:
                yield read_line(line, f"{file}, line {number}")
            except ValueError:
                if line.endswith("\n"):
                    raise


def read_records(path: Path, number: int | None = None) -> list[TrafficRecord]:
    """The records without headers, by their arrival. number: only so many, those that ended last;
    no others are kept in memory."""
    found = (each for each in read_traffic(path) if isinstance(each, TrafficRecord))
    return sorted(deque(found, maxlen=number), key=lambda record: record.arrived_us)


def latest_records(path: Path, number: int) -> list[TrafficRecord]:
    """The same of a folder's latest files, as many as are needed."""
    records: list[TrafficRecord] = []
    for file in reversed(files_of(path)):
        if len(records) >= number:
            break
        records = read_records(file, number - len(records)) + records
    return records


def _drop_oldest(files: list[Path], max_bytes: int) -> int:
    """Returns how many bytes are left."""
    total = sum(file.stat().st_size for file in files)
    while total > max_bytes:
        oldest = files.pop(0)
        total -= oldest.stat().st_size
        oldest.unlink()
    return total


def read_lines(file: Path) -> Iterator[str]:
    """Raises ValueError for a file that cannot be read or is not UTF-8."""
    try:
        with file.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error


def _check_private(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(
            f"record_traffic = {str(path)!r}: others own it or may read it; a folder of this user "
            "with mode 0700 is needed"
        )


def _key_of(path: Path) -> bytes:
    """The key of the hashes, which is made with the folder."""
    file = path / "hash-key"
    if not file.exists():
        _write(file, secrets.token_bytes(32))
    return file.read_bytes()


def _write(file: Path, data: bytes) -> None:
    """Appends all of it or nothing."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o600)
    size = os.fstat(descriptor).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)


def _replace(file: Path, data: bytes) -> None:
    made = file.with_suffix(MADE)
    try:
        made.unlink(missing_ok=True)
        _write(made, data)
        made.replace(file)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def _record_of(file: Path) -> bytes:
    """The record in a file of hidden states; empty for one that is damaged."""
    try:
        return metadata_of(file).get("record", "").encode()
    except ValueError:
        return b""


def _is(is_unwanted: Callable[[RecordName], bool], line: bytes) -> bool:
    """Also where a line does not say whose it is. Records of other versions do; no header is."""
    found = _object_of(line)
    names = [found[name] for name in RecordName._fields if isinstance(found.get(name), str)]
    if "format" in found:
        return False
    return len(names) < len(RecordName._fields) or is_unwanted(RecordName(*names))


def _object_of(line: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        return json_object(line)
    except ValueError:
        return {}


@dataclass(frozen=True)
class HiddenStates:
    """What the target computed for the T tokens of a text that it has read: the prompt and the
    output but for its last token, which nothing read.

    ids: `[T]` int64. captured: `[T, C * H]`, the outputs of C layers, residual included, in the
    order of `layers`. hidden: `[T, H]`, after the final norm, so the LM head makes the logits of
    token t + 1 from row t. States have the target's dtype and are on the CPU."""

    record: TrafficRecord
    layers: tuple[int, ...]
    ids: torch.Tensor
    captured: torch.Tensor
    hidden: torch.Tensor

    def of_layers(self, layers: Sequence[int], num_layers: int) -> torch.Tensor | None:
        """`[T, n * H]` of these layers, of which the number `num_layers` is the final norm; None
        where one of them is not recorded."""
        import torch

        parts = self.captured.chunk(len(self.layers), dim=1)
        found = dict(zip(self.layers, parts, strict=True)) | {num_layers: self.hidden}
        if not found.keys() >= set(layers):
            return None
        return torch.cat([found[layer] for layer in layers], dim=1)

    def to_file(self) -> bytes:
        """The file's content; `ids` are in the record."""
        from safetensors.torch import save

        tensors = {"captured": self.captured.contiguous(), "hidden": self.hidden.contiguous()}
        layers = ",".join(map(str, self.layers))
        record = self.record.to_line().decode()
        content: bytes = save(
            tensors, {"format": STATES_FORMAT, "layers": layers, "record": record}
        )
        return content


def read_hidden_states(path: Path) -> Iterator[HiddenStates]:
    """Those of a folder of recorded traffic, oldest first; one text is in memory at a time. Raises
    ValueError for a folder without any, and for a file that is not in the format."""
    files = states_files_of(path)
    if not files:
        raise ValueError(
            f"{path} has no recorded hidden states; serving with record_hidden_states records them"
        )
    yield from map(read_states_file, files)


def read_states_file(file: Path) -> HiddenStates:
    """Raises ValueError for a file that is not in the format."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = metadata_of(file)
    if metadata.get("format") != STATES_FORMAT:
        found = metadata.get("format")
        raise ValueError(f"{file}: format = {found!r}: {STATES_FORMAT!r} is accepted")
    record = read_line(metadata.get("record", ""), str(file))
    try:
        layers = tuple(map(int, metadata.get("layers", "").split(",")))
        tensors = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    captured, hidden = (tensors.get(name, torch.empty(0)) for name in ("captured", "hidden"))
    rows, size = (*hidden.shape, 0, 0)[:2]
    if (
        not isinstance(record, TrafficRecord)
        or tensors.keys() != {"captured", "hidden"}
        or not (hidden.dtype == captured.dtype and hidden.is_floating_point())
        or hidden.shape != (rows, size)
        or captured.shape != (rows, size * len(layers))
        or rows != len(record.prompt) + len(record.output) - 1
    ):
        raise ValueError(f"{file}: its tensors are not the hidden states of its record")
    ids = torch.tensor([*record.prompt, *record.output][:rows])
    return HiddenStates(record, layers, ids, captured, hidden)
