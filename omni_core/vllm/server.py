"""The HTTP server: stock vLLM's app and launcher, with Omni's routes on top."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm import envs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.logger import init_logger

from omni_core.config.model import Resolved
from omni_core.errors import ConfigError
from omni_core.folders import sweep
from omni_core.http.declared import describe
from omni_core.http.files import lock_folder
from omni_core.http.jobs import JobStore
from omni_core.http.metrics import StageCollector
from omni_core.http.speech import SpeechService, speech_router
from omni_core.http.stages import stage_router
from omni_core.http.videos import VideoService, video_router
from omni_core.http.voices import VoiceStore
from omni_core.media import check_encoder
from omni_core.pipeline import DiffusionStage
from omni_core.plugins.declarations import load_reference
from omni_core.plugins.manager import get_manager
from omni_core.runtime import VideoEngine
from omni_core.speech.engine import SpeechEngine
from omni_core.stages import SupervisedDiffusion, SupervisedTalker
from omni_core.supervisor import SupervisedStage
from omni_core.vllm.media import ImageFetcher, SoundFetcher
from omni_core.vllm.stages import start_stages

logger = init_logger(__name__)

Stages = Mapping[str, SupervisedStage[Any]]
"""The stages of the pipeline by name, the front one first."""

PRIVATE_STORE, PRIVATE_SOCKETS = "omni-store-", "omni-sockets-"
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"

_LONGEST_SOCKETS = 107 - len("/") - 36
"""The longest folder of sockets: Linux gives an address 107 bytes, and vLLM calls a socket by a UUID."""

# Routes of the stock app that need a token model: they could only answer with a server error.
_TOKEN_ROUTES = ("/tokenize", "/detokenize", "/v1/systemone", "/v1/decisions", "/invocations")


def serve(resolved: Resolved, args: Namespace) -> None:
    """Serve ``resolved`` until SIGINT or SIGTERM.

    ``args`` are the parsed arguments of vLLM's ``serve``: host, port, keys, TLS, logging.
    """
    import uvloop

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt("terminated while starting")

    signal.signal(signal.SIGTERM, interrupt)  # until the launcher installs its own
    if isinstance(resolved.pipeline.stage, DiffusionStage):
        check_encoder()
    with ExitStack() as stack:
        listen_address, sock = _listen(args)
        stack.callback(sock.close)
        store = _open_store(resolved, stack)
        _keep_sockets(stack)
        # Outside the event loop, under which a signal would wait until the model is loaded.
        stages = start_stages(resolved, stack)
        uvloop.run(_serve(resolved, args, listen_address, sock, stages, store))


def _listen(args: Namespace) -> tuple[str, socket.socket]:
    """Bind the address before the model is loaded. Raises ``ConfigError`` if that cannot be done."""
    try:
        listen_address, sock = setup_server(args, reuse_port=False)
    except (OSError, OverflowError, ValueError) as error:
        where = args.uds or f"{args.host or '0.0.0.0'}:{args.port}"
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    return listen_address, sock


def _folder(wanted: Path | None, prefix: str, stack: ExitStack) -> Path:
    """The operator's folder, or one of this server's own that goes with it."""
    if wanted is not None:
        return wanted
    base = Path(tempfile.gettempdir())
    sweep(base, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _keep_sockets(stack: ExitStack) -> None:
    """Have vLLM make its sockets in a folder that goes with this server: it leaves them lying in the temporary one."""
    if SOCKETS_VARIABLE in os.environ:
        return
    folder = _folder(None, PRIVATE_SOCKETS, stack)
    if len(str(folder)) > _LONGEST_SOCKETS:
        return
    stack.callback(os.close, lock_folder(folder, "the folder of sockets"))
    os.environ[SOCKETS_VARIABLE] = str(folder)


def _open_store(resolved: Resolved, stack: ExitStack) -> JobStore | VoiceStore:
    """What the server keeps: videos, or uploaded voices."""
    server = resolved.server
    videos = isinstance(resolved.pipeline.stage, DiffusionStage)
    folder = _folder(server.video_store if videos else server.voice_store, PRIVATE_STORE, stack)
    try:
        store = (
            JobStore(folder, ttl=server.video_ttl_seconds, limit=server.max_stored_videos)
            if videos
            else VoiceStore(folder, limit=server.max_stored_voices, checkpoint=str(resolved.checkpoint))
        )
    except OSError as error:
        raise ConfigError(f"cannot keep {'videos' if videos else 'voices'} in {folder}: {error.strerror}") from None
    stack.callback(store.close)
    return store


async def _serve(
    resolved: Resolved,
    args: Namespace,
    listen_address: str,
    sock: socket.socket,
    stages: Stages,
    store: JobStore | VoiceStore,
) -> None:
    for stage in stages.values():
        stage.watch()
    with ExitStack() as stack:
        service: VideoService | SpeechService
        engine_of = resolved.stage.engine
        allowed = (engine_of["allowed_local_media_path"].value, engine_of["allowed_media_domains"].value)
        if isinstance(store, JobStore):
            service = VideoService(
                video_engine(resolved, stages), store, served_names(resolved), ImageFetcher(*allowed)
            )
        else:
            service = SpeechService(
                speech_engine(resolved, stages),
                store,
                served_names(resolved),
                SoundFetcher(*allowed),
                max_batch_items=resolved.server.max_batch_items,
            )
        collector = StageCollector(stages, service.engine)
        REGISTRY.register(collector)
        stack.callback(REGISTRY.unregister, collector)
        app = make_app(resolved, args, stages, service)
        logger.info("Serving %s on %s", resolved.model, _address(listen_address, args.port, sock))
        shutdown = await serve_http(
            app,
            sock=sock,
            enable_ssl_refresh=args.enable_ssl_refresh,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
            h11_max_header_count=args.h11_max_header_count,
        )
        await shutdown


def _address(listen_address: str, port: int | None, sock: socket.socket) -> str:
    """``listen_address`` with the port that the kernel chose, where it was left to the kernel."""
    if port == 0 and sock.family in (socket.AF_INET, socket.AF_INET6):
        return f"{listen_address.removesuffix(':0')}:{sock.getsockname()[1]}"
    return listen_address


class LauncherClient:
    """What vLLM's launcher and its general routes use of an engine client: never dead, since stages are restarted."""

    errored = False
    is_running = True
    should_keep_api_server_alive = True
    vllm_config = SimpleNamespace(shutdown_timeout=0)

    def __init__(self, stages: Stages, service: VideoService | SpeechService) -> None:
        self._stages, self._service = stages, service
        self._loop = asyncio.get_running_loop()

    async def check_health(self) -> None:
        """Stages answer for themselves, in ``/health``."""

    async def do_log_stats(self) -> None:
        """There are no statistics of tokens to log."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the jobs, then the stages; the launcher calls this in a thread, on SIGINT and SIGTERM."""
        if isinstance(self._service, VideoService):
            asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result()
        for stage in self._stages.values():
            stage.close()
        for process in multiprocessing.active_children():  # of a stage that was being started again
            process.kill()


