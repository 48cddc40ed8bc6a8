"""The data cards are complete, read the same from anywhere, and say what the real annotation files say."""
import hashlib, json, re
from collections import Counter
from pathlib import Path

import open_clip
import pytest
from foco.data.cards import available_cards, load_card, verify_annotations
from huggingface_hub import DatasetCard
from official import OFFICIAL

ROOT = Path(__file__).resolve().parents[1]
ROOTS = {"fashioniq": OFFICIAL/"fashioniq", "cirr": OFFICIAL, "circo": OFFICIAL/"circo", "genecis": OFFICIAL} # the official trees in it
CARDS = ["cc3m", "circo", "cirr", "coco-unlabeled2017", "fashioniq", "genecis", "toyworld", "visual-genome"]
SECTIONS = ["Source", "Licence", "Size", "How to get it", "Layout", "Splits and counts", "Known faults", "Checksums", "Citation"]
CREATORS = {"found", "crowdsourced", "expert-generated", "machine-generated", "no-annotation", "other"}
SIZES = {"n<1K": 1e3, "1K<n<10K": 1e4, "10K<n<100K": 1e5, "100K<n<1M": 1e6, "1M<n<10M": 1e7}
EVERYWHERE = pytest.mark.parametrize("name", CARDS)
EACH = pytest.mark.parametrize("name", sorted(ROOTS))


def real(name, path):
    "The records of a real annotation file, named by its path in the official tree."
    file = ROOTS[name]/path
    if not file.is_file(): pytest.skip(f"the annotation files of {name} are not here")
    return json.loads(file.read_text(encoding="utf-8"))


# ---- the cards themselves

def test_every_card_is_there(): assert available_cards() == CARDS


@EVERYWHERE
def test_card_is_complete(name):
    card = load_card(name)
    assert card.name == name and card.counts and card.layout and card.get and card.next_steps.startswith("1. ")
    assert all(isinstance(step, str) and step for step in card.get)
    assert re.findall(r"^## (.+)$", card.text, re.M) == SECTIONS and card.text.startswith("# ")
    assert bool(card.annotations) == (name in ROOTS) # the four benchmarks are pinned, the others have nothing to pin


@EVERYWHERE
def test_front_matter_follows_the_hub(name):
    meta = load_card(name).meta
    hub = DatasetCard((ROOT/"data_cards"/f"{name}.md").read_text(encoding="utf-8")) # the hub's own reader
    assert hub.data.to_dict() == meta and hub.text.strip() == load_card(name).text.strip()
    assert meta["license"] and (meta["license"] != "other" or meta["license_link"].startswith("https://"))
    assert set(meta["annotations_creators"]) <= CREATORS and set(meta["source_datasets"]) <= {"original", "extended"}
    infos = meta["dataset_info"] if isinstance(meta["dataset_info"], list) else [meta["dataset_info"]]
    examples = sum(split["num_examples"] for info in infos for split in info["splits"])
    assert meta["size_categories"] == [next(size for size, limit in SIZES.items() if examples < limit)]


@EVERYWHERE
def test_numbers_stand_once(name):
    "Where dataset_info and counts need the same number, it is named and repeated by name."
    text = (ROOT/"data_cards"/f"{name}.md").read_text(encoding="utf-8")
    assert all(re.search(r"num_examples: &\w+ \d+\}", line) for line in text.splitlines() if "num_examples" in line)
    assert set(re.findall(r"&(\w+) \d", text)) == set(re.findall(r"[ {]\*(\w+)", text.split("\n---\n")[0]))


def test_unknown_card_names_the_others():
    with pytest.raises(ValueError, match=r"unknown data card 'fashion_iq'; available are: cc3m, circo, cirr, coco-unlabeled2017, fashioniq"):
        load_card("fashion_iq")


