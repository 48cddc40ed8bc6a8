"""FashionIQ: the real annotation files where they are at hand, small generated ones everywhere."""
import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from foco.data.benchmark import Lists, write_submission
from foco.data.cards import load_card
from foco.data.fashioniq import CATEGORIES, JOINS, check_fashioniq_submission, join_captions, load_fashioniq, read_category
from foco.data.metrics import query_values, rank_lists, rank_targets, score
from official import OFFICIAL

REAL = OFFICIAL/"fashioniq"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real annotation files are not here")
COUNTS = {"val": {"dress": (2017, 3817, 2628), "shirt": (2038, 6346, 3089), "toptee": (1961, 5373, 2902)},
          "test": {"dress": (2024, 3818, None), "shirt": (2038, 6346, None), "toptee": (2056, 5374, None)}}
BLANK = {"shirt 1928", "toptee 676", "toptee 1076"}


@pytest.fixture(scope="module")
def val(): return load_fashioniq(REAL, pictures=False)


@pytest.fixture(scope="module")
def test(): return load_fashioniq(REAL, "test", pictures=False)


def records(split): # {category: its raw records}
    return {c: read_category(load_card("fashioniq"), REAL, c, split).records for c in CATEGORIES}


def per_category(b): return {c: sum(c in q.kinds for q in b.queries) for c in CATEGORIES}


# ---- the real files

@real
@pytest.mark.parametrize("split", ["val", "test"])
def test_counts(split, val, test):
    b = {"val": val, "test": test}[split]
    assert per_category(b) == {c: n for c, (n, _, _) in COUNTS[split].items()}
    assert b.protocol["gallery_sizes"] == {c: g for c, (_, g, _) in COUNTS[split].items()} == dict(zip(CATEGORIES, map(len, b.galleries)))
    assert b.data == "official" and b.hidden == (split == "test") and not b.exclude_reference and b.macro
    assert (b.metrics, b.averages) == (("R@1", "R@5", "R@10", "R@50"), {"Avg": ("R@10", "R@50")})


@real
def test_the_counts_are_those_of_the_card(val, test):
    counts = load_card("fashioniq").counts
    for split, b in (("val", val), ("test", test)):
        assert per_category(b) == {c: counts["queries"][c][split] for c in CATEGORIES}
        assert b.protocol["gallery_sizes"] == {c: counts["listed"][c][split] for c in CATEGORIES}
        assert len(b.ids) == counts["pictures"][split]
        assert b.protocol["blank_captions"] == sum(len(counts["blank_captions"][split][c]) for c in CATEGORIES)


@real
def test_union_gallery(val):
    union = load_fashioniq(REAL, gallery="val_union", pictures=False)
    assert union.protocol["gallery_sizes"] == {c: u for c, (_, _, u) in COUNTS["val"].items()} and union.data == "official"
    assert union.gallery_sha256 != val.gallery_sha256 and union.queries_sha256 == val.queries_sha256
    for a, b in zip(val.galleries, union.galleries): assert {union.ids[j] for j in b} < {val.ids[j] for j in a}


@real
def test_training_files_are_what_the_paper_counts():
    read = {(s, c): read_category(load_card("fashioniq"), REAL, c, s) for s in ("train", "val", "test") for c in CATEGORIES}
    counted = {c: (len(r.records), len(r.names)) for (s, c), r in read.items() if s == "train"}
    assert counted == {"dress": (5985, 11452), "shirt": (5988, 19036), "toptee": (6027, 16121)}
    names = [n for r in read.values() for n in r.names]
    assert (len(names), len(set(names))) == (77683, 74381)


@real
def test_shirt_and_toptee_share_pictures(val):
    dress, shirt, toptee = ({val.ids[j] for j in g} for g in val.galleries)
    assert len(shirt & toptee) == 121 and not dress & (shirt | toptee)
    assert len(val.ids) == len(dress | shirt | toptee) == 15415