def served_names(resolved: Resolved) -> list[str]:
    """The names under which clients know the model."""
    setting = resolved.stage.engine.get("served_model_name")
    if setting is None or not setting.value:
        return [resolved.model]
    return [setting.value] if isinstance(setting.value, str) else list(setting.value)


def video_engine(resolved: Resolved, stages: Stages) -> VideoEngine:
    """The front end of a pipeline that makes videos."""
    stage = stages[resolved.pipeline.stage.name]
    assert isinstance(stage, SupervisedDiffusion)
    request_model = load_reference(resolved.family.request)(resolved.checkpoint)
    return VideoEngine(stage, request_model, resolved.server.max_queued_requests)


def speech_engine(resolved: Resolved, stages: Stages) -> SpeechEngine:
    """The front end of a pipeline that speaks."""
    modules: dict[str, Any] = dict(stages)
    talker = stages[resolved.pipeline.stage.name]
    assert isinstance(talker, SupervisedTalker) and resolved.family.speech is not None
    return SpeechEngine(
        load_reference(resolved.family.speech)(resolved.checkpoint),
        load_reference(resolved.family.request)(resolved.checkpoint),
        talker,
        modules["decoder"],
        modules.get("encoder"),
        resolved.server.max_queued_requests,
    )


def make_app(resolved: Resolved, args: Namespace, stages: Stages, service: VideoService | SpeechService) -> FastAPI:
    """vLLM's app with its general routes, Omni's routes, and the state that both need."""
    app: FastAPI = build_app(args, supported_tasks=(), model_config=None)
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) not in _TOKEN_ROUTES]
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) != "/health"]
    app.include_router(stage_router(stages))
    app.include_router(video_router(service) if isinstance(service, VideoService) else speech_router(service))
    for name in resolved.server.allow_routes:
        routes = get_manager().http_routes(name)
        app.include_router(load_reference(routes.router)(service.engine))
    describe(app)
    state = app.state
    state.engine_client = LauncherClient(stages, service)
    state.args = args
    state.log_stats = not args.disable_log_stats
    state.vllm_config = state.engine_client.vllm_config
    state.enable_server_load_tracking = args.enable_server_load_tracking
    state.server_load_metrics = 0
    names = [BaseModelPath(name=name, model_path=resolved.model) for name in served_names(resolved)]
    state.openai_serving_models = OpenAIModelRegistry(SimpleNamespace(max_model_len=None), names)
    return app