def test_every_package_is_listed():
    "pyproject.toml lists the packages by hand, since data_cards/ is mapped into foco."
    config = pytest.importorskip("tomllib").loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT/"foco").rglob("__init__.py")}
    assert sorted(config["packages"]) == sorted(found | {"foco.data_cards"}) and config["package-dir"]["foco.data_cards"] == "data_cards"


# ---- against the real files

@EACH
def test_checksums(name):
    card = load_card(name)
    files = {path: ROOTS[name]/path for path in card.annotations}
    if not any(file.is_file() for file in files.values()): pytest.skip(f"the annotation files of {name} are not here")
    assert set(verify_annotations(card, files).values()) == {"official"}
    folders = {file.parent for file in files.values()} # no annotation file is left unpinned
    assert {f for folder in folders for f in folder.glob("*.json")} == set(files.values())
    assert all(hashlib.sha256(file.read_bytes()).hexdigest() == card.annotations[path] for path, file in files.items())


def longest(texts):
    "CLIP tokens of the longest text, start and end included."
    encode = open_clip.get_tokenizer("ViT-L-14").encode
    return max(len(encode(text)) + 2 for text in texts)


def positions(flags): return [i for i, flag in enumerate(flags) if flag]


def measure_fashioniq():
    cats, splits = ("dress", "shirt", "toptee"), ("train", "val", "test")
    caps = {(s, c): real("fashioniq", f"captions/cap.{c}.{s}.json") for s in splits for c in cats}
    lists = {(s, c): real("fashioniq", f"image_splits/split.{c}.{s}.json") for s in splits for c in cats}
    names = {s: Counter(x for c in cats for x in set(lists[s, c])) for s in splits}
    both = lambda q: [c.strip(".?, ") for c in q["captions"]]
    by_split = lambda f: {s: {c: f(s, c) for c in cats} for s in splits}
    by_category = lambda f: {c: {s: f(s, c) for s in splits} for c in cats}
    (captions,) = {len(q["captions"]) for v in caps.values() for q in v}
    assert all(len(set(v)) == len(v) for v in lists.values())
    return dict(
        queries=by_category(lambda s, c: len(caps[s, c])), captions=captions, listed=by_category(lambda s, c: len(lists[s, c])),
        val_union={c: len({x for q in caps["val", c] for x in (q["candidate"], q["target"])}) for c in cats},
        pictures=dict(listed=sum(map(len, lists.values())), unique=len({x for v in lists.values() for x in v}), **{s: len(names[s]) for s in splits}),
        shared={f"{a}_{b}": len(names[a].keys() & names[b].keys()) for a, b in (("train", "val"), ("train", "test"), ("val", "test"))},
        several_categories={s: sum(n > 1 for n in names[s].values()) for s in splits},
        shirt_and_toptee={"val": len(set(lists["val", "shirt"]) & set(lists["val", "toptee"]))},
        blank_captions=by_split(lambda s, c: positions(not all(t.strip() for t in q["captions"]) for q in caps[s, c])),
        identical_captions=by_split(lambda s, c: sum(len(set(q["captions"])) == 1 for q in caps[s, c])),
        leading_blanks={c: sum(t != t.lstrip() for q in caps["val", c] for t in q["captions"]) for c in cats},
        longest_tokens={"val": longest(f"a photo of $ that {' and '.join(both(q))}" for c in cats for q in caps["val", c])},
        dollar_signs=sum("$" in t for v in caps.values() for q in v for t in q["captions"]))


