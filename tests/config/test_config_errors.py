"""What is wrong is refused with the thing, the value and the way out; nothing is ignored."""

import pytest
from made_up import shipping

from omni_core.config import Setting
from omni_core.config.server import DEFAULT
from omni_core.errors import ConfigError
from omni_core.plugins.declarations import Combination, Support

STAGE = "the diffusion stage 'diffusion'"


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        ("stage: {}", r"unknown key 'stage'; did you mean 'stages'\?"),
        ("stages: {difusion: {}}", r"stages: unknown stage 'difusion'; did you mean 'diffusion'\?"),
        ("stages: {diffusion: {dtyp: auto}}", r"stages.diffusion.dtyp: unknown key 'dtyp'; did you mean 'dtype'\?"),
        ("stages: {diffusion: {gian: 1}}", r"unknown key 'gian'; did you mean 'gain'\?"),
        ("stages: {diffusion: {max_num_seqs: many}}", "diffusion.max_num_seqs: expected an integer, got 'many'"),
        ("stages: {diffusion: {max_num_seqs: true}}", "expected an integer, got True"),
        ("stages: {diffusion: {dtype: float31}}", "expected one of 'auto', 'float32', 'bfloat16', got 'float31'"),
        ("stages: {diffusion: {gain: high}}", "gain: expected a number, got 'high'"),
        ("stages: {diffusion: {tiled: 1}}", "tiled: expected true or false, got 1"),
        ("stages: {diffusion: {device_ids: 0}}", "expected a list or null, got 0"),
        ("stages: {diffusion: {worker_cls: a.B}}", f"worker_cls cannot be set for {STAGE}: omni-core decides it"),
        ("stages: {diffusion: {speculative_config: {}}}", f"speculative_config has no meaning for {STAGE}"),
        ("stages: {diffusion: {dtype: auto, dtype: float32}}", "the key 'dtype' is given twice"),
        ("stages: {diffusion: {max-num-seqs: 1, max_num_seqs: 2}}", "once with dashes and once with underscores"),
        ("stages: [1]", r"stages must be a mapping of keys to values, got \[1\]"),
        ("just text", "must be a mapping of keys to values"),
        ("stages: {1: {}}", "keys must be strings, got 1"),
        ("a: [", r"is not valid YAML \(line 1\)"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("server: {port: 1}", r"unknown server setting 'port'.*vLLM's own server flags go on the command line"),
        ("server: {max_queued_request: 1}", r"did you mean 'max_queued_requests'\?"),
        ("server: {max_queued_requests: 0}", "max_queued_requests must be at least 1, got 0"),
        ("server: {video_ttl_seconds: 1.5}", "server.video_ttl_seconds: expected an integer, got 1.5"),
    ],
)
def test_a_wrong_deploy_file(configure, deploy, message):
    with pytest.raises(ConfigError, match=message):
        configure(deploy=deploy)


