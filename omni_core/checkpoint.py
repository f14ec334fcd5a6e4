"""A checkpoint: a local folder or a repository on the Hugging Face hub, and its configuration files.

Matching and describing read single small files; only ``local_path`` downloads the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from omni_core.errors import CheckpointError
from omni_core.plugins.predicates import CONFIG, MODEL_INDEX

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


_LONGEST = 1024


class Checkpoint:
    """The configuration files of a checkpoint, read when asked for and kept.

    Attributes:
        source: what the user wrote: a folder, or a hub id such as ``"owner/name"``.
        revision: branch, tag or commit on the hub.
        folder: the local folder; ``None`` for a hub id.

    Raises:
        CheckpointError: ``source`` is neither a folder nor can it be a hub id, or a folder is given a revision.
    """

    def __init__(self, source: str | Path, revision: str | None = None) -> None:
        self.source = str(source)
        self.revision = revision
        if len(self.source) > _LONGEST or "\0" in self.source:
            raise CheckpointError(f"checkpoint {self.source[:40]!r}...: not the name of a folder or of a repository")
        path = Path(source).expanduser()
        self.folder = path if self.source and path.is_dir() else None  # Path("") would be the current folder
        self._files: dict[str, Mapping[str, Any]] = {}
        if self.folder is None and path.is_file():
            raise CheckpointError(f"checkpoint {self.source!r} is a file; give the folder that holds {CONFIG}")
        if self.folder is None and (isinstance(source, Path) or not _HUB_ID.fullmatch(self.source)):
            raise CheckpointError(f"checkpoint {self.source!r}: there is no such folder")
        if self.folder is not None and revision is not None:
            raise CheckpointError(f"checkpoint {self.source!r} is a folder, which has no revision {revision!r}")

    def __repr__(self) -> str:
        return f"Checkpoint({self.source!r}" + (f", revision={self.revision!r})" if self.revision else ")")

    def read(self, file: str) -> Mapping[str, Any]:
        """The JSON object in ``file``, a path below the checkpoint's root; empty if the file is not there.

        Raises:
            CheckpointError: the checkpoint cannot be found or reached, or the file cannot be read or is not a JSON
                object.
            ValueError: ``file`` leads out of the checkpoint.
        """
        if file not in self._files:
            parts = PurePosixPath(file)
            if parts.is_absolute() or ".." in parts.parts:
                raise ValueError(f"{file!r} is not a path below the root of a checkpoint")
            path = self._fetch(file) if self.folder is None else self.folder / file
            self._files[file] = {} if path is None else self._parse(path, file)
        return self._files[file]

    def read_component(self, folder: str) -> Mapping[str, Any]:
        """``config.json`` of a diffusers component, such as ``"transformer"``; raises what ``read`` raises."""
        return self.read(f"{folder}/{CONFIG}")

    def local_path(self) -> Path:
        """The checkpoint's local folder; a hub id is downloaded whole, or found in the cache.

        Raises:
            CheckpointError: it cannot be found or downloaded.
        """
        if self.folder is not None:
            return self.folder
        hub = self._hub()
        try:
            return Path(hub.snapshot_download(self.source, revision=self.revision))
        except Exception as error:  # the hub's client raises dozens of unrelated classes
            raise self._failure(error) from error

    def _parse(self, path: Path, file: str) -> Mapping[str, Any]:
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.source!r}: cannot read {file}: {error.strerror or error}"
            ) from error
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            raise CheckpointError(f"checkpoint {self.source!r}: {file} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(
                f"checkpoint {self.source!r}: {file} must hold a JSON object, not {type(value).__name__}"
            )
        return value

    def _fetch(self, file: str) -> Path | None:
        """Download one file; ``None`` if the repository does not have it."""
        hub = self._hub()
        try:
            return Path(hub.hf_hub_download(self.source, file, revision=self.revision))
        except Exception as error:
            absent = isinstance(error, hub.errors.EntryNotFoundError)
            if absent and (not isinstance(error, hub.errors.LocalEntryNotFoundError) or self._is_cached(hub)):
                return None
            raise self._failure(error) from error

    def _is_cached(self, hub: Any) -> bool:
        """Whether the cache has the repository, so that offline a file that it lacks counts as not there."""
        cached = (hub.try_to_load_from_cache(self.source, f, revision=self.revision) for f in (CONFIG, MODEL_INDEX))
        return any(isinstance(path, str) for path in cached)

    def _hub(self) -> Any:
        try:
            import huggingface_hub
            import huggingface_hub.errors
        except ImportError as error:
            raise CheckpointError(
                f"checkpoint {self.source!r}: there is no such folder, and fetching it from the hub needs "
                "huggingface_hub; run: pip install huggingface_hub"
            ) from error
        return huggingface_hub

    def _failure(self, error: Exception) -> CheckpointError:
        from huggingface_hub import errors

        where = f"checkpoint {self!s}"
        if isinstance(error, errors.GatedRepoError):
            return CheckpointError(f"{where} is gated: accept its terms on the hub and set HF_TOKEN")
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return CheckpointError(
                f"{where}: there is no such folder and no such repository on the hub (a private one needs HF_TOKEN)"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointError(f"{where}: the repository has no revision {self.revision!r}")
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError):
            return CheckpointError(
                f"{where}: there is no such folder, the hub's cache does not have it whole, and the hub cannot be "
                "reached; go online once (without HF_HUB_OFFLINE) or give a folder"
            )
        return CheckpointError(f"{where}: the hub answered {type(error).__name__}: {' '.join(str(error).split())}")

    def __str__(self) -> str:
        return repr(self.source) + (f" at revision {self.revision!r}" if self.revision else "")
