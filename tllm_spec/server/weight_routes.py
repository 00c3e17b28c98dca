"""The operator's routes: the weights are replaced, and the engine pauses or sleeps."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request

from tllm_spec.request_errors import PauseMode
from tllm_spec.server.admission import bad_request, engine_running
from tllm_spec.server.bodies import BodyModel
from tllm_spec.server.guard import check_key, folder_below
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.replicas import Engine
from tllm_spec.shared_tensors import SharedTensors


class DraftModelRequest(BodyModel):
    """Body of `/v1/draft_model`. folder: below `--draft_model_root`. keep_cache: cached prefixes
    of the old weights go on being reused. force: also if recorded traffic shows that it is worse.
    """

    folder: str
    keep_cache: bool = False
    force: bool = False


class WeightUpdateRequest(BodyModel):
    """What bodies of updates have, as SGLang's. part, running: as of `LLM.update_weights`."""

    weight_version: str | None = None
    part: Literal["target", "draft", "all"] = "target"
    running: Literal["retract", "keep"] = "retract"
    flush_cache: Literal[True] = True
    abort_all_requests: Literal[False] = False


class FolderUpdateRequest(WeightUpdateRequest):
    """Body of `/update_weights_from_disk`. model_path: below `--weights_root`."""

    model_path: str
    load_format: Literal["auto"] | None = None


class TensorUpdateRequest(WeightUpdateRequest, SharedTensors):
    """Body of `/update_weights_from_tensor`."""


class WeightRoutes:
    """Each is for the key of its option alone. Functions that are not async run in a thread."""

    def __init__(self, llm: Engine, options: ServerOptions) -> None:
        self._llm, self._options = llm, options

    def add_to(self, app: FastAPI) -> None:
        get = app.add_api_route
        post = partial(app.add_api_route, methods=["POST"], response_model=None)
        if self._options.draft_model_root is not None:
            post("/v1/draft_model", self.swap_draft_weights)
        if self._options.allow_weight_updates:
            post("/pause", self.pause)
            post("/resume", self.resume)
            get("/is_paused", self.is_paused)
            post("/sleep", self.sleep)
            post("/wake_up", self.wake_up)
            get("/is_sleeping", self.is_sleeping)
            post("/update_weights_from_disk", self.update_from_folder)
            post("/update_weights_from_tensor", self.update_from_tensors)

    def swap_draft_weights(self, body: DraftModelRequest, request: Request) -> dict[str, Any]:
        """`/v1/draft_model`, for the operator's key only: waits until the weights are served. Not
        async: it runs in a thread."""
        check_key(request, self._options.draft_model_key, "swap draft weights")
        with bad_request(), engine_running():
            root = Path(self._options.draft_model_root or "")
            folder = folder_below(root, body.folder, "folder", "--draft_model_root")
            told = self._llm.load_draft_weights(
                str(folder), keep_cache=body.keep_cache, force=body.force
            )
        return told | {"folder": body.folder}

    def pause(self, request: Request, mode: PauseMode = "abort") -> dict[str, Any]:
        """`/pause`, for the operator's key only: waits until no round runs, in a thread."""
        check_key(request, self._options.weights_key, "pause the engine")
        with bad_request(), engine_running():
            self._llm.pause(mode)
        return self.is_paused(request)

    def resume(self, request: Request) -> dict[str, Any]:
        """`/resume`, likewise."""
        check_key(request, self._options.weights_key, "resume the engine")
        with engine_running():
            self._llm.resume()
        return self.is_paused(request)

    def is_paused(self, request: Request) -> dict[str, Any]:
        """Whether no rounds run before `/resume`."""
        check_key(request, self._options.weights_key, "ask about a pause")
        return {"is_paused": self._llm.pause_mode is not None}

    def update_from_folder(self, body: FolderUpdateRequest, request: Request) -> dict[str, Any]:
        """`/update_weights_from_disk`, likewise: waits until the weights are served."""
        path = Path(self._options.weights_root or ""), body.model_path
        find = partial(folder_below, *path, "model_path", "--weights_root")
        return self._update(body, request, lambda: str(find()), f"weights of {body.model_path}")

    def update_from_tensors(self, body: TensorUpdateRequest, request: Request) -> dict[str, Any]:
        """`/update_weights_from_tensor`, likewise."""
        return self._update(body, request, lambda: body, f"{len(body.named_tensors)} tensors")

    def _update(
        self, body: WeightUpdateRequest, request: Request, source: Callable[[], Any], what: str
    ) -> dict[str, Any]:
        check_key(request, self._options.weights_key, "update weights")
        with bad_request(), engine_running():
            own = body.weight_version, body.part, body.running
            told = self._llm.update_weights(source(), *own)
        done = {"success": True, "message": f"{what} are served"}
        return done | {"weight_version": told.pop("version"), **told}

    def sleep(self, request: Request, level: int = 1) -> dict[str, Any]:
        """`/sleep`, likewise: waits until the memory is free."""
        check_key(request, self._options.weights_key, "let the engine sleep")
        with bad_request(), engine_running():
            return {"is_sleeping": True, "memory": self._llm.sleep(level)}

    def wake_up(
        self, request: Request, tags: Annotated[list[str] | None, Query()] = None
    ) -> dict[str, Any]:
        """`/wake_up`, likewise. tags: each may name several, with commas."""
        check_key(request, self._options.weights_key, "wake the engine")
        wanted = None if tags is None else [tag for each in tags for tag in each.split(",")]
        with bad_request(), engine_running():
            return {"memory": self._llm.wake_up(wanted)} | self.is_sleeping(request)

    def is_sleeping(self, request: Request) -> dict[str, Any]:
        """Whether something is asleep. Runs in a thread, as `server_info`."""
        check_key(request, self._options.weights_key, "ask about sleep")
        with engine_running():
            return {"is_sleeping": self._llm.is_sleeping}