@real
def test_blank_captions_stay_queries(val, test):
    raw = {f"{c} {i}": r["captions"] for c, rs in records("val").items() for i, r in enumerate(rs)}
    assert {k for k, captions in raw.items() if "" in captions} == BLANK and val.protocol["blank_captions"] == 3
    asked = {q.id: q for q in val.queries}
    assert list(asked) == list(raw)
    for k in BLANK: assert asked[k].texts == (next(c for c in raw[k] if c).strip(".?, "),)
    assert all(t and t[0] not in ".?, " and t[-1] not in ".?, " for q in (*val.queries, *test.queries) for t in q.texts)


@real
@pytest.mark.parametrize("join", JOINS)
def test_joins(join, val):
    told = {c: [[t.strip(".?, ") for t in r["captions"]] for r in rs] for c, rs in records("val").items()}
    b = val if join == JOINS[0] else load_fashioniq(REAL, join=join, pictures=False)
    assert b.protocol["join"] == join
    for q in b.queries:
        category, i = q.id.split()
        c1, c2 = told[category][int(i)]
        straight, turned = (f"{c1} and {c2}", f"{c2} and {c1}") if c1 and c2 else (c1 or c2,) * 2
        both = (straight, turned) if straight != turned else (straight,)
        assert q.texts == {"both_orders_averaged": both, "c1_and_c2": (straight,), "c2_and_c1": (turned,)}[join]
    two = sum(len(q.texts) == 2 for q in b.queries)
    assert two == (sum(c1 != c2 and c1 != "" and c2 != "" for cs in told.values() for c1, c2 in cs) if join == JOINS[0] else 0)


@real
def test_what_stripping_changes_for_the_tokenizer(val):
    "In Pic2Word's prompt leading blanks make no tokens, the punctuation at the ends of a sentence does."
    encode = open_clip.get_tokenizer("ViT-L-14").encode
    def tokens(c1, c2): return encode(f"a photo of * , {c2} and {c1}")
    raw = [r["captions"] for rs in records("val").values() for r in rs]
    blank_first = [cs for cs in raw if any(c.startswith(" ") for c in cs)]
    assert sum(c.startswith(" ") for cs in raw for c in cs) == sum(load_card("fashioniq").counts["leading_blanks"].values())
    assert len(blank_first) == 346 and all(tokens(*cs) == tokens(*(c.lstrip() for c in cs)) for cs in blank_first)
    assert all(tokens(*cs) == tokens(*(c.strip() for c in cs)) for cs in raw)
    assert (sum(tokens(*cs) != tokens(*(c.strip(".?, ") for c in cs)) for cs in raw), len(raw)) == (895, 6016)


@real
def test_constant_and_random_features(val):
    torch.manual_seed(0)
    h, v = (torch.nn.functional.normalize(torch.randn(n, 16), dim=-1) for n in (len(val.queries), len(val.ids)))
    flat = query_values(val, rank_targets(torch.ones(len(h), 16) / 4, torch.ones(len(v), 16) / 4, val))
    assert not any(x.any() for x in flat.values())
    s = score(val, rank_targets(h, v, val))
    chance = 100 * np.mean([50 / len(g) for g in val.galleries])
    assert abs(s.metrics["R@50"] - chance) < .5                          # the reference is one of the distractors
    assert s.metrics["R@50"] == pytest.approx(np.mean([s.by_kind[c]["R@50"] for c in CATEGORIES]))
    assert s.metrics["Avg"] == pytest.approx((s.metrics["R@10"] + s.metrics["R@50"]) / 2)


@real
def test_hidden_labels_point_at_the_submission(test):
    h, v = torch.zeros(len(test.queries), 2), torch.zeros(len(test.ids), 2)
    with pytest.raises(ValueError, match="labels are hidden.*submission"): rank_targets(h, v, test)
    with pytest.raises(ValueError, match="targets of this split are hidden; use 'original'"):
        load_fashioniq(REAL, "test", gallery="val_union", pictures=False)


