"""``omni plugins`` and ``omni doctor``: fast, free of heavy imports, and clear about what is wrong."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_site import Site, family

HEAVY = ("torch", "vllm", "transformers", "diffusers", "pydantic", "huggingface_hub", "numpy")
REPORT = f"""
import sys
from omni_core.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code in (0, None), end.code
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("arguments", [["plugins"], ["plugins", "list", "--json"]])
def test_omni_plugins_imports_nothing_heavy_and_answers_in_half_a_second(arguments: list[str]) -> None:
    """In this environment, with every first-party plugin and vLLM installed. CPU seconds, the best of several."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", REPORT, *arguments], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.endswith("heavy: []\n")
        if spent[-1] < 0.5:
            break
    assert min(spent) < 0.5


def test_json_output_never_imports_the_table_printer(site: Site) -> None:
    done = site.run("-X", "importtime", "-m", "omni_core.cli.main", "plugins", "--json")
    assert done.returncode == 0 and "rich" not in done.stderr


def test_the_list_shows_state_and_traceback(site: Site) -> None:
    site.plugin("toy", family())
    site.plugin("bad", "import no_such_module")
    done = site.omni("plugins")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "omni-plugin" in line and "entry" not in line}
    assert "registered" in rows["toy"] and "model toy" in rows["toy"]
    assert "broken" in rows["bad"] and "no_such_module" in rows["bad"]
    assert "Traceback (most recent call last)" in done.stdout


def test_without_plugins_the_list_says_so(site: Site) -> None:
    assert site.omni("plugins").stdout == "No plugin is installed.\n"


def test_check_passes_where_all_is_well(site: Site) -> None:
    site.plugin("toy", family())
    done = site.omni("plugins", "check")
    assert (done.returncode, done.stdout) == (0, "1 plugins, no problem\n")


@pytest.mark.parametrize("arguments", [["why"], ["list", "/tmp"], ["check", "--revision", "main"], ["frobnicate"]])
def test_a_wrong_command_line_is_refused_with_status_2(site: Site, arguments: list[str]) -> None:
    done = site.omni("plugins", *arguments)
    assert done.returncode == 2 and "error:" in done.stderr and "Traceback" not in done.stderr


def test_why_for_a_folder_that_is_not_there_is_one_line(site: Site) -> None:
    done = site.omni("plugins", "why", "/no/such/folder")
    assert done.returncode == 2
    assert done.stderr.endswith("checkpoint '/no/such/folder': there is no such folder\n")
    assert done.stderr.count("\n") == 1


PLATFORM = """
@hookimpl
def omni_platforms():
    return [Platform("abacus", "abacus", diffusion_worker="a:B", attention="a:b")]
"""
PIPELINE = """
from omni_core.errors import UnsupportedCheckpoint
from omni_core.pipeline import DiffusionStage, Pipeline
def pipeline(checkpoint):
    if "refused" in checkpoint.read("config.json"):
        raise UnsupportedCheckpoint("toys of this size are refused")
    return Pipeline((DiffusionStage("draw", "toy:Model"),))
"""


def healthy(site: Site) -> None:
    """A whole installation: a vLLM that can be asked for its platform, torch, a platform and a family."""
    site.vllm("vllm-acme")
    (site.path / "vllm" / "__init__.py").write_text("")
    (site.path / "vllm" / "platforms.py").write_text("class current_platform:\n    device_type = 'abacus'\n")
    site.distribution("torch", "2.13.0")
    site.plugin("toy", family() + PLATFORM + PIPELINE)


def findings(site: Site, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    done = site.omni("doctor", "--json", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    return done.returncode, {f["check"]: (f["status"], f["detail"]) for f in report["findings"]}


def test_doctor_says_what_would_be_served(site: Site, checkpoint: Path) -> None:
    healthy(site)
    _, found = findings(site, str(checkpoint))
    # The made-up vLLM has none of the symbols that the core touches, and is told so; all else is well.
    assert [check for check, (state, _) in found.items() if state == "error"] == ["vLLM symbols"]
    assert "vllm.SamplingParams" in found["vLLM symbols"][1]
    assert found["vLLM"][1].startswith("vllm-acme 0.32.0")
    assert found["torch"] == ("ok", "torch 2.13.0")
    assert found["platform"] == ("ok", "abacus, served by omni-plugin-toy 0.1.0 (entry point 'toy')")
    assert found["checkpoint"][0] == "ok" and found["checkpoint"][1].endswith("stages: draw")


def test_doctor_says_why_a_checkpoint_is_not_served(site: Site, checkpoint: Path) -> None:
    healthy(site)
    (checkpoint / "config.json").write_text('{"model_type": "toy", "refused": true}')
    status, found = findings(site, str(checkpoint))
    assert status == 2 and found["checkpoint"] == ("error", "toys of this size are refused")


def test_doctor_without_vllm(site: Site) -> None:
    status, found = findings(site)
    assert status == 2
    assert found["vLLM"][0] == "error" and "run: pip install 'omni-core[" in found["vLLM"][1]
    assert found["platform"] == ("skipped", "needs vLLM")


def test_doctor_with_a_vllm_that_cannot_be_imported(site: Site) -> None:
    healthy(site)
    (site.path / "vllm" / "platforms.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    status, found = findings(site)
    assert status == 2 and found["platform"][0] == "error"
    assert found["platform"][1].endswith("exited with 1: ImportError: libcudart.so.13 is missing")


def test_doctor_with_a_platform_that_no_plugin_supports(site: Site) -> None:
    healthy(site)
    (site.path / "vllm" / "platforms.py").write_text("class current_platform:\n    device_type = 'cuda'\n")
    status, found = findings(site)
    assert status == 2
    assert found["platform"][1].endswith("platform 'cuda' is not installed; run: pip install 'omni-core[cuda]'")


def test_doctor_explains_the_other_server(site: Site) -> None:
    healthy(site)
    site.distribution("vllm-omni", "0.30.0")
    status, found = findings(site)
    assert status == 2
    assert "vllm-omni 0.30.0 is installed too" in found["vllm-omni"][1]
    assert "pip uninstall vllm-omni" in found["vllm-omni"][1]
