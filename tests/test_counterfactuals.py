"""Counterfactuals: wordings that are not the benchmark's, and captions as people write them."""
import re
from pathlib import Path

import pytest

from foco.counterfactuals import Lexicon, make_counterfactuals, phrases
from foco.decompose import Decomposition
from foco.toyworld import captions as world
from foco.toyworld.benchmark import training_pairs
from foco.toyworld.source import open_benchmark

CAPTIONS = Path(__file__).resolve().parents[2] / "shared" / "captions" / "cc3m_val_captions.txt"
SLOTS = {"NOUN": [w for ws in world._NOUNS.values() for w in ws], "COLOUR": [w for ws in world._COLOUR_WORDS.values() for w in ws], "SIZE": [w for ws in world._SIZE_WORDS.values() for w in ws],
         "PATTERN": [w for ws in world._PATTERN_WORDS.values() for w in ws] + [w for ws in world._PATTERN_TAILS.values() for w in ws], "PLACE": [w for ws in world._PLACES.values() for w in ws]}
SLOT = {word: slot for slot, words in SLOTS.items() for word in words}
WORDS = re.compile(r"\b(" + "|".join(sorted(map(re.escape, SLOT), key=len, reverse=True)) + r")\b")


def wording(text):
    "What is left of a text when names of things, looks and places become slots, and looks disappear into the thing."
    text = re.sub(r"\ban\b", "a", WORDS.sub(lambda m: SLOT[m[0]], text))
    text = re.sub(r"(?:(?:SIZE|COLOUR|PATTERN) )+NOUN(?: PATTERN)?", "NOUN", text)
    return re.sub(r"NOUN PATTERN", "NOUN", text)


def test_wordings_are_not_the_benchmarks():
    "Single words aside, which GeneCIS's format asks for, no way of asking is shared with a benchmark."
    made = make_counterfactuals(training_pairs(4_000).decompositions, 8, double=0)
    ours = {wording(c.text) for found in made for c in found if len(wording(c.text).split()) > 1}
    theirs = {wording(part) for name in ("edits", "fashioniq", "cirr", "circo", "genecis") for q in open_benchmark(name, "val").queries for text in q.texts for part in [text, *text.split(" and ")]}
    assert len(ours) > 200 and len(theirs) > 50
    assert not ours & theirs, sorted(ours & theirs)


def test_the_whole_pipeline_knows_no_toyworld():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "import sys, foco.counterfactuals, foco.losses; assert not [m for m in sys.modules if 'toyworld' in m]"], check=True)


@pytest.mark.parametrize("caption", ["", "   ", "!!!", "<PERSON> & <PERSON>", "a", "the of and", "dog", "a {noun} and a {new}", "猫と犬", "A CAR ON THE GRASS", "a car " * 300, "an é́clair 🙂 on a table"])
def test_any_caption_is_survived(caption):
    phrases(caption)
    if caption.strip():
        others = training_pairs(200).decompositions
        made = make_counterfactuals([Decomposition(caption, ((caption, caption),), "test"), *others], 4)
        assert len(made) == 201 and all(len(found) <= 4 for found in made)


def test_capital_letters_are_words_like_others():
    lower = [Decomposition(d.caption, d.pairs, "test") for d in training_pairs(300).decompositions]
    upper = [Decomposition(d.caption.capitalize(), d.pairs, "test") for d in lower]
    assert Lexicon(d.caption for d in lower).nouns == Lexicon(d.caption for d in upper).nouns


@pytest.mark.skipif(not CAPTIONS.exists(), reason="no real captions beside the repository")
def test_real_captions_give_counterfactuals():
    captions = [line.strip() for line in CAPTIONS.read_text(encoding="utf-8").splitlines() if line.strip()][:6_000]
    lexicon = Lexicon(captions, expected=.5)
    assert {"beach", "background", "street"} <= lexicon.places and {"man", "woman", "dog"} <= set(lexicon.nouns)
    made = make_counterfactuals([Decomposition(c, ((c, c),), "test") for c in captions[:2_000]], 4, lexicon=lexicon)
    assert sum(map(bool, made)) > .7 * len(made)
    assert all(c.before != c.after and c.text.strip() for found in made for c in found)
