"""vLLM's own parser: what the user gave and what is a default, and that each allowed flag reaches the stage."""

import json
import sys

import pytest

from omni_core.cli import serve
from omni_core.cli.options import add_options, merge_options, take_options
from omni_core.config import VLLM_DEFAULT, Explicit, show
from omni_core.config.arguments_table import CHECKPOINT, DIFFUSION, FIXED, SERVER
from omni_core.config.deploy import read_deploy
from omni_core.config.startup import match
from omni_core.errors import ConfigError
from omni_core.vllm.arguments import ServeParser, engine_arguments, resolve_for_api, resolve_for_vllm


@pytest.fixture(scope="module")
def parser():
    return ServeParser("omni serve", add_options)


@pytest.fixture
def parse(parser):
    """Parse words as what follows ``serve``."""
    return lambda *words: parser.parse(list(map(str, words)))


@pytest.mark.parametrize(
    ("argv", "explicit"),
    [
        ("m", {}),
        ("m --dtype auto", {"dtype": "auto"}),
        ("m --tensor-parallel-size 1", {"tensor_parallel_size": 1}),
        ("m --tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("m -tp 2", {"tensor_parallel_size": 2}),
        ("m --tensor-parallel-siz 2", {"tensor_parallel_size": 2}),
        ("m --no-enable-sleep-mode", {"enable_sleep_mode": False}),
        ("m --enable_sleep_mode", {"enable_sleep_mode": True}),
        ("m --device-ids 0,1", {"device_ids": [0, 1]}),
        ("m --middleware a.b --middleware c.d", {"middleware": ["a.b", "c.d"]}),
        ("m --api-key k", {"api_key": ["k"]}),
        ("m --max-queued-requests 5", {"max_queued_requests": 5}),
    ],
)
def test_only_what_was_given_is_explicit(parse, argv, explicit):
    assert parse(*argv.split()).explicit_values() == {"model_tag": "m", **explicit}


def test_parsing_leaves_no_trace(parse):
    first, second = parse("m", "--dtype", "auto"), parse("m")

    assert first.explicit == {"model_tag", "dtype"}
    assert second.explicit == {"model_tag"}
    assert second.namespace.dtype == "auto"  # the default is in its place again


def test_the_model_is_where_vllm_expects_it(parse):
    assert parse("m").namespace.model == "m"
    assert parse("--model", "m").namespace.model == "m"


def test_dotted_keys_make_one_value(parse):
    parsed = parse("m", "--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir=/tmp/x")

    assert parsed.explicit == {"model_tag", "profiler_config"}
    assert parsed.namespace.profiler_config.profiler == "torch"


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_config_file_counts_as_given(parse, tmp_path, form):
    file = tmp_path / "serve.yaml"
    file.write_text("tensor-parallel-size: 1\nenable-sleep-mode: false\nport: 8001\ndeploy: d.yaml\n")

    parsed = parse("m", "--port", "8002", *form.format(file).split())

    assert parsed.explicit_values().items() >= {
        "tensor_parallel_size": 1, "enable_sleep_mode": False, "port": 8002, "deploy": "d.yaml",
    }.items()  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [("a: [", "cannot read --config file"), ("text", "must be a mapping")])
def test_a_config_file_that_is_none(parse, tmp_path, text, message):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("m", "--config", file)


