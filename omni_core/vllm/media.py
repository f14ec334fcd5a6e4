"""Fetching of images and sound by vLLM's media connector, with its limits and allow-lists."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MediaConnector, MediaIO

from omni_core.audio import MAX_SOUND_BYTES, check_sound_size
from omni_core.errors import RequestError

T = TypeVar("T")


class _NoRedirects(HTTPConnection):
    """Follows no redirect: vLLM checks only the first host against the allowed ones."""

    async def get_async_response(self, url: str, **options: Any) -> Any:
        return await super().get_async_response(url, **{**options, "allow_redirects": False})


class _Sound(MediaIO[bytes]):
    """A file of sound as it is."""

    def get_max_bytes(self) -> int:
        return MAX_SOUND_BYTES

    def load_bytes(self, data: bytes) -> bytes:
        check_sound_size(len(data))
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        raise ValueError("data URLs are not fetched")

    def load_file(self, filepath: Path) -> bytes:
        with filepath.open("rb") as file:
            return self.load_bytes(file.read(MAX_SOUND_BYTES + 1))


class _Fetcher:
    """What both kinds share.

    Args:
        allowed_local_path: ``--allowed-local-media-path``; empty allows no ``file:`` URL.
        allowed_domains: ``--allowed-media-domains``; empty allows every host. Otherwise no redirect is followed.
    """

    def __init__(self, allowed_local_path: str = "", allowed_domains: list[str] | None = None) -> None:
        connection = _NoRedirects() if allowed_domains else HTTPConnection()
        self._connector = MediaConnector(
            connection=connection, allowed_local_media_path=allowed_local_path, allowed_media_domains=allowed_domains
        )

    async def _load(self, url: str, work: Awaitable[T]) -> T:
        shown = url if len(url) <= 100 else f"{url[:97]}..."
        try:
            return await work
        except (VLLMError, ValueError, OSError, RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            raise RequestError(f"cannot load {shown}: {error or type(error).__name__}") from None


class ImageFetcher(_Fetcher):
    """Fetches images by URL, data URL, or, where the operator allows a folder, ``file:`` URL."""

    async def __call__(self, url: str) -> Any:
        """The image at ``url`` as a PIL image.

        Raises:
            RequestError: it is not allowed, cannot be reached, or is no image.
        """
        image = await self._load(url, self._connector.fetch_image_async(url))
        return getattr(image, "media", image)


class SoundFetcher(_Fetcher):
    """Fetches files of sound by URL or, where the operator allows a folder, ``file:`` URL."""

    async def __call__(self, url: str) -> bytes:
        """The file at ``url``.

        Raises:
            RequestError: it is not allowed, cannot be reached, or is too large.
        """
        timeout = envs.VLLM_AUDIO_FETCH_TIMEOUT
        return await self._load(url, self._connector.load_from_url_async(url, _Sound(), fetch_timeout=timeout))