def measure_cirr():
    caps = {s: real("cirr", f"cirr/captions/cap.rc2.{s}.json") for s in ("val", "test1")}
    lists = {s: real("cirr", f"cirr/image_splits/split.rc2.{s}.json") for s in caps}
    demo = {m: real("cirr", f"cirr/demo_files/test1_pred_ranks_{m}.json") for m in ("recall", "recall_subset")}
    soft = [q["target_soft"] for q in caps["val"]]
    weights = [q["target_soft"].get(q["target_hard"]) for q in caps["val"]]
    assert not lists["val"].keys() & lists["test1"].keys() and all(q["target_hard"] in q["img_set"]["members"] for q in caps["val"])
    assert all(q["reference"] in q["target_soft"] for q in caps["val"] if q["target_hard"] not in q["target_soft"])
    assert all({q["reference"], *q["img_set"]["members"]} <= lists[s].keys() for s in caps for q in caps[s])
    assert all(q["reference"] in q["img_set"]["members"] for s in caps for q in caps[s])
    (group,) = {len(set(q["img_set"]["members"])) for v in caps.values() for q in v}
    (meta_keys,) = {len(d) - len(caps["test1"]) for d in demo.values()}
    return dict(
        queries={s: len(v) for s, v in caps.items()}, gallery={s: len(v) for s, v in lists.items()}, group=group,
        references={s: len({q["reference"] for q in v}) for s, v in caps.items()},
        blank_captions={s: [q["pairid"] for q in v if not q["caption"].strip()] for s, v in caps.items()},
        pasted_captions={"val": [q["pairid"] for q in caps["val"] if not q["caption"].isascii() and "Copiar" in q["caption"]]},
        soft_weights=Counter(w for t in soft for w in t.values()), soft_several=sum(len(t) > 1 for t in soft),
        soft_without_hard=weights.count(None), soft_below_one=sum(w is not None and w < 1 for w in weights),
        soft_best=sum(max(0, *t.values()) for t in soft),
        longest_tokens={s: longest(f"a photo of $ that {q['caption']}" for q in v) for s, v in caps.items()},
        dollar_signs=sum("$" in q["caption"] for v in caps.values() for q in v),
        submission={m: max(len(v) for v in d.values() if isinstance(v, list)) for m, d in demo.items()} | {"meta_keys": meta_keys})


def measure_circo():
    caps = {s: real("circo", f"annotations/{s}.json") for s in ("val", "test")}
    right = [q["gt_img_ids"] for q in caps["val"]]
    counts = [len(ids) for ids in right]
    assert all([q["id"] for q in v] == list(range(len(v))) for v in caps.values()) and all(len(set(ids)) == len(ids) for ids in right)
    assert all(q["target_img_id"] == q["gt_img_ids"][0] for q in caps["val"]) and not any("gt_img_ids" in q for q in caps["test"])
    return dict(
        queries={s: len(v) for s, v in caps.items()},
        right_answers=dict(total=sum(counts), mean=round(sum(counts)/len(counts), 3), fewest=min(counts), most=max(counts),
                           fewer_than_5=sum(n < 5 for n in counts), more_than_5=sum(n > 5 for n in counts), more_than_10=sum(n > 10 for n in counts)),
        aspects=Counter(a for q in caps["val"] for a in q["semantic_aspects"]),
        pictures_named=len({q["reference_img_id"] for v in caps.values() for q in v} | {i for ids in right for i in ids}),
        reference_is_right=sum(q["reference_img_id"] in q["gt_img_ids"] for q in caps["val"]),
        blank_captions={s: [q["id"] for q in v if not q["relative_caption"].strip()] for s, v in caps.items()},
        longest_tokens={s: longest(f"a photo of $ that {q['relative_caption']}" for q in v) for s, v in caps.items()},
        dollar_signs=sum("$" in q["relative_caption"] for v in caps.values() for q in v),
        submission={"test": max(map(len, real("circo", "submission_examples/submission_test.json").values()))})


