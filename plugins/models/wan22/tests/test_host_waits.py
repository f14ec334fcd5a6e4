"""No denoising step makes the host wait for the device, and UniPC gives diffusers' bits all the same.

The device is ``meta`` here: what would be copied to or from it, or read from it, is seen by its operators.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wan22_support import BASE, TI2V, TWO_EXPERTS, picture

from omni_plugin_wan22.schedule import FlowSampler, HostUniPC, flow_sampler

READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "linalg", "is_nonzero")
"""Operators whose result, or whose check, the host reads."""


class Waits(TorchDispatchMode):
    """Writes down the operators for which the host of a CUDA device would wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.is_meta for tensor in tensors)
        crosses = on_device != (isinstance(result, torch.Tensor) and result.is_meta) and bool(tensors)
        copied = name in ("_to_copy", "copy_") and not kwargs.get("non_blocking") and args[-1] is not True
        mixed = on_device and any(
            tensor.dim() and not tensor.is_meta for tensor in tensors
        )  # such as a list of indices
        if (
            (on_device and any(read in name for read in READ))
            or (copied and (crosses or mixed))
            or (on_device and name == "index")
        ):
            self.seen.append(name)
        return result


def waits_of(work):
    with Waits() as waits:
        work()
    return waits.seen


def run(sampler, device="meta"):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 4, 3, 4, 6, generator=generator)
    latents = [x.to(device)]
    velocities = [torch.randn(x.shape, generator=generator).to(device) for _ in sampler.timesteps]

    def steps():
        for index, velocity in enumerate(velocities):
            latents.append(sampler.step(index, velocity + 0.1 * latents[-1], latents[-1]))

    return steps, latents


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver_type", ["bh1", "bh2"])
@pytest.mark.parametrize("more", [{}, {"predict_x0": False, "prediction_type": "epsilon", "use_flow_sigmas": False}])
def test_unipc_is_diffusers_to_the_bit(order, solver_type, more):
    for steps in (1, 2, 3, 12):
        config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0, **more}
        config |= {"solver_order": order, "solver_type": solver_type}
        made = []
        for scheduler in (UniPCMultistepScheduler, HostUniPC):
            work, latents = run(FlowSampler(scheduler(**config), steps), "cpu")
            work()
            made.append(latents)
        assert len(made[0]) == steps + 1
        for theirs, ours in zip(*made, strict=True):  # some settings give no numbers at sigma 0 or 1, and that alike
            assert bool(ours.isfinite().all()) or solver_type == "bh1" or more
            assert np.array_equal(theirs.numpy(), ours.numpy(), equal_nan=True)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_a_step_of_a_sampler_leaves_the_host_free(solver):
    steps, latents = run(flow_sampler(solver, {}, 5.0, 12))
    assert waits_of(steps) == [] and latents[-1].is_meta


def test_the_steps_of_diffusers_own_unipc_do_not():
    """So that the test above means something."""
    config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    steps, _ = run(FlowSampler(UniPCMultistepScheduler(**config), 12))
    seen = waits_of(steps)
    assert "_to_copy" in seen and any("linalg" in name for name in seen)
    euler = FlowMatchEulerDiscreteScheduler()
    assert waits_of(run(FlowSampler(euler, 3))[0]) == []


def test_what_makes_a_host_wait_is_seen():
    x = torch.ones(3, 2, device="meta")
    assert waits_of(lambda: torch.ones(2).to("meta")) == ["_to_copy"]
    assert waits_of(lambda: torch.ones(2).to("meta", non_blocking=True)) == []
    assert waits_of(lambda: x.clone().copy_(torch.ones(3, 2))) == ["copy_"]
    assert waits_of(lambda: x[[0, 2]]) == ["index"]
    assert waits_of(lambda: x * torch.tensor(2.0)) == []


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("t2v-a14b", TWO_EXPERTS),
        ("i2v-a14b", {**TWO_EXPERTS, "image": picture(1)}),
        ("ti2v-5b", {**TI2V, "image": picture(1)}),
        ("t2v-2.1", {**BASE, "sample_solver": "euler"}),
    ],
)
def test_a_step_of_requests_together_leaves_the_host_free(model_of, parser_of, kind, values):
    """Given a guided request and one that is not, in one forward; tables of positions are made once, before."""
    model = model_of(kind)
    with torch.inference_mode():
        unguided = {n: v for n, v in values.items() if n not in ("negative_prompt", "guidance_scale_2")}
        both = values, {**unguided, "guidance_scale": 1.0, "seed": 8}
        states = [model.begin(parser_of(kind)(**fields)) for fields in both]
    model = copy.deepcopy(model).to("meta")
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):  # vLLM's product on CPUs, for weights that it has packed
            size = getattr(layer, "output_size_per_partition", layer.output_size)
            layer.cpu_linear = lambda x, weight, bias, size=size: F.linear(x, x.new_empty(size, x.shape[-1]), bias)
    for state in states:
        for part in (state, state.condition):
            for name, value in vars(part).items() if part is not None else ():
                if isinstance(value, torch.Tensor):
                    object.__setattr__(part, name, value.to("meta"))

    def step():
        for state, prediction in zip(states, model.predict(states), strict=True):
            model.advance(state, prediction)
            state.step += 1

    with torch.inference_mode():
        step()
        seen = [waits_of(step) for _ in range(3)]
    assert seen == [[], [], []] and all(state.latents.is_meta for state in states)
