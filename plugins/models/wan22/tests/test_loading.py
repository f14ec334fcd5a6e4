"""Strict loading: what does not fit is named, what fits is loaded once, and nothing is held twice."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from wan22_support import sdpa

from omni_core.errors import CheckpointError

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def build(parallel, two_experts):
    """A transformer of the checkpoint's shape, filled with a value that no weight has."""
    from omni_core.checkpoint import Checkpoint
    from omni_plugin_wan22.transformer import TransformerConfig, WanTransformer

    def build():
        config = TransformerConfig.from_json(Checkpoint(two_experts).read("transformer/config.json"))
        transformer = WanTransformer(config, torch.float32, sdpa)
        for parameter in transformer.parameters():
            parameter.data.fill_(float("nan"))
        return transformer

    return build


@pytest.fixture
def folder(two_experts, tmp_path):
    return shutil.copytree(two_experts / "transformer", tmp_path / "transformer")


def load(module, folder):
    from omni_core.vllm.loading import load_weights
    from omni_plugin_wan22.transformer import checkpoint_name

    load_weights(module, folder, checkpoint_name)
    return module


def output(transformer):
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 1, 4, 4, generator=generator), torch.randn(1, 5, 32, generator=generator)
    with torch.inference_mode():
        return transformer(latents, torch.tensor([[500.0]]), text)


def change(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_every_parameter_is_filled(build, folder, monkeypatch):
    from omni_core.vllm import loading

    monkeypatch.setattr(loading, "_prepare", lambda module: None)  # CPU kernels keep their own copy of the weights
    assert all(p.isfinite().all() for p in load(build(), folder).parameters())


@pytest.mark.parametrize("name", ["blocks.1.attn1.to_k.bias", "blocks.0.attn2.to_v.weight", "patch_embedding.bias"])
def test_a_missing_tensor_is_named(build, folder, name):
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"1 missing \({name}\)"):
        load(build(), folder)


def test_an_unexpected_tensor_is_named(build, folder):
    change(folder, lambda tensors: tensors.update({"blocks.9.extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected \(blocks.9.extra\)"):
        load(build(), folder)


def test_many_names_are_cut_short(build, folder):
    change(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("blocks.2.")])
    with pytest.raises(CheckpointError, match=r"missing \(blocks.2.*and \d+ more\)"):
        load(build(), folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blocks.0.attn1.to_q.weight", (48, 24)),  # a rank's slice of it would have the right shape
        ("blocks.0.attn2.norm_q.weight", (48,)),
        ("blocks.0.ffn.net.2.weight", (24, 96)),
        ("proj_out.bias", (1,)),
        ("scale_shift_table", (2, 24)),
    ],
)
def test_a_wrong_shape_is_named(build, folder, name, shape):
    change(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[{', '.join(map(str, shape))}\], but"):
        load(build(), folder)


def test_a_quantized_tensor_is_refused(build, folder):
    name = "blocks.0.attn1.to_q.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=f"{name} is stored as float8_e4m3fn"):
        load(build(), folder)


def test_shards_load_as_one_file_does(build, folder, tmp_path):
    from omni_plugin_wan22.checkpoints import write_checkpoint

    sharded = write_checkpoint(tmp_path / "sharded", shard_size="50KB") / "transformer"
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(output(load(build(), sharded)), output(load(build(), folder)))


def test_a_missing_shard_is_named(build, tmp_path):
    from omni_plugin_wan22.checkpoints import write_checkpoint

    sharded = write_checkpoint(tmp_path / "sharded", shard_size="50KB") / "transformer"
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"not there: {gone.name}"):
        load(build(), sharded)


def test_an_index_that_lies_is_refused(build, tmp_path):
    from omni_plugin_wan22.checkpoints import write_checkpoint

    sharded = write_checkpoint(tmp_path / "sharded", shard_size="50KB") / "transformer"
    (index,) = sharded.glob("*.index.json")
    values = json.loads(index.read_text())
    first, *_, last = sorted(set(values["weight_map"].values()))
    moved = next(name for name, file in values["weight_map"].items() if file == first)
    values["weight_map"][moved] = last
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"holds other tensors.*{moved}"):
        load(build(), sharded)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no .*safetensors file"),
        (["pytorch_model.bin"], "only pickled weights .pytorch_model.bin.*save the checkpoint again as safetensors"),
        (["a.safetensors", "b.safetensors"], "several weight files .a.safetensors, b.safetensors.*keep one file"),
        (["a.safetensors"], "a.safetensors: not a readable safetensors file"),
        (["a.safetensors.index.json"], "not an index of safetensors shards"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "more than one index"),
    ],
)
def test_unusable_folders_say_why(parallel, tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=message):
        load(nn.Linear(2, 2), tmp_path)


def tied_encoder():
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with torch.device("meta"):
        return UMT5EncoderModel(config)


@pytest.mark.parametrize("names", [("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_tied_weights_load_from_any_of_their_names(parallel, tmp_path, names):
    from omni_core.vllm.loading import load_weights, materialise

    encoder = tied_encoder()
    tensors = {name: torch.randn(p.shape) for name, p in encoder.named_parameters() if name != "shared.weight"}
    table = torch.randn(8, 8)
    save_file({**tensors, **{f"{name}.weight": table.clone() for name in names}}, tmp_path / "model.safetensors")
    materialise(encoder, torch.device("cpu"))
    load_weights(encoder, tmp_path)
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    assert torch.equal(encoder.shared.weight, table)


def test_tied_weights_that_differ_are_refused(parallel, tmp_path):
    from omni_core.vllm.loading import load_weights, materialise

    encoder = tied_encoder()
    tensors = {name: torch.randn(p.shape) for name, p in encoder.named_parameters()}
    save_file({**tensors, "encoder.embed_tokens.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    materialise(encoder, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"shared.weight, encoder.embed_tokens.weight must be equal"):
        load_weights(encoder, tmp_path)


def test_a_buffer_that_no_checkpoint_holds_is_not_lost_in_silence(parallel):
    from omni_core.vllm.loading import materialise

    with torch.device("meta"):
        module = nn.Module()
        module.register_buffer("inner", torch.zeros(1), persistent=False)
    with pytest.raises(ValueError, match="inner is not stored in checkpoints"):
        materialise(module, torch.device("cpu"))


def test_a_model_is_not_in_memory_twice(parallel, tmp_path, monkeypatch):
    """Given 64 tensors of 4 MiB, when they are loaded, then beside the model there is memory for a few at most."""
    from omni_core import weights
    from omni_core.vllm import loading

    module = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(64))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    total = sum(p.numel() * p.element_size() for p in module.parameters())

    def growth():
        start, peaks = anonymous_memory(), [0]
        monkeypatch.setattr(
            loading, "default_weight_loader", lambda p, t: (p.data.copy_(t), peaks.append(anonymous_memory() - start))
        )
        loading.load_weights(module, tmp_path)
        return max(peaks)

    assert growth() < 0.25 * total

    held = []

    def hold(*arguments, **options):
        file = safe_open(*arguments, **options)
        return Holder(file, held)

    monkeypatch.setattr(weights, "safe_open", hold)
    assert growth() > 0.75 * total  # the measure sees a loader that keeps what it read


class Holder:
    """An open file whose tensors are copied and kept."""

    def __init__(self, file, held):
        self.file, self.held = file, held

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_tensor(self, name):
        self.held.append(self.file.get_tensor(name).clone())
        return self.held[-1]


def anonymous_memory() -> int:
    """Bytes of this process's memory that no file backs."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