def measure_genecis():
    tasks = ("focus_attribute", "change_attribute", "focus_object", "change_object")
    queries = {t: real("genecis", f"genecis/{t}.json") for t in tasks}
    key = lambda t: "image_id" if "attribute" in t else "val_image_id"
    entries = {t: [e for q in v for e in (q["reference"], q["target"], *q["gallery"])] for t, v in queries.items()}
    ids = {t: {e[key(t)] for e in v} for t, v in entries.items()}
    boxes = {t: [e["instance_bbox"] for e in entries[t]] for t in tasks[:2]}
    count = lambda f: {t: sum(f(key(t), q) for q in v) for t, v in queries.items()}
    of_boxes = lambda f: {t: sum(f(*box) for box in v) for t, v in boxes.items()}
    def one(values): (value,) = set(values); return value
    return dict(
        queries={t: len(v) for t, v in queries.items()}, gallery={t: one(len(q["gallery"]) + 1 for q in v) for t, v in queries.items()},
        conditions={t: len({q["condition"] for q in v}) for t, v in queries.items()},
        pictures={**{t: len(v) for t, v in ids.items()},
                  "visual_genome": len(ids[tasks[0]] | ids[tasks[1]]), "coco_val2017": len(ids[tasks[2]] | ids[tasks[3]])},
        boxes=of_boxes(lambda x, y, w, h: True), boxes_fractional=of_boxes(lambda *box: any(v != int(v) for v in box)),
        entries=sum(map(len, entries.values())),
        different=len({(key(t), e[key(t)], *e.get("instance_bbox", ())) for t, v in entries.items() for e in v}),
        boxes_negative=of_boxes(lambda x, y, w, h: min(x, y) < 0), boxes_free_left=of_boxes(lambda x, y, w, h: x - .7*w >= 0),
        boxes_free_top=of_boxes(lambda x, y, w, h: y - .7*h >= 0),
        boxes_free_both=of_boxes(lambda x, y, w, h: x - .7*w >= 0 and y - .7*h >= 0),
        boxes_free_neither=of_boxes(lambda x, y, w, h: x - .7*w < 0 and y - .7*h < 0),
        boxes_clamped_left=of_boxes(lambda x, y, w, h: x - .7*w < 0), smallest_side={t: min(min(w, h) for _, _, w, h in v) for t, v in boxes.items()},
        target_listed_again={t: positions(q["target"] in q["gallery"] for q in v) for t, v in queries.items()},
        repeated_distractors=count(lambda _, q: any(e in q["gallery"][:i] for i, e in enumerate(q["gallery"]))),
        reference_is_distractor=count(lambda _, q: q["reference"] in q["gallery"]),
        reference_picture_in_gallery=count(lambda k, q: q["reference"][k] in {e[k] for e in q["gallery"]}),
        target_in_reference_picture=count(lambda k, q: q["reference"][k] == q["target"][k]),
        blank_conditions=sum(not q["condition"].strip() for v in queries.values() for q in v),
        dollar_signs=sum("$" in q["condition"] for v in queries.values() for q in v))


# what no annotation file at hand can confirm
ELSEWHERE = {"circo": {"gallery": 123403}}


@EACH
def test_every_count_agrees_with_the_real_files(name):
    measured = {"fashioniq": measure_fashioniq, "cirr": measure_cirr, "circo": measure_circo, "genecis": measure_genecis}[name]()
    assert measured | ELSEWHERE.get(name, {}) == load_card(name).counts


def test_gallery_of_circo_is_coco(): assert load_card("circo").counts["gallery"] == load_card("coco-unlabeled2017").counts["pictures"]


def test_toyworld_counts():
    from foco.toyworld import scenes
    from foco.toyworld.benchmark import load_benchmark
    counts = load_card("toyworld").counts
    for word in ("categories", "colours", "sizes", "patterns", "backgrounds", "edits"): assert counts[word] == len(getattr(scenes, word.upper()))
    for split in ("val", "test"):
        bench = load_benchmark(split)
        assert (len(bench.queries), len(bench.ids)) == (counts["queries"][split], counts["gallery"][split])
        assert min(len(q.targets) for q in bench.queries) >= counts["right_answers_fewest"]
        assert counts["queries"][split] == counts["per_edit"]*counts["edits"]
        assert bench.images[0].size == (counts["picture"],)*2