@real
def test_challenge_files_of_the_real_test_split(test, tmp_path):
    top = [test.galleries[q.gallery][:50] for q in test.queries]
    files = write_submission(test, Lists(top, [np.zeros(0, int)] * len(top)), tmp_path)
    assert [f.name for f in files] == [f"{c}.test.pred.json" for c in CATEGORIES] and sorted(tmp_path.iterdir()) == sorted(files)
    for c, f in zip(CATEGORIES, files):
        written, given = json.loads(f.read_text(encoding="utf-8")), json.loads((REAL/"captions"/f"cap.{c}.test.json").read_text(encoding="utf-8"))
        assert [{k: v for k, v in r.items() if k != "ranking"} for r in written] == given and all(len(set(r["ranking"])) == 50 for r in written)
        check_fashioniq_submission(written, test, c)
        check_fashioniq_submission(written, load_fashioniq(REAL, "test", join="c2_and_c1", pictures=False), c)
    with pytest.raises(ValueError, match="expected a list of 2024"): check_fashioniq_submission(written, test, "dress")


@real
def test_a_changed_file_is_not_official(tmp_path):
    for folder in ("captions", "image_splits"): (tmp_path/folder).mkdir()
    for name in ("captions/cap.dress.val.json", "image_splits/split.dress.val.json"): (tmp_path/name).write_bytes((REAL/name).read_bytes())
    assert load_fashioniq(tmp_path, categories="dress", pictures=False).data == "official"      # the files that are read, no others
    (tmp_path/name).write_bytes((tmp_path/name).read_bytes() + b"\n")
    assert load_fashioniq(tmp_path, categories="dress", pictures=False).data == "unofficial"


# ---- generated ones

def small(root, split="val", n=60, asked=3, targets=True, pictures=(), suffix=".jpg"):
    "Write a FashionIQ of `n` names a category; `pictures` are the numbers that get a file."
    for c in CATEGORIES:
        names = [f"{c[0].upper()}{i:03d}" for i in range(n)]
        records = [{"candidate": names[i], "captions": [f"is {i}", "is other"]} | ({"target": names[i + 1]} if targets else {}) for i in range(asked)]
        for path, content in ((f"captions/cap.{c}.{split}.json", records), (f"image_splits/split.{c}.{split}.json", names)):
            (root/path).parent.mkdir(parents=True, exist_ok=True)
            (root/path).write_text(json.dumps(content), encoding="utf-8")
        (root/"images"/c).mkdir(parents=True, exist_ok=True)
        for i in pictures: Image.new("RGB", (8, 8), (i, 9, 9)).save(root/"images"/c/f"{names[i]}{suffix}")
    return root


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".png"])
def test_pictures_in_one_folder_or_one_per_category(tmp_path, suffix):
    b = load_fashioniq(small(tmp_path, n=4, asked=1, pictures=range(4), suffix=suffix))
    assert b.images[0].size == (8, 8) and b.missing == {} and b.data == "unofficial"
    for p in list((tmp_path/"images").rglob(f"*{suffix}")): p.rename(tmp_path/"images"/p.name)
    assert load_fashioniq(tmp_path).ids == b.ids


BREAK = {"missing": Path.unlink,
         "0 bytes": lambda p: p.write_bytes(b""),
         "HTML": lambda p: p.write_text("<html>404</html>", encoding="utf-8"),
         "truncated": lambda p: p.write_bytes(p.read_bytes()[:60])}

