"""Child processes load what their parent found, and nothing else; every process activates each plugin once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_site import Site, family

LOG = """
@hookimpl
def omni_activate():
    import os
    with open(os.environ["LOG"], "a") as log:
        print(os.getpid(), file=log)
"""
RAISE = "@hookimpl\ndef omni_activate():\n    raise RuntimeError('no such kernel')\n"

PROCESSES = """
import multiprocessing, os
from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, get_manager

def child():
    get_manager().activate()
    get_manager().activate()
    print("child", os.getpid(), flush=True)

if __name__ == "__main__":
    manager = get_manager()
    manager.activate()
    manager.activate()
    os.environ[PLUGIN_SET_VARIABLE] = manager.plugin_set.to_json()
    print("parent", os.getpid(), flush=True)
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0, method
"""


def test_spawned_and_forked_children_activate_exactly_once_each(site: Site, tmp_path: Path) -> None:
    site.plugin("toy", family() + LOG)
    (tmp_path / "program.py").write_text(PROCESSES)
    done = site.run(str(tmp_path / "program.py"), env={"LOG": str(tmp_path / "log")})
    assert done.returncode == 0, done.stderr
    processes = [line.split()[1] for line in done.stdout.splitlines()]
    activated = (tmp_path / "log").read_text().split()
    assert len(processes) == 3
    assert sorted(activated) == sorted(processes)


def test_a_plugin_that_asks_for_activation_while_it_is_activated_is_not_called_again(
    site: Site, tmp_path: Path
) -> None:
    again = LOG + "    from omni_core.plugins.manager import get_manager\n    get_manager().activate()\n"
    site.plugin("toy", family() + again)
    code = "from omni_core.plugins.manager import get_manager\nget_manager().activate()\n"
    assert site.run("-c", code, env={"LOG": str(tmp_path / "log")}).returncode == 0
    assert len((tmp_path / "log").read_text().split()) == 1


def test_an_activation_that_raises_is_an_error_where_the_plugin_is_required_else_a_warning(site: Site) -> None:
    site.plugin("toy", family() + RAISE)
    site.plugin("other", family("other") + RAISE.replace("kernel", "driver"))
    printed = site.python(
        "manager.require(manager.family('toy'))\n"
        "for _ in range(2):\n"
        "    try: manager.activate()\n"
        "    except Exception as e: print(type(e).__name__, e, '|', repr(e.__cause__))\n"
    )
    for line in printed.splitlines():
        assert line.startswith("PluginError plugin omni-plugin-toy 0.1.0 (entry point 'toy') failed to activate")
        assert line.endswith("RuntimeError: no such kernel | RuntimeError('no such kernel')")
    assert printed.count("\n") == 1

    unneeded = site.run("-c", "from omni_core.plugins.manager import *\nget_manager().activate()\nprint('goes on')")
    assert unneeded.returncode == 0 and unneeded.stdout == "goes on\n"
    assert "omni-plugin-other" in unneeded.stderr and "RuntimeError: no such driver" in unneeded.stderr


CHILD = """
import importlib.metadata
def refuse(*args, **kwargs): raise AssertionError("a child scanned")
importlib.metadata.entry_points = refuse
from omni_core.plugins.manager import get_manager
try:
    manager = get_manager()
    manager.activate()
    print("plugins", sorted(r.entry.name for r in manager.records))
except Exception as error:
    print(type(error).__name__, error)
"""


def handed(site: Site, extra: str = "") -> dict[str, str]:
    """The environment that a parent in ``site`` hands its children."""
    return {"OMNI_PLUGIN_SET": site.python(extra + "print(manager.plugin_set.to_json())")}


def test_a_child_loads_what_is_listed_and_does_not_scan(site: Site) -> None:
    site.plugin("toy", family())
    site.plugin("bad", "import no_such_module")
    environment = handed(site)
    site.plugin("late", "open('late-was-imported', 'w')")
    done = site.run("-c", CHILD, env=environment)
    assert done.stdout == "plugins ['toy']\n", done.stderr
    assert not (site.path / "late-was-imported").exists()


DIFFERENCES = {
    "missing": (None, "the parent has omni-plugin-toy 0.1.0 (entry point 'toy'), which is not installed here"),
    "version": ({"version": "0.2.0"}, "omni-plugin-toy 0.1.0 (entry point 'toy'), here it is version 0.2.0"),
    "value": ({"entry_points": {"toy": "elsewhere"}}, "= 'toy', here it is 'elsewhere'"),
    "no entry": ({"entry_points": {"tiy": "toy"}}, "= 'toy', here it is not declared"),
}


@pytest.mark.parametrize("installed, difference", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_child_that_would_see_another_set_refuses_and_names_the_difference(
    site: Site, other_site: Site, installed: dict[str, object] | None, difference: str
) -> None:
    site.plugin("toy", family())
    if installed is not None:
        arguments = {"entry_points": {"toy": "toy"}, "modules": {"toy.py": ""}, **installed}
        other_site.distribution("omni-plugin-toy", **arguments)  # type: ignore[arg-type]
    done = other_site.run("-c", CHILD, env=handed(site))
    assert done.stdout.startswith("PluginSetMismatch "), done.stderr
    assert difference in done.stdout


def test_a_child_in_which_a_plugin_breaks_refuses(site: Site) -> None:
    site.plugin("toy", "import os\nassert 'CHILD' not in os.environ, 'not here'\n" + family())
    done = site.run("-c", CHILD, env={**handed(site), "CHILD": "1"})
    assert done.stdout.startswith("PluginSetMismatch ") and "AssertionError: not here" in done.stdout


def test_what_the_parent_requires_is_required_in_the_child(site: Site) -> None:
    site.plugin("toy", family() + RAISE)
    assert site.run("-c", CHILD, env=handed(site)).stdout == "plugins ['toy']\n"
    required = handed(site, "manager.require(manager.family('toy'))\n")
    assert site.run("-c", CHILD, env=required).stdout.startswith("PluginError plugin omni-plugin-toy")


def test_a_mismatch_that_the_parent_let_through_is_let_through_in_the_child(site: Site) -> None:
    old = "@hookimpl\ndef omni_requirements():\n    return Requirements('1.0', {'omni-core': '>=99'})\n"
    site.plugin("toy", family(), requirements=old)
    environment = handed(site, "manager = PluginManager.scan(allow_version_mismatch=True)\n")
    assert site.run("-c", CHILD, env=environment).stdout == "plugins ['toy']\n"
    strict = json.loads(environment["OMNI_PLUGIN_SET"]) | {"allow_version_mismatch": False}
    done = site.run("-c", CHILD, env={"OMNI_PLUGIN_SET": json.dumps(strict)})
    assert done.stdout.startswith("PluginSetMismatch ")


@pytest.mark.parametrize("value", ["", "{}", "[]", '{"plugins": [{"name": "x"}]}', '{"plugins": 3}'])
def test_a_malformed_set_is_refused(site: Site, value: str) -> None:
    done = site.run("-c", CHILD, env={"OMNI_PLUGIN_SET": value})
    assert done.stdout.startswith("PluginSetMismatch OMNI_PLUGIN_SET is missing or malformed"), done.stderr
