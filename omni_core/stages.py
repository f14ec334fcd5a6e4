"""Supervised stages of each kind: what the front end asks of them, while they may die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_core.ar.messages import Frames, TalkerJob
from omni_core.diffusion.messages import Job, Report
from omni_core.errors import GenerationError
from omni_core.module.client import ModuleEngine, ModuleSession
from omni_core.module.contract import Values
from omni_core.runtime import StageClient
from omni_core.supervisor import Engine, SupervisedStage


class DiffusionEngineClient(Engine, StageClient, Protocol):
    """A running diffusion stage, see ``omni_core.vllm.diffusion.engine.DiffusionEngine``."""

    async def stats(self, reset: bool = False) -> Mapping[str, Any]: ...


class SupervisedDiffusion(SupervisedStage[DiffusionEngineClient]):
    """A supervised diffusion stage.

    Args:
        start: starts an engine; blocks until its model is loaded.
    """

    def __init__(self, start: Callable[[], DiffusionEngineClient]) -> None:
        super().__init__(start)
        assert self._engine is not None
        self.max_running = self._engine.max_running
        self.totals: Mapping[str, Any] = {}

    async def generate(self, job: Job, request_id: str) -> AsyncIterator[Report]:
        """Reports on a request, see ``DiffusionEngine.generate``; raises what ``follow`` raises."""
        reports = self.follow(lambda engine: engine.generate(job, request_id), request_id)
        async with aclosing(reports):  # type: ignore[type-var]
            async for report in reports:
                self.totals = report.totals
                yield report

    def take(self, report: Report) -> npt.NDArray[np.generic]:
        """The frames that ``report`` points to; they can be taken once."""
        if self._engine is None:
            raise GenerationError(f"stage {self.stage!r} died before its result was taken")
        return self._engine.take(report)

    def discard(self, request_id: str) -> None:
        """Drop whatever result a request left that nobody will take."""
        if self._engine is not None:
            self._engine.discard(request_id)

    async def stats(self, reset: bool = False) -> Mapping[str, Any]:
        """Counters of the first worker."""
        return await self._available().stats(reset)


class TalkerEngineClient(Engine, Protocol):
    """A running talker stage, see ``omni_core.vllm.ar.engine.TalkerEngine``."""

    @property
    def max_running(self) -> int: ...

    def generate(
        self, job: TalkerJob, request_id: str, more_text: AsyncIterator[Sequence[int]] | None = None
    ) -> AsyncIterator[Frames]: ...


class SupervisedTalker(SupervisedStage[TalkerEngineClient]):
    """A supervised talker stage."""

    def __init__(self, start: Callable[[], TalkerEngineClient]) -> None:
        super().__init__(start)
        assert self._engine is not None
        self.max_running = self._engine.max_running

    def generate(
        self, job: TalkerJob, request_id: str, more_text: AsyncIterator[Sequence[int]] | None = None
    ) -> AsyncIterator[Frames]:
        """Frames of a request, see ``TalkerEngine.generate``; raises what ``follow`` raises."""
        return self.follow(lambda engine: engine.generate(job, request_id, more_text), request_id)


class SupervisedModule(SupervisedStage[ModuleEngine]):
    """A supervised module stage."""

    def open(self, options: Values | None = None, request_id: str | None = None) -> _SupervisedSession:
        """Begin a session of a request, see ``ModuleEngine.open``. Raises ``StageUnavailable``."""
        engine, ended = self.hold()
        session = engine.open(options)
        return _SupervisedSession(self, session, ended, request_id or session.id)


class _SupervisedSession:
    """A session whose stage may die."""

    def __init__(
        self, stage: SupervisedModule, session: ModuleSession, ended: asyncio.Future[None], request_id: str
    ) -> None:
        self._stage, self._session, self._ended, self._request_id = stage, session, ended, request_id

    async def push(self, values: Values) -> Values:
        """One input to its output; raises what ``SupervisedStage.call`` raises."""
        return await self._stage.call(self._session.push(values), self._ended, self._request_id)

    def close(self) -> None:
        """End the session. Closing twice is fine."""
        self._session.close()