@pytest.mark.parametrize("break_", BREAK.values(), ids=BREAK)
@pytest.mark.parametrize("i, queries", [(0, 8), (1, 7), (3, 8), (4, 9)], ids=["reference", "reference and target", "target", "distractor"])
def test_allow_missing(tmp_path, break_, i, queries):
    small(tmp_path, n=6, asked=3, pictures=range(6))
    whole = load_fashioniq(tmp_path, allow_missing=True)
    assert whole.missing == {}
    break_(tmp_path/"images"/"shirt"/f"S{i:03d}.jpg")
    b = load_fashioniq(tmp_path, allow_missing=True)
    assert b.missing == {"queries": [queries, 9], "gallery": [17, 18]} and b.data == "unofficial"
    assert b.protocol["gallery_sizes"] == {"dress": 6, "shirt": 5, "toptee": 6} and f"S{i:03d}" not in b.ids
    for q in b.queries: assert b.ids[q.targets[0]] == b.ids[q.reference][0] + f"{int(b.ids[q.reference][1:]) + 1:03d}"


def test_missing_pictures_are_refused(tmp_path):
    small(tmp_path, n=4, asked=1, pictures=range(3))
    expected = "3 of 12 pictures are missing or have 0 bytes, first D003, S003, T003.*foco_check_data fashioniq"
    with pytest.raises(FileNotFoundError, match=expected): load_fashioniq(tmp_path)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory): return load_fashioniq(small(tmp_path_factory.mktemp("test"), "test", targets=False), "test", pictures=False)


def payload(b, category="dress"):
    return [{"candidate": b.ids[q.reference], "captions": q.text.split(" and "), "ranking": b.ids[:50]} for q in b.queries if category in q.kinds]


ranking = st.lists(st.integers(0, 59), min_size=50, max_size=50, unique=True)

@settings(max_examples=30, deadline=None)
@given(ranking, st.integers(0, 2), st.data())
def test_small_corruptions_are_refused(hidden, numbers, i, data):
    good = payload(hidden)
    good[i]["ranking"] = [f"D{k:03d}" for k in numbers]
    check_fashioniq_submission(good, hidden, "dress")
    j, k = data.draw(st.integers(0, 49)), data.draw(st.integers(0, 49).filter(lambda k: k != 0))
    def changed(**fields): return [{**r, **fields} if n == i else r for n, r in enumerate(good)]
    r = good[i]["ranking"]
    def put(x): return changed(ranking=r[:j] + [x] + r[j + 1:])
    for bad in (good[:i] + good[i + 1:], good + [good[i]], good[1:] + good[:1],
                changed(candidate="D010"), changed(captions=["is other", "is new"]), changed(captions=None),
                changed(ranking=r[:-1]), changed(ranking=r + ["D000"]), changed(ranking=None),
                put(r[j - k]), put("S000"), put(j), {"ranking": r}, None):
        with pytest.raises(ValueError): check_fashioniq_submission(bad, hidden, "dress")


def test_nothing_is_written_when_one_category_is_refused(hidden, tmp_path):
    torch.manual_seed(0)
    lists = rank_lists(torch.randn(9, 4), torch.randn(180, 4), hidden)
    assert len(write_submission(hidden, lists, tmp_path/"good")) == 3
    bad = lists._replace(top=lists.top[:-1] + [lists.top[0]])                   # the last toptee query gets dresses
    with pytest.raises(ValueError, match="toptee, record 2: ranking: 'D.*not in the gallery"): write_submission(hidden, bad, tmp_path/"bad")
    assert not list((tmp_path/"bad").iterdir())


def test_a_test_split_that_tells_its_targets(tmp_path):
    b = load_fashioniq(small(tmp_path, "test", n=60), "test", pictures=False)
    assert not b.hidden and b.submission is not None
    assert query_values(b, rank_targets(torch.eye(180)[[q.targets[0] for q in b.queries]], torch.eye(180), b))["R@1"].all()


@given(st.lists(st.text(alphabet="ab.?, ", max_size=6), min_size=2, max_size=2))
def test_joined_texts(captions):
    straight, turned = join_captions(captions, "c1_and_c2"), join_captions(captions, "c2_and_c1")
    both = join_captions(captions)
    assert set(both) == {*straight, *turned} and both[0] == straight[0] and len(both) == len({*both})
    parts = [c.strip(".?, ") for c in captions]
    assert straight == (" and ".join(filter(None, parts)),)