def test_an_empty_deploy_file_is_fine(configure):
    assert configure(deploy="# nothing\n").stage.engine["dtype"].value == "auto"
    assert configure(deploy="stages:\nserver:\n").stage.engine["dtype"].value == "auto"
    assert configure(deploy="stages: {diffusion: }").stage.engine["dtype"].value == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype=auto", r"--set takes STAGE.KEY=VALUE, got 'dtype=auto'"),
        ("diffusion.dtype", "--set takes STAGE.KEY=VALUE"),
        ("diffusion.=1", "--set takes STAGE.KEY=VALUE"),
        ("diffusion.dtype=[", r"--set diffusion.dtype: cannot read '\['"),
        ("diffusion.dtpe=auto", r"--set diffusion.dtpe: unknown key 'dtpe'; did you mean 'dtype'\?"),
        ("vae.dtype=auto", "--set vae.dtype: unknown stage 'vae'; known: diffusion"),
        ("diffusion.gpu_memory_utilization=most", "expected a number, got 'most'"),
        ("diffusion.revision=main", "it is the checkpoint's; give it as --revision"),
    ],
)
def test_a_wrong_set(configure, text, message):
    with pytest.raises(ConfigError, match=message):
        configure(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_config": {}}, f"--speculative-config has no meaning for {STAGE}"),
        ({"worker_cls": "a.B"}, f"--worker-cls cannot be set for {STAGE}: omni-core decides it"),
        ({"seed": 0}, 'send "seed" with it'),
        ({"trust_remote_code": True}, "--trust-remote-code cannot be used for .* is never run"),
        ({"chat_template": "x"}, f"--chat-template has no meaning for {STAGE}"),
        ({"api_server_count": 2}, "--api-server-count cannot be 2 for .*: Omni runs one server process"),
        ({"headless": True}, "--headless cannot be used for .*--distributed-executor-backend ray"),
        ({"grpc": True}, "--grpc cannot be used for .*: Omni serves HTTP"),
        ({"data_parallel_size": 2}, "--data-parallel-size cannot be 2 for .*: only tensor parallelism"),
        (
            {"prefill_context_parallel_size": 2},
            "--prefill-context-parallel-size cannot be 2 for .*: only tensor parallel",
        ),
        ({"data_parallel_rank": 0}, "--data-parallel-rank cannot be set for .*: only tensor parallelism"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(configure, flags, message):
    with pytest.raises(ConfigError, match=message):
        configure(**flags)


@pytest.mark.parametrize(
    "flags",
    [{"trust_remote_code": False}, {"api_server_count": 1}, {"data_parallel_size": 1}],
)
def test_asking_for_what_is_done_anyway_is_fine(configure, flags):
    assert configure(**flags).stage.engine.keys().isdisjoint(flags)


def test_devices_cannot_be_chosen_with_ray(configure):
    with pytest.raises(ConfigError, match=r"device_ids \(--device-ids\) has no effect with Ray"):
        configure("diffusion.distributed_executor_backend=ray", device_ids=[0])


def test_flags_of_the_server_are_left_to_the_server(configure):
    assert "port" not in configure(port=8001, host="::1", api_key=["k"], model_tag="m").stage.engine


def test_server_settings_and_their_sources(configure, tmp_path):
    server = configure(
        deploy=f"server: {{video_store: {tmp_path / 'videos'}, max_queued_requests: 2, allow_routes: [b, a, b]}}",
        server={"max_queued_requests": 3},
    ).server

    assert (server.max_queued_requests, server.video_store) == (3, tmp_path / "videos")
    assert server.allow_routes == ("b", "a")
    assert server.sources["max_queued_requests"] == "--max-queued-requests"
    assert server.sources["video_store"].startswith("deploy file ")
    assert server.sources["video_ttl_seconds"] == DEFAULT
    assert not (tmp_path / "videos").exists()  # resolving changes nothing


@pytest.mark.parametrize("name", ["video_store", "voice_store"])
def test_a_store_that_cannot_be(configure, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')}: {name} .* is not a folder"):
        configure(server={name: str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=rf"{name} .* there is no folder .* to make it in"):
        configure(server={name: str(tmp_path / "a" / "b")})


def test_an_unsupported_combination_is_refused_with_the_familys_reason(configure, served):
    table = (Combination(frozenset({"tensor-parallel"}), Support.UNSUPPORTED, "its heads cannot be split"),)
    with pytest.raises(ConfigError, match="'made-up' does not support tensor-parallel: its heads cannot be split"):
        configure(tensor_parallel_size=2, served=shipping(served, combinations=table))


def test_an_untested_combination_warns_once(configure, served):
    table = (Combination(frozenset({"step-batching"}), Support.VALIDATED),)
    made_up = shipping(served, combinations=table)

    assert configure(served=made_up).warnings == ()
    assert configure(tensor_parallel_size=2, served=made_up).warnings == (
        "family 'made-up' is untested with step-batching + tensor-parallel",
    )
    assert configure(max_num_seqs=1, served=shipping(served, combinations=())).warnings == ()


def test_a_limited_combination_warns_with_its_reason(configure, served):
    table = (
        Combination(frozenset({"tensor-parallel"}), Support.LIMITED, "slow"),
        Combination(frozenset({"step-batching"}), Support.VALIDATED),
        Combination(frozenset({"step-batching", "tensor-parallel"}), Support.VALIDATED),
    )
    resolved = configure(tensor_parallel_size=2, served=shipping(served, combinations=table))

    assert resolved.warnings == ("family 'made-up' supports tensor-parallel within limits: slow",)
    assert resolved.stage.engine["tensor_parallel_size"] == Setting(2, "--tensor-parallel-size")
