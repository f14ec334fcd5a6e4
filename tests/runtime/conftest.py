"""A toy model family on the path of this process and its children, and engines that serve it."""

import json
import os
import sys
from pathlib import Path

import pytest

from omni_core.checkpoint import Checkpoint
from omni_core.config.model import Resolved, ServerConfig, Setting, StageConfig
from omni_core.plugins import manager as manager_module
from omni_core.plugins.manager import PluginManager

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(scope="package")
def toy_plugin(tmp_path_factory):
    """The toy distribution, visible here and in child processes; gives the plugin manager that sees it."""
    site = tmp_path_factory.mktemp("site")
    info = site / "omni_plugin_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-plugin-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[omni_core.plugins]\ntoy = omni_plugin_toy.plugin\n")
    added = [str(site), str(TOY)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", added + sys.path)
        patch.setenv("PYTHONPATH", os.pathsep.join([*added, os.environ.get("PYTHONPATH", "")]))
        manager = PluginManager.scan()
        patch.setattr(manager_module, "_manager", manager)
        yield manager


@pytest.fixture(scope="package")
def toy_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy-checkpoint")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    return folder


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


sys.path.insert(0, str(TOY))  # for ``reference``, what the toy model must give
