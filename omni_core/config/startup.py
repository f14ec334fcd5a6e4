"""What has to be so before anything heavy is imported: versions, a family for the checkpoint, a platform at all."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.checkpoint import Checkpoint
from omni_core.config.resolve import Served
from omni_core.errors import MissingPlugin, OmniError, PluginError
from omni_core.pipeline import Pipeline
from omni_core.plugins.declarations import ModelFamily, Platform, load_reference
from omni_core.plugins.loading import one_line
from omni_core.plugins.manager import PluginManager, get_manager
from omni_core.plugins.table import install_command
from omni_core.plugins.versions import require_vllm


@dataclass(frozen=True)
class Matched:
    """A checkpoint and the family that serves it."""

    checkpoint: Checkpoint
    family: ModelFamily
    pipeline: Pipeline

    def on(self, device_type: str) -> Served:
        """With the platform for a torch device type. Raises what ``PluginManager.platform`` raises."""
        return Served(self.checkpoint, self.family, get_manager().platform(device_type), self.pipeline)


def check_versions(*, allow_version_mismatch: bool = False) -> PluginManager:
    """Scan the plugins and check what everything stands on.

    Raises:
        MissingPlugin: there is no vLLM, or no platform plugin.
        VersionMismatch: vLLM is of a version that this core does not run on.
    """
    require_vllm(allow_version_mismatch=allow_version_mismatch)
    manager = get_manager(allow_version_mismatch=allow_version_mismatch)
    if not manager.declared(Platform):
        failed = [record for record in manager.records if record.failed]
        if failed:
            raise failed[0].error()
        raise MissingPlugin(f"no platform plugin is installed; run: {install_command()}")
    return manager


def match(model: str, revision: str | None = None) -> Matched:
    """Find the family that serves a checkpoint, and its pipeline.

    Raises:
        CheckpointError: the checkpoint cannot be found, read or served.
        MissingPlugin: no installed family claims it; the message says what to do.
        PluginError: two families claim it equally, or the family's plugin is broken or incompatible.
    """
    checkpoint = Checkpoint(model, revision)
    family = get_manager().match(checkpoint)
    try:
        pipeline = load_reference(family.pipeline)(checkpoint)
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"it gave {pipeline!r}")
    except OmniError:
        raise
    except (Exception, SystemExit) as error:  # whatever a plugin's own code raises
        raise PluginError(f"family {family.name!r}: its pipeline raised {one_line(error)}") from error
    return Matched(checkpoint, family, pipeline)
