"""A made-up family on a made-up platform, and what a user asks of them."""

import json
from dataclasses import replace

import pytest
from made_up import ENGINE_ARGUMENTS

from omni_core.checkpoint import Checkpoint
from omni_core.config import Explicit, Served, resolve
from omni_core.config.deploy import override_from_text, read_deploy
from omni_core.pipeline import DiffusionStage, Pipeline
from omni_core.plugins.declarations import Cardinality, Combination, Modality, ModelFamily, Platform, Support
from omni_core.plugins.predicates import ClassName


@pytest.fixture
def served(tmp_path):
    """A checkpoint with a family and a platform that ship no defaults."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "MadeUpPipeline"}))
    family = ModelFamily(
        name="made-up",
        matches=ClassName("MadeUpPipeline"),
        inputs=(Cardinality(Modality.TEXT),),
        outputs=(Cardinality(Modality.VIDEO),),
        pipeline="made_up:pipeline",
        request="made_up:request",
        combinations=(
            Combination(frozenset({"step-batching"}), Support.VALIDATED),
            Combination(frozenset({"tensor-parallel", "step-batching"}), Support.VALIDATED),
        ),
    )
    platform = Platform("hardware", "toaster", "hardware:Worker", "hardware:attention")
    stage = DiffusionStage("diffusion", "made_up:Model", options={"gain": 0.5, "tiled": True})
    return Served(Checkpoint(folder), family, platform, Pipeline((stage,)))


@pytest.fixture
def configure(served, tmp_path):
    """Resolve what a user gives: flags by name, texts of --set, the text of a deploy file, server settings."""

    def run(*sets, deploy=None, server=None, served=served, **flags):
        explicit = Explicit(
            arguments=flags,
            overrides=[override_from_text(text) for text in sets],
            server=server or {},
        )
        if deploy is not None:
            file = tmp_path / "deploy.yaml"
            file.write_text(deploy)
            explicit = replace(explicit, deploy=read_deploy(file))
        return resolve(served, explicit, ENGINE_ARGUMENTS)

    return run
