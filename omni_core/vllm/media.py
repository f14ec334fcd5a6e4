"""Fetching of images by vLLM's media connector, with its limits and allow-lists."""

from __future__ import annotations

from typing import Any

import aiohttp
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MediaConnector

from omni_core.errors import RequestError


class _NoRedirects(HTTPConnection):
    """Follows no redirect: vLLM checks only the first host against the allowed ones."""

    async def get_async_response(self, url: str, **options: Any) -> Any:
        return await super().get_async_response(url, **{**options, "allow_redirects": False})


class ImageFetcher:
    """Fetches images by URL, data URL, or, where the operator allows a folder, ``file:`` URL.

    Args:
        allowed_local_path: ``--allowed-local-media-path``; empty allows no ``file:`` URL.
        allowed_domains: ``--allowed-media-domains``; empty allows every host. Otherwise no redirect is followed.
    """

    def __init__(self, allowed_local_path: str = "", allowed_domains: list[str] | None = None) -> None:
        connection = _NoRedirects() if allowed_domains else HTTPConnection()
        self._connector = MediaConnector(
            connection=connection, allowed_local_media_path=allowed_local_path, allowed_media_domains=allowed_domains
        )

    async def __call__(self, url: str) -> Any:
        """The image at ``url`` as a PIL image.

        Raises:
            RequestError: it is not allowed, cannot be reached, or is no image.
        """
        shown = url if len(url) <= 100 else f"{url[:97]}..."
        try:
            image = await self._connector.fetch_image_async(url)
        except (VLLMError, ValueError, OSError, RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            raise RequestError(f"cannot load {shown}: {error or type(error).__name__}") from None
        return getattr(image, "media", image)
