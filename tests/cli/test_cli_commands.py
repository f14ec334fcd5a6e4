"""The commands as a user runs them: exit status, what is said, and what is not imported to say it."""

import json
import os
import subprocess
import sys

import pytest

import omni_core

QUIET = "omni: error: "


def errors(done):
    """The lines of standard error that are Omni's."""
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("omni: ")]


def test_version(command):
    done = command("omni", "--version")

    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"omni-core {omni_core.__version__}"
    assert done.stdout.splitlines()[1].startswith("vllm")


def test_help_lists_the_commands(command):
    done = command("omni", "--help")

    assert done.returncode == 0
    assert all(name in done.stdout for name in ("serve", "plugins", "doctor"))


def test_an_unknown_command(command):
    done = command("omni", "srve")

    assert done.returncode == 2
    assert "srve" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which model?"),
        (["/no/such/folder"], "there is no such folder"),
        (["{toy}", "--set", "difusion.dtype=auto"], "unknown stage 'difusion'; did you mean 'diffusion'?"),
        (["{toy}", "--set", "dtype=auto"], "--set takes STAGE.KEY=VALUE"),
        (["{toy}", "--deploy", "/no/such/file.yaml"], "cannot read deploy file /no/such/file.yaml"),
        (["{toy}", "--print-config=xml"], "invalid choice: 'xml'"),
        (["{toy}", "--max_queued_requests", "many"], "invalid int value: 'many'"),
        (["{unclaimed}"], "omni plugins why"),
    ],
)
def test_what_is_wrong_is_said_before_vllm_is_imported(toy_site, toy_checkpoint, tmp_path, words, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-serves-this"}))
    argv = ["serve", *(word.format(toy=toy_checkpoint, unclaimed=tmp_path) for word in words)]
    script = (
        "import sys; from omni_core.cli.main import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(toy_site)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "2 []\n", done.stderr
    [line] = errors(done)
    assert line.startswith(QUIET)
    assert message in line


@pytest.fixture(scope="module")
def printed(command, toy_checkpoint):
    """``--print-config`` by both ways in; each imports vLLM, so once for all tests."""
    flags = ["--max-num-seqs", "3", "--set", "diffusion.gain=2", "--print-config=json"]
    return command("omni", "serve", toy_checkpoint, *flags), command("vllm", "serve", toy_checkpoint, *flags, "--omni")


def test_print_config_of_omni_serve_is_clean_json(printed):
    done, _ = printed
    assert done.returncode == 0, done.stderr
    diffusion = json.loads(done.stdout)["stages"]["diffusion"]
    assert diffusion["engine"]["max_num_seqs"] == {"value": 3, "source": "--max-num-seqs"}
    assert diffusion["options"]["gain"] == {"value": 2.0, "source": "--set diffusion.gain"}


def test_vllm_serve_with_omni_is_the_same_program(printed):
    by_omni, by_vllm = printed
    assert by_vllm.returncode == 0, by_vllm.stderr
    assert by_vllm.stdout.endswith(by_omni.stdout)  # vLLM's command has logged a line before


def test_help_of_serve_shows_our_options_first(command):
    done = command("omni", "serve", "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: omni serve MODEL [options]")
    assert 0 < done.stdout.index("--deploy FILE") < done.stdout.index("Config Groups:") < done.stdout.index("Frontend")
    assert "omni serve --help=all" in done.stdout


def test_help_of_one_of_vllms_groups(command):
    done = command("vllm", "serve", "--omni", "--help=ParallelConfig")

    assert done.returncode == 0, done.stderr
    assert "--tensor-parallel-size" in done.stdout
    assert "--deploy" not in done.stdout


def test_a_flag_of_vllm_that_would_do_nothing(command, toy_checkpoint):
    done = command("vllm", "serve", toy_checkpoint, "--omni", "--speculative-config", '{"model": "m"}')

    assert done.returncode == 2
    assert errors(done) == [QUIET + "--speculative-config has no meaning for the diffusion stage 'diffusion'"]