def test_a_config_file_may_name_the_model(parse, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\n")

    assert parse("--config", str(file)).namespace.model == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("m --tensor-paralel-size 2", r"unknown flag '--tensor-paralel-size'; did you mean '--tensor-parallel-size'\?"),
        ("m --dtype float31", "argument --dtype: invalid choice: 'float31'"),
        ("m --served-model-name --omni", r"--served-model-name: .* written --flag=value"),
        ("m --config /no/such.yaml", "cannot read --config file /no/such.yaml: .*No such file"),
        ("m --profiler-config.profiler", "a flag of the form --name.key is followed by its value"),
        ("m --config x.toml", "must be of a yaml"),
        ("m extra", "unrecognized arguments: extra"),
    ],
)
def test_what_cannot_be_parsed(parse, argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(*argv.split())


def test_a_value_that_looks_like_a_flag_is_written_with_an_equals_sign(parse):
    assert parse("m", "--served-model-name=--omni").namespace.served_model_name == ["--omni"]


def test_our_options_are_taken_out_before_vllm_parses():
    own, rest = take_options(["m", "--set", "a.b=1", "--dtype", "auto", "--print_config", "--set", "a.c=2", "--omni"])

    assert own == {"overrides": ["a.b=1", "a.c=2"], "print_config": "text", "omni": True}
    assert rest == ["m", "--dtype", "auto"]


def test_the_command_line_stands_above_a_config_file_and_lists_add_up():
    from_file = {"deploy": "a", "overrides": ["a.b=1"], "max_queued_requests": 1}

    assert merge_options(from_file, {"deploy": "b", "overrides": ["a.b=2"]}) == {
        "deploy": "b", "overrides": ["a.b=1", "a.b=2"], "max_queued_requests": 1,
    }  # fmt: skip


def test_our_options_hide_none_of_vllms(parser):
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    stock = cmd_init()[0].subparser_init(FlexibleArgumentParser().add_subparsers())
    ours = parser.serve
    assert set(stock._option_string_actions) < set(ours._option_string_actions)


def test_the_tables_name_arguments_that_vllm_has(parse):
    serve_names = vars(parse("m").namespace).keys()
    assert set(engine_arguments()) >= DIFFUSION
    assert serve_names >= SERVER | CHECKPOINT
    assert serve_names >= FIXED.keys()
    assert not DIFFUSION & (FIXED.keys() | SERVER | CHECKPOINT)


SAMPLES = {
    "allowed_local_media_path": ("/tmp", "/tmp"),
    "allowed_media_domains": ("a.example b.example", ["a.example", "b.example"]),
    "enforce_eager": ("", True),
    "dtype": ("bfloat16", "bfloat16"),
    "served_model_name": ("a b", ["a", "b"]),
    "tensor_parallel_size": ("2", 2),
    "distributed_executor_backend": ("mp", "mp"),
    "device_ids": ("0,1", [0, 1]),
    "disable_custom_all_reduce": ("", True),
    "distributed_timeout_seconds": ("60", 60),
    "cpu_distributed_timeout_seconds": ("60", 60),
    "numa_bind": ("", True),
    "numa_bind_nodes": ("0 1", [0, 1]),
    "numa_bind_cpus": ("0-3", ["0-3"]),
    "worker_extension_cls": ("a.B", "a.B"),
    "shutdown_timeout": ("5", 5),
    "fail_on_environ_validation": ("", True),
    "gpu_memory_utilization": ("0.5", 0.5),
    "enable_sleep_mode": ("", True),
    "enable_cumem_allocator": ("", True),
    "max_num_seqs": ("7", 7),
    "async_scheduling": ("", True),
    "profiler_config": ('{"profiler":"torch","torch_profiler_dir":"/tmp/x"}', None),
    "disable_log_stats": ("", True),
    "enable_log_requests": ("", True),
    "show_hidden_metrics_for_version": ("0.31", "0.31"),
    "logging_config": ('{"log_level":"INFO"}', None),
    "log_level": ("INFO", "INFO"),
    "log_config_file": ("/tmp/x.json", "/tmp/x.json"),
}


@pytest.mark.parametrize("name", sorted(DIFFUSION))
def test_each_allowed_flag_reaches_the_stage(parse, toy_plugin, toy_checkpoint, name):
    text, expected = SAMPLES[name]
    flag = "--" + name.replace("_", "-")
    given = parse(toy_checkpoint, flag, *text.split()).explicit_values()

    setting = resolve_for_vllm(match(str(toy_checkpoint)), Explicit(given)).stage.engine[name]

    assert setting.source == flag
    assert setting.value == (given[name] if expected is None else expected)


def test_what_nobody_set_keeps_vllms_default(toy_plugin, toy_checkpoint):
    resolved = resolve_for_vllm(match(str(toy_checkpoint)), Explicit())

    for name, setting in resolved.stage.engine.items():
        if setting.source == VLLM_DEFAULT:
            assert setting.value == engine_arguments()[name].default


def test_one_deploy_file_gives_one_configuration_by_every_way(toy_plugin, toy_checkpoint, tmp_path, capsys):
    file = tmp_path / "deploy.yaml"
    file.write_text(
        "stages:\n  diffusion: {max-num-seqs: 3, gain: 2, dtype: bfloat16}\nserver: {max_queued_requests: 9}\n"
    )
    (tmp_path / "serve.yaml").write_text(f"deploy: {file}\n")

    assert serve.run([str(toy_checkpoint), "--deploy", str(file), "--print-config=json"], "omni serve") == 0
    by_flag = capsys.readouterr().out
    assert (
        serve.run([str(toy_checkpoint), "--config", f"{tmp_path}/serve.yaml", "--print-config=json"], "omni serve") == 0
    )
    by_config_file = capsys.readouterr().out
    by_api = show.to_json(resolve_for_api(str(toy_checkpoint), deploy=file))
    direct = show.to_json(resolve_for_vllm(match(str(toy_checkpoint)), Explicit(deploy=read_deploy(file))))

    assert by_flag == by_config_file == by_api == direct
    assert json.loads(by_flag)["stages"]["diffusion"]["engine"]["max_num_seqs"]["value"] == 3


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_num_seq": 3}, r"unknown argument 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        ({"port": 8000}, "unknown argument 'port'"),
        ({"scheduler_cls": "a.B"}, "scheduler_cls= cannot be set for .*: omni-core decides it"),
        ({"max_num_seqs": "many"}, "max_num_seqs=: expected an integer or null, got 'many'"),
        ({"max_queued_requests": 0}, "max_queued_requests=: max_queued_requests must be at least 1"),
    ],
)
def test_the_python_api_refuses_what_the_command_line_refuses(toy_plugin, toy_checkpoint, engine, message):
    with pytest.raises(ConfigError, match=message):
        resolve_for_api(str(toy_checkpoint), engine=engine)


