"""``entry_points.toml`` says of every first-party plugin what the plugin's own metadata says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from omni_core.plugins.declarations import PLUGIN_API, ModelFamily, Platform
from omni_core.plugins.hookspecs import ENTRY_POINT_GROUP
from omni_core.plugins.loading import KINDS, PluginEntry, PluginState, load_plugin
from omni_core.plugins.table import KnownPlugin, known_plugins, table_file

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {"model": "models", "platform": "platforms", "offload": "offload", "quantization": "quantization"}
KNOWN = known_plugins()


def project(folder: Path) -> dict[str, Any]:
    with (folder / "pyproject.toml").open("rb") as file:
        content: dict[str, Any] = tomllib.load(file)["project"]
    return content


def name_of(known: KnownPlugin) -> str:
    return known.name


@pytest.mark.parametrize("known", KNOWN, ids=name_of)
def test_a_row_agrees_with_the_plugin_s_own_metadata(known: KnownPlugin) -> None:
    folder = REPOSITORY / known.folder
    metadata = project(folder)
    assert known.distribution == metadata["name"]
    assert metadata["entry-points"][ENTRY_POINT_GROUP] == {known.name: known.entry_point}
    assert Path(known.folder).parts[:2] == ("plugins", FOLDERS[known.kind])
    assert any(line.startswith("omni-core") for line in metadata["dependencies"])


@pytest.mark.parametrize("known", KNOWN, ids=name_of)
def test_the_install_command_installs_the_plugin(known: KnownPlugin) -> None:
    extras = project(REPOSITORY)["optional-dependencies"]
    if known.install.startswith("pip install 'omni-core["):
        extra = known.install.removeprefix("pip install 'omni-core[").removesuffix("]'")
        assert any(line.startswith(known.distribution) for line in extras[extra])
    else:
        assert known.install == f"pip install {known.distribution}"


@pytest.mark.parametrize("known", KNOWN, ids=name_of)
def test_a_row_agrees_with_what_the_plugin_declares(known: KnownPlugin) -> None:
    version = project(REPOSITORY / known.folder)["version"]
    entry = PluginEntry(known.name, known.entry_point, known.distribution, version)
    record = load_plugin(entry, allow_version_mismatch=True)
    if record.state is PluginState.BROKEN and "ModuleNotFoundError" in str(record.reason):
        pytest.skip(f"{known.distribution} is not installed here")
    assert record.state is PluginState.REGISTERED, record.traceback
    assert record.requirements is not None and record.requirements.plugin_api == PLUGIN_API
    assert {"omni-core", "vllm"} <= set(record.requirements.ranges)
    declared = {(KINDS[type(d)], d.name): d for d in record.declarations}
    declaration = declared[known.kind, known.name]
    if isinstance(declaration, Platform):
        assert declaration.device_type == known.device_type and not known.checkpoints
    if isinstance(declaration, ModelFamily):
        assert known.checkpoints and known.device_type is None


@pytest.mark.parametrize("known", [k for k in KNOWN if k.checkpoints], ids=name_of)
def test_the_table_claims_no_checkpoint_that_the_family_does_not(known: KnownPlugin) -> None:
    class Files:
        def __init__(self, file: str, content: dict[str, Any]) -> None:
            self.file, self.content = file, content

        def read(self, file: str) -> dict[str, Any]:
            return self.content if file == self.file else {}

    version = project(REPOSITORY / known.folder)["version"]
    record = load_plugin(
        PluginEntry(known.name, known.entry_point, known.distribution, version), allow_version_mismatch=True
    )
    families = [d for d in record.declarations if isinstance(d, ModelFamily)]
    if not families:
        pytest.skip(f"{known.distribution} is not installed here")
    for key in known.checkpoints:
        files = Files(key.file, {key.path: key.equals})
        assert known.handles(files)
        assert any(family.matches.specificity(files) is not None for family in families), str(key)


def test_every_plugin_in_the_repository_is_in_the_table() -> None:
    """A distribution without an entry point is no plugin: what plugins share, or one in the making."""
    folders = [path.parent for path in REPOSITORY.glob("plugins/*/*/pyproject.toml")]
    plugins = {folder for folder in folders if ENTRY_POINT_GROUP in project(folder).get("entry-points", {})}
    assert {folder.relative_to(REPOSITORY).as_posix() for folder in plugins} == {known.folder for known in KNOWN}


def test_what_plugins_share_is_no_plugin() -> None:
    assert not [
        path for path in REPOSITORY.glob("plugins/shared/*/pyproject.toml") if "entry-points" in project(path.parent)
    ]


@pytest.mark.parametrize("field", ["distribution", "entry_point", "folder"])
def test_no_two_rows_are_of_one_plugin(field: str) -> None:
    values = [getattr(known, field) for known in KNOWN]
    assert len(set(values)) == len(values)


def test_the_wheel_ships_the_table_where_it_is_looked_for() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"entry_points.toml": "omni_core/entry_points.toml"}
    assert table_file() == REPOSITORY / "entry_points.toml"
