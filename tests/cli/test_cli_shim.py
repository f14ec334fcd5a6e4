"""``vllm ... --omni``: every form in which vLLM's own command may hand over to the shim."""

import importlib.metadata

import pytest

from omni_core.cli import serve, shim
from omni_core.errors import ConfigError, PluginError


@pytest.fixture
def served(monkeypatch):
    """What the shim passes on to serving."""
    calls = []

    def run(argv, program):
        calls.append((list(argv), program))
        return 0

    monkeypatch.setattr(serve, "run", run)
    return calls


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ("serve M --omni", ["M", "--omni"]),
        ("--omni serve M", ["M"]),
        ("serve --omni M --port 1", ["--omni", "M", "--port", "1"]),
        ("serve --omni --help", ["--omni", "--help"]),
        ("--omni --help serve", ["--help"]),
        ("serve M --omni --omni", ["M", "--omni", "--omni"]),
        ("serve M --served-model-name --omni", ["M", "--served-model-name", "--omni"]),
    ],
)
def test_serve_in_any_order(served, words, passed_on):
    assert shim.run(words.split()) == 0
    assert served == [(passed_on, "vllm serve")]


@pytest.mark.parametrize("words", ["--omni --version", "--version --omni", "-v --omni", "--omni -v serve M"])
def test_version(served, words, capsys):
    assert shim.run(words.split()) == 0
    assert capsys.readouterr().out.startswith("omni-core ")
    assert served == []


def test_help_without_a_command(served, capsys):
    assert shim.run(["--omni", "--help"]) == 0
    assert "vllm serve MODEL --omni" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--omni", "--omni goes with 'serve': vllm serve MODEL --omni"),
        ("bench serve --model M --omni", "'omni bench video' or 'omni bench speech', .*'vllm bench' without --omni"),
        ("chat -q --omni", "run 'vllm chat' without --omni"),
        ("run-batch --omni", "run 'vllm run-batch' without --omni"),
        ("collect-env --omni", "run 'omni doctor'"),
        ("srve M --omni", "no command 'srve'"),
        ("--port 1 serve M --omni", "no command '1'"),
        ("--fast serve M --omni", "unknown flag '--fast' before 'serve'"),
    ],
)
def test_whatever_else_is_refused_with_the_way_out(served, words, message):
    with pytest.raises(ConfigError, match=message):
        shim.run(words.split())
    assert served == []


def test_the_rival_distribution_is_refused(served, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.30.0" if n == "vllm-omni" else real(n))

    with pytest.raises(PluginError, match=r"vllm-omni 0\.30\.0 is installed beside omni-core.*uninstall one of them"):
        shim.run(["serve", "M", "--omni"])
    assert served == []