def test_an_attention_that_is_not_installed_is_refused(toy_plugin, toy_checkpoint):
    from omni_core.errors import OmniError

    with pytest.raises(OmniError, match="'imaginary'"):
        resolve_for_api(str(toy_checkpoint), engine={"attention_backend": "imaginary"})


def test_a_model_is_needed(capsys):
    with pytest.raises(ConfigError, match="which model"):
        serve.run(["--port", "8001"], "omni serve")


def test_a_flag_before_the_model_is_found_in_the_end(toy_plugin, toy_checkpoint, capsys):
    assert serve.run(["--port", "8001", str(toy_checkpoint), "--print-config"], "omni serve") == 0
    assert "# family: toy" in capsys.readouterr().out


def test_the_server_gets_vllms_whole_namespace(toy_plugin, toy_checkpoint, monkeypatch, capsys):
    got = []
    fake = type(sys)("omni_core.vllm.server")
    fake.serve = lambda resolved, args: got.append((resolved, args))
    monkeypatch.setitem(sys.modules, "omni_core.vllm.server", fake)

    assert (
        serve.run([str(toy_checkpoint), "--port", "8009", "--api-key", "k", "--max-queued-requests", "2"], "x serve")
        == 0
    )

    [(resolved, args)] = got
    assert (args.port, args.api_key, args.model) == (8009, ["k"], str(toy_checkpoint))
    assert resolved.server.max_queued_requests == 2
    assert "untested with step-batching" in capsys.readouterr().err
