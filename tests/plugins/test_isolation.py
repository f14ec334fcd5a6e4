"""A broken plugin is named, listed with its traceback, leaves nothing behind, and stops only what needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_site import REQUIREMENTS, Site, family

HEALTHY = family("healthy", "ModelType('toy')")

BROKEN = {
    "import error": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "exit at import": ("raise SystemExit(0)", "SystemExit: 0"),
    "raising hook": (
        family() + "\n@hookimpl\ndef omni_platforms():\n    raise RuntimeError('half-way')",
        "RuntimeError: half-way",
    ),
    "unknown hook": ("@hookimpl\ndef omni_model_famlies():\n    return []", "unknown hook 'omni_model_famlies'"),
    "unknown argument": ("@hookimpl\ndef omni_platforms(cheese):\n    return []", "cheese"),
    "wrong type": ("@hookimpl\ndef omni_platforms():\n    return ['cpu']", "an iterable of Platform, got str"),
    "no iterable": ("@hookimpl\ndef omni_platforms():\n    return 3", "must give an iterable of Platform, got int"),
    "bad declaration": (family("Not A Name"), "must be lower-case words"),
    "declared twice": (family() + family().replace("omni_model_families", "again").replace(
        "@hookimpl", "@hookimpl(specname='omni_model_families')"), "model 'toy' is declared twice"),
}  # fmt: skip


@pytest.mark.parametrize("source, reason", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_is_listed_with_reason_and_traceback_and_contributes_nothing(
    site: Site, source: str, reason: str
) -> None:
    site.plugin("bad", source)
    site.plugin("healthy", HEALTHY)
    records = site.records()
    record = records["bad"]
    assert record["state"] == "broken"
    assert reason in record["reason"] and "\n" not in record["reason"]
    assert "Traceback" in record["traceback"]
    assert record["contributes"] == []
    assert records["healthy"]["state"] == "registered"


@pytest.mark.parametrize(
    "requirements, reason",
    [
        ("", "omni_requirements must give one Requirements, got nothing"),
        ("@hookimpl\ndef omni_requirements():\n    return {}\n", "got dict"),
        ("@hookimpl\ndef omni_requirements():\n    return Requirements('one', {})\n", "plugin_api must look like"),
        ("@hookimpl\ndef omni_requirements():\n    return Requirements('1.0', {'vllm': 'new'})\n", "'new' is not"),
    ],
)  # fmt: skip
def test_requirements_that_are_no_requirements_break_a_plugin(site: Site, requirements: str, reason: str) -> None:
    site.plugin("bad", HEALTHY, requirements=requirements)
    record = site.record("bad")
    assert record["state"] == "broken" and reason in record["reason"]


def test_a_broken_plugin_does_not_disturb_what_others_serve(site: Site, checkpoint: Path) -> None:
    site.plugin("bad", "import no_such_module")
    site.plugin("healthy", HEALTHY)
    assert site.omni("plugins", "why", str(checkpoint)).returncode == 0


def test_a_wrapper_around_a_hook_reaches_no_other_plugin(site: Site) -> None:
    site.plugin("greedy", "@hookimpl(wrapper=True)\ndef omni_model_families():\n    yield\n    return []\n")
    site.plugin("healthy", HEALTHY)
    assert site.record("healthy")["contributes"] == [{"kind": "model", "name": "healthy"}]


def test_requirements_are_read_before_any_other_hook(site: Site) -> None:
    touched = "@hookimpl\ndef omni_model_families():\n    open('touched', 'w').close()\n    return []\n"
    mismatch = REQUIREMENTS.replace("{}", "{'omni-core': '>=99'}")
    site.plugin("late", touched, requirements=mismatch)
    assert site.record("late")["state"] == "incompatible"
    assert not (site.path / "touched").exists()


def test_a_broken_plugin_asked_for_by_name_is_an_error_that_names_it(site: Site) -> None:
    site.plugin("bad", "import no_such_module")
    printed = site.python("try: manager.family('bad')\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed.startswith("PluginError plugin omni-plugin-bad 0.1.0 (entry point 'bad') is broken: ModuleNotFound")


def test_a_broken_platform_is_an_error_that_names_it(site: Site) -> None:
    site.distribution("omni-platform-cuda", entry_points={"cuda": "no_such_module"})
    printed = site.python("try: manager.platform('cuda')\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed.startswith("PluginError plugin omni-platform-cuda 0.1.0 (entry point 'cuda') is broken: ModuleNot")


def test_the_known_plugin_for_a_checkpoint_being_broken_is_an_error(site: Site, tmp_path: Path) -> None:
    """The table says whose the checkpoint is; that plugin is there but cannot be imported."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    site.distribution("omni-plugin-wan22", entry_points={"wan22": "no_such_module"})
    done = site.omni("plugins", "why", str(tmp_path))
    assert done.returncode == 2
    assert "error: plugin omni-plugin-wan22 0.1.0 (entry point 'wan22') is broken" in done.stderr


@pytest.mark.parametrize("kind", ["models", "platforms"])
def test_two_distributions_that_declare_one_name_are_an_error_where_it_is_used(site: Site, kind: str) -> None:
    if kind == "models":
        source, use = family("same", "ModelType('{}')"), "manager.family('same')"
    else:
        source = (
            "@hookimpl\ndef omni_platforms():\n"
            "    return [Platform('same-{}', 'warp', diffusion_worker='a:B', attention='a:b')]\n"
        )
        use = "manager.platform('warp')"
    site.plugin("one", source.replace("{}", "one"))
    site.plugin("two", source.replace("{}", "two"))
    printed = site.python(f"try: {use}\nexcept Exception as e: print(type(e).__name__, e)")
    assert (
        printed.startswith("PluginError") and "omni-plugin-one 0.1.0" in printed and "omni-plugin-two 0.1.0" in printed
    )
    check = site.omni("plugins", "check")
    assert check.returncode == 2 and check.stdout.count("\n") == 1 and "omni-plugin-two" in check.stdout


def test_a_plugin_that_imports_something_heavy_is_reported(site: Site) -> None:
    (site.path / "torch.py").write_text("")
    site.plugin("heavy", "import torch\n" + HEALTHY)
    check = site.omni("plugins", "check")
    assert check.returncode == 2
    assert "omni-plugin-heavy 0.1.0 (entry point 'heavy') imports torch when it is found" in check.stdout
