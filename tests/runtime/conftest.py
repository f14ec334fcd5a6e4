"""A toy model family on the path of this process and its children, and engines that serve it."""

import os
import sys

import pytest

from omni_core.checkpoint import Checkpoint
from omni_core.config.model import Resolved, ServerConfig, Setting, StageConfig
from omni_core.plugins import manager as manager_module
from omni_core.plugins.manager import PluginManager


@pytest.fixture(scope="package")
def toy_plugin(toy_site):
    """The toy distribution, visible here and in child processes; gives the plugin manager that sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", toy_site + sys.path)
        patch.setenv("PYTHONPATH", os.pathsep.join([*toy_site, os.environ.get("PYTHONPATH", "")]))
        manager = PluginManager.scan()
        patch.setattr(manager_module, "_manager", manager)
        yield manager


@pytest.fixture(scope="package")
def resolve_toy(toy_plugin, toy_checkpoint):
    """Give a resolved configuration of the toy model with the given engine arguments."""

    def make(**engine):
        checkpoint = Checkpoint(str(toy_checkpoint))
        family = toy_plugin.match(checkpoint)
        platform = toy_plugin.platform("cpu")
        from omni_plugin_toy.family import pipeline

        stage = pipeline(checkpoint).stage
        values = {**platform.stage_defaults.get("diffusion", {}), "max_num_seqs": 4, **engine}
        config = StageConfig(
            stage=stage,
            engine={name: Setting(value, "test") for name, value in values.items()},
            options={name: Setting(value, "test") for name, value in stage.options.items()},
            attention_backend=Setting(None, "test"),
        )
        return Resolved(
            model="toy",
            checkpoint=checkpoint,
            family=family,
            platform=platform,
            pipeline=pipeline(checkpoint),
            stages={stage.name: config},
            server=ServerConfig(),
        )

    return make
