"""Installing Omni changes nothing for plain vLLM: the same registries, parsers, environment and loaded modules."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.serve

# Runs what every plain vLLM process runs at start, then says what it left behind.
PROBE = """
import json, os, sys
before = dict(os.environ)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER as parsers
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
print("\\n" + json.dumps({
    "architectures": sorted(ModelRegistry.get_supported_archs()),
    "parsers": sorted(parsers),
    "quantization": sorted(QUANTIZATION_METHODS),
    "configs": sorted(CONFIG_MAPPING.keys()),
    "platform": type(current_platform).__module__ + "." + type(current_platform).__name__,
    "environment": sorted(set(os.environ.items()) - set(before.items())),
    "defaults": repr(AsyncEngineArgs(model=os.getcwd())),
    "omni": sorted(m for m in sys.modules if m.startswith("omni_") and m != "omni_dev_torchvision"),
}))
"""

# Hides every distribution of Omni's from importlib.metadata, as if none were installed.
HIDE = """
import importlib.metadata as metadata
_find = metadata.MetadataPathFinder.find_distributions.__func__
def find_distributions(cls, *args, **kwargs):
    return [d for d in _find(cls, *args, **kwargs) if not (d.metadata["Name"] or "").startswith("omni-")]
metadata.MetadataPathFinder.find_distributions = classmethod(find_distributions)
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("omni_core", "vllm_omni"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
"""


def probe(prefix="", **env):
    answer = subprocess.run(
        [sys.executable, "-c", prefix + PROBE],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return json.loads(answer.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def without():
    found = probe(HIDE)
    assert found["omni"] == []
    return found


# What vLLM imports of a platform to ask whether it is wanted.
ASKED = {"omni_platform_cpu", "omni_platform_cpu.entry"}


def test_registries_defaults_and_environment_are_untouched(without):
    installed = probe()
    loaded = installed.pop("omni")
    assert installed == {name: value for name, value in without.items() if name != "omni"}
    assert not {name for name in loaded if name.startswith(("omni_plugin", "omni_platform"))} - ASKED, loaded


def test_the_probe_sees_an_omni_process(without):
    from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, PluginManager

    active = probe(**{PLUGIN_SET_VARIABLE: PluginManager.scan().plugin_set.to_json()})
    assert set(active["architectures"]) - set(without["architectures"]) == {
        "OmniDiffusionModel",
        "Qwen3TTSTalkerForConditionalGeneration",
    }
    assert set(active["parsers"]) - set(without["parsers"]) == {"omni_diffusion"}
    if without["platform"] == "vllm.platforms.cpu.CpuPlatform":
        assert active["platform"] == "omni_platform_cpu.platform.OmniCpuPlatform"
