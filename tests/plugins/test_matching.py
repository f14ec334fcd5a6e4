"""A checkpoint goes to the family with the most conditions over its configuration, never to the first installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_site import Site, family

from omni_core.checkpoint import Checkpoint
from omni_core.errors import MissingPlugin, PluginError
from omni_core.plugins.declarations import Cardinality, Modality, ModelFamily
from omni_core.plugins.loading import PluginEntry, PluginRecord, PluginState
from omni_core.plugins.matching import Explanation, explain
from omni_core.plugins.predicates import All, AnyOf, Architecture, ClassName, Key, ModelType, Not, Predicate

TEXT = (Cardinality(Modality.TEXT),)


class InMemory(Checkpoint):
    """A checkpoint whose files are given."""

    def __init__(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__("/")
        self.files = files

    def read(self, file: str) -> Mapping[str, Any]:
        return self.files.get(file, {})


def record(name: str, *predicates: Predicate) -> PluginRecord:
    families = tuple(
        ModelFamily(f"{name}-{index}" if index else name, predicate, TEXT, TEXT, "a:b", "a:b")
        for index, predicate in enumerate(predicates)
    )
    entry = PluginEntry(name, name, f"omni-plugin-{name}", "1.0")
    return PluginRecord(entry, PluginState.REGISTERED, declarations=families)


KEYS = ("a", "b", "c")
CONFIGS = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 1))
CONDITIONS = st.builds(Key, st.sampled_from(KEYS), st.integers(0, 1))
PREDICATES = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda ps: All(*ps)),
        st.lists(inner, min_size=1, max_size=3).map(lambda ps: AnyOf(*ps)),
        inner.map(Not),
    ),
    max_leaves=5,
)


def outcome(explanation: Explanation) -> tuple[object, ...]:
    return explanation.family, type(explanation.error), str(explanation.error), explanation.candidates


@given(CONFIGS, st.lists(PREDICATES, max_size=4), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_the_order_of_installation(
    config: dict[str, int], predicates: list[Predicate], random: Any
) -> None:
    records = [record(f"p{index}", predicate) for index, predicate in enumerate(predicates)]
    shuffled = list(records)
    random.shuffle(shuffled)
    checkpoint = InMemory({"config.json": config})
    given_order, other_order = explain(records, checkpoint), explain(shuffled, checkpoint)
    assert given_order.family == other_order.family and type(given_order.error) is type(other_order.error)
    assert sorted(given_order.candidates, key=str) == sorted(other_order.candidates, key=str)


@given(CONFIGS, st.lists(PREDICATES, max_size=4))
def test_the_most_specific_claim_wins_and_a_tie_is_an_error_that_names_all(
    config: dict[str, int], predicates: list[Predicate]
) -> None:
    checkpoint = InMemory({"config.json": config})
    records = [record(f"p{index}", predicate) for index, predicate in enumerate(predicates)]
    claims = {f"p{i}": s for i, p in enumerate(predicates) if (s := p.specificity(checkpoint)) is not None}
    best = [name for name, specificity in claims.items() if specificity == max(claims.values())]
    explanation = explain(records, checkpoint)
    assert len(explanation.candidates) == len(predicates)
    if len(best) == 1:
        assert explanation.family is not None and explanation.family.name == best[0] and explanation.error is None
        assert [c.plugin.name for c in explanation.candidates if c.chosen] == best
    elif best:
        assert explanation.family is None and type(explanation.error) is PluginError
        assert all(f"omni-plugin-{name} " in str(explanation.error) for name in best)
    else:
        assert explanation.family is None and type(explanation.error) is MissingPlugin


@given(CONFIGS, PREDICATES, CONDITIONS)
def test_one_more_condition_that_holds_makes_a_claim_more_specific(
    config: dict[str, int], predicate: Predicate, condition: Key
) -> None:
    checkpoint = InMemory({"config.json": config})
    before, more = predicate.specificity(checkpoint), All(predicate, condition).specificity(checkpoint)
    if before is None or condition.specificity(checkpoint) is None:
        assert more is None
    else:
        assert more == before + 1


@given(st.lists(st.text(max_size=5)) | st.integers() | st.none() | st.dictionaries(st.text(max_size=3), st.integers()))
def test_predicates_bear_any_json(value: Any) -> None:
    checkpoint = InMemory({"config.json": {"architectures": value, "model_type": value, "a": value}})
    for predicate in (Architecture("X"), ModelType("x"), Key("a.b.c"), Key("model_type", 1)):
        explain([record("p", predicate)], checkpoint)


CASES: dict[str, tuple[Predicate, str]] = {
    "value": (ModelType("other"), "config.json: model_type = 'other' does not hold: it is 'toy'"),
    "absent": (
        ClassName("ToyPipeline"),
        "model_index.json: _class_name = 'ToyPipeline' does not hold: it is not there",
    ),
    "architecture": (Architecture("Other"), "does not hold: it is ['ToyModel']"),
    "negation": (Not(ModelType("toy")), "not (config.json: model_type = 'toy') does not hold"),
    "one of two": (All(ModelType("toy"), Key("talker")), "config.json: talker does not hold: it is not there"),
    "a bool is no int": (Key("flag", 1), "config.json: flag = 1 does not hold: it is True"),
}


@pytest.mark.parametrize("predicate, reason", CASES.values(), ids=CASES.keys())
def test_a_family_that_does_not_serve_says_which_condition_failed(predicate: Predicate, reason: str) -> None:
    config = {"model_type": "toy", "architectures": ["ToyModel"], "flag": True}
    (candidate,) = explain([record("p", predicate)], InMemory({"config.json": config})).candidates
    assert candidate.specificity is None and candidate.reason.endswith(reason)


def test_a_predicate_that_raises_disqualifies_its_own_family_only() -> None:
    class Broken:
        def specificity(self, files: object) -> int | None:
            raise RuntimeError("bad predicate")

    records = [record("bad", Broken()), record("good", ModelType("toy"))]
    explanation = explain(records, InMemory({"config.json": {"model_type": "toy"}}))
    assert explanation.family is not None and explanation.family.name == "good"
    reasons = {c.plugin.name: c.reason for c in explanation.candidates}
    assert reasons["bad"] == "its predicate raised RuntimeError: bad predicate"


def test_a_known_plugin_that_is_missing_is_the_exact_command(site: Site, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    done = site.omni("plugins", "why", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.endswith(
        "needs the plugin omni-plugin-wan22, which is not installed; run: pip install omni-plugin-wan22\n"
    )


def test_another_plugin_may_serve_what_a_missing_one_would(site: Site, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    site.plugin("mine", family("mine", "ClassName('WanPipeline')"))
    assert site.omni("plugins", "why", str(tmp_path)).returncode == 0


def test_a_duplicate_claim_names_both_distributions_whatever_was_installed_first(
    site: Site, other_site: Site, checkpoint: Path
) -> None:
    for folder, names in ((site, ("one", "two")), (other_site, ("two", "one"))):
        for name in names:
            folder.plugin(name, family(name))
    answers = [folder.omni("plugins", "why", str(checkpoint)) for folder in (site, other_site)]
    assert [done.returncode for done in answers] == [2, 2]
    assert answers[0].stderr == answers[1].stderr
    assert "'one' of omni-plugin-one 0.1.0" in answers[0].stderr
    assert "'two' of omni-plugin-two 0.1.0" in answers[0].stderr


def test_why_explains_every_candidate(site: Site, checkpoint: Path) -> None:
    site.plugin("general", family("general"))
    site.plugin("special", family("special", "All(ModelType('toy'), Key('version', '2'))"))
    site.plugin("other", family("other", "ModelType('other')"))
    site.plugin("bad", "import no_such_module")
    done = site.omni("plugins", "why", str(checkpoint), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    why = {c["distribution"]: (c["chosen"], c["specificity"], c["reason"]) for c in answer["candidates"]}
    assert answer["family"] == "special" and answer["error"] is None
    assert why["omni-plugin-special"][:2] == (True, 2)
    assert why["omni-plugin-general"][:2] == (False, 1)
    assert "but special is more specific (2)" in why["omni-plugin-general"][2]
    assert why["omni-plugin-other"][2] == "config.json: model_type = 'other' does not hold: it is 'toy'"
    assert "no_such_module" in why["omni-plugin-bad"][2]


def test_an_unknown_name_gets_the_nearest(site: Site) -> None:
    site.plugin("toy", family("toy-video"))
    printed = site.python("try: manager.family('toy-vidio')\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed == "MissingPlugin there is no model 'toy-vidio'; did you mean 'toy-video'? installed: toy-video"


def test_a_missing_platform_is_the_exact_command(site: Site) -> None:
    printed = site.python("try: manager.platform('cuda')\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed == "MissingPlugin platform 'cuda' is not installed; run: pip install 'omni-core[cuda]'"
    printed = site.python("try: manager.platform('abacus')\nexcept Exception as e: print(type(e).__name__, e)")
    assert printed == "MissingPlugin no installed plugin supports the device type 'abacus'; installed: none"


def test_a_checkpoint_that_cannot_be_read_is_an_error_though_another_file_would_match(
    site: Site, checkpoint: Path
) -> None:
    (checkpoint / "config.json").write_text("{")
    (checkpoint / "model_index.json").write_text('{"_class_name": "ToyPipeline"}')
    site.plugin("reader", family("reader"))
    site.plugin("toy", family("toy", "ClassName('ToyPipeline')"))
    done = site.omni("plugins", "why", str(checkpoint))
    assert done.returncode == 2 and "config.json is not valid JSON" in done.stderr
