"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises ValueError for anything else."""
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; a model is a folder in Hugging Face's format, or a .gguf file."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}.") from error
    except RecursionError:
        raise ValueError(f"{path} is not readable JSON: it is nested too deeply.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content
