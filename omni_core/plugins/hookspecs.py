"""The whole plugin surface: every hook that a plugin may implement, and what each returns.

An entry point of the group ``omni_core.plugins`` names a module (or object) that implements some of these with
``hookimpl``. pluggy checks names and arguments when the plugin is registered.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from omni_core.plugins.declarations import AttentionBackend, HttpRoutes, ModelFamily, Platform, Requirements

PROJECT = "omni_core"
ENTRY_POINT_GROUP = "omni_core.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def omni_requirements() -> Requirements:  # type: ignore[empty-body]
    """Plugin API and version ranges. Required, and read before anything else of the plugin is used."""


@hookspec
def omni_model_families() -> Iterable[ModelFamily]:  # type: ignore[empty-body]
    """Model families that the plugin serves."""


@hookspec
def omni_platforms() -> Iterable[Platform]:  # type: ignore[empty-body]
    """Hardware platforms that the plugin supports."""


@hookspec
def omni_attention_backends() -> Iterable[AttentionBackend]:  # type: ignore[empty-body]
    """Attention implementations that a user can choose by name."""


@hookspec
def omni_http_routes() -> Iterable[HttpRoutes]:  # type: ignore[empty-body]
    """Extra HTTP routes, mounted only when the operator allows them by name."""


@hookspec
def omni_activate() -> None:
    """Register things with vLLM, transformers or other libraries in this process.

    Called once in every Omni process (server, engine core, workers) before a model is loaded, and never in a plain
    vLLM process. May import heavy modules.
    """
