"""Explicit over deploy file over family over platform over vLLM's default, whatever layers speak."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import ENGINE_ARGUMENTS, shipping

from omni_core.config import Explicit, Setting, as_argument, resolve
from omni_core.config.arguments_table import DEFAULTS
from omni_core.config.deploy import Deploy, override_from_item, override_from_text
from omni_core.config.model import VLLM_DEFAULT
from omni_core.errors import ConfigError, PluginError

VALUES = {
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "tensor_parallel_size": st.just(1),
    "max_num_seqs": st.integers(1, 64),
    "gpu_memory_utilization": st.floats(0, 1).map(lambda x: round(x, 3)),
    "enable_sleep_mode": st.booleans(),
    "device_ids": st.lists(st.integers(0, 7), min_size=1),
    "gain": st.floats(0, 9).map(lambda x: round(x, 3)),
}
ENGINE_KEYS = [key for key in VALUES if key != "gain"]


def layer(keys):
    return st.fixed_dictionaries({}, optional={key: VALUES[key] for key in keys})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    flags=layer(ENGINE_KEYS), sets=layer(VALUES), deploy=layer(VALUES), family=layer(ENGINE_KEYS),
    platform=layer(ENGINE_KEYS),
)  # fmt: skip
def test_the_strongest_layer_that_speaks_wins_and_is_named(served, flags, sets, deploy, family, platform):
    sets = {key: value for key, value in sets.items() if key not in flags}  # both at once: see below
    explicit = Explicit(
        arguments=flags,
        overrides=[
            override_from_text(f"diffusion.{k}={yaml.safe_dump(v, default_flow_style=True)}") for k, v in sets.items()
        ],
        deploy=Deploy("deploy file d.yaml", {"diffusion": deploy}),
    )

    resolved = resolve(shipping(served, family=family, platform=platform), explicit, ENGINE_ARGUMENTS)

    for key in VALUES:
        setting = resolved.stage.options[key] if key == "gain" else resolved.stage.engine[key]
        layers = [
            ("--" + key.replace("_", "-"), flags),
            (f"--set diffusion.{key}", sets),
            ("deploy file d.yaml", deploy),
            ("family made-up", family | {"gain": 0.5}),
            ("platform hardware", platform),
            ("omni default", DEFAULTS["diffusion"]),
            (VLLM_DEFAULT, {name: argument.default for name, argument in ENGINE_ARGUMENTS.items()}),
        ]
        expected = next(Setting(values[key], source) for source, values in layers if key in values)
        assert setting == expected


def test_a_flag_that_repeats_the_default_is_explicit(configure):
    resolved = configure(deploy="stages: {diffusion: {dtype: bfloat16}}", dtype="auto")

    assert resolved.stage.engine["dtype"] == Setting("auto", "--dtype")


def test_flag_and_set_must_not_contradict_each_other(configure):
    with pytest.raises(ConfigError, match=r"--dtype says 'float32' and --set diffusion.dtype says 'bfloat16'"):
        configure("diffusion.dtype=bfloat16", dtype="float32")

    assert configure("diffusion.dtype=float32", dtype="float32").stage.engine["dtype"].value == "float32"


def test_the_last_set_of_a_key_wins(configure):
    assert configure("diffusion.max_num_seqs=2", "diffusion.max_num_seqs=3").stage.engine["max_num_seqs"].value == 3


def test_every_allowed_flag_reaches_the_stage(configure, served):
    values = {"dtype": "float32", "max_num_seqs": 2, "gpu_memory_utilization": 0.5, "device_ids": [1]}

    engine = configure(**values).stage.engine

    assert {key: engine[key].value for key in values} == values


def test_options_of_the_family_are_set_like_engine_arguments(configure):
    resolved = configure("diffusion.gain=2", deploy="stages: {diffusion: {tiled: false}}")

    assert resolved.stage.options == {
        "gain": Setting(2.0, "--set diffusion.gain"),
        "tiled": Setting(False, resolved.stage.options["tiled"].source),
    }
    assert resolved.stage.options["tiled"].source.startswith("deploy file ")


def test_dashes_and_underscores_are_one_key(configure):
    assert configure("diffusion.max-num-seqs=3").stage.engine["max_num_seqs"].value == 3
    assert configure(deploy="stages: {diffusion: {max-num-seqs: 4}}").stage.engine["max_num_seqs"].value == 4


def test_an_attention_backend_is_checked_with_the_plugins(served):
    asked = []
    explicit = Explicit(arguments={"attention_backend": "fast"})

    resolved = resolve(served, explicit, ENGINE_ARGUMENTS, require_attention=asked.append)

    assert asked == ["fast"]
    assert resolved.stage.attention_backend == Setting("fast", "--attention-backend")
    assert resolve(served, Explicit(), ENGINE_ARGUMENTS).stage.attention_backend == Setting(None, "platform hardware")


def test_the_python_api_differs_from_flags_in_spelling_alone(served):
    by_flag = resolve(served, Explicit({"max_num_seqs": 3}, [override_from_text("diffusion.gain=2")]), ENGINE_ARGUMENTS)
    by_name = resolve(
        served,
        Explicit({"max_num_seqs": 3}, [override_from_item("diffusion.gain", 2)], spell=as_argument),
        ENGINE_ARGUMENTS,
    )

    assert by_name.stage.engine["max_num_seqs"] == Setting(3, "max_num_seqs=")
    assert by_name.stage.options["gain"] == Setting(2.0, "overrides['diffusion.gain']")
    values = [{k: s.value for k, s in (r.stage.engine | r.stage.options).items()} for r in (by_flag, by_name)]
    assert values[0] == values[1]


@pytest.mark.parametrize("where", ["family", "platform"])
def test_a_wrong_shipped_default_is_the_plugins_fault(served, where):
    wrong = shipping(served, **{where: {"max_num_seq": 4}})

    with pytest.raises(PluginError, match=rf"{where} .*unknown key 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        resolve(wrong, Explicit(), ENGINE_ARGUMENTS)


def test_an_option_must_not_be_named_like_an_engine_argument(served):
    stage = replace(served.pipeline.stage, options={"dtype": "float32"})
    clashing = replace(served, pipeline=replace(served.pipeline, stages=(stage,)))

    with pytest.raises(
        PluginError, match="'dtype' of the diffusion stage 'diffusion' has the name of an engine argument"
    ):
        resolve(clashing, Explicit(), ENGINE_ARGUMENTS)
