"""ToyWorld's benchmarks in the official formats: the same everywhere, complete, and right by meaning."""
import hashlib, json, os
from collections import Counter

import numpy as np
import pytest
from foco.data.cards import load_card
from foco.data.circo import load_circo
from foco.data.cirr import load_cirr
from foco.data.fashioniq import load_fashioniq
from foco.data.genecis import TASKS, load_genecis
from foco.data.pictures import read_picture
from foco.toyworld import benchmarks
from foco.toyworld.benchmark import training_pairs
from foco.toyworld.benchmarks import (BENCHMARKS, CATEGORIES_FASHIONIQ, KNOBS, CIRRKnobs, Style, benchmark_root, fits, genecis_pool, make_circo, make_cirr,
                                      make_fashioniq, read_scenes, write_benchmark)
from foco.toyworld.captions import _NOUNS
from foco.toyworld.drawing import draw_array, masks
from foco.toyworld.scenes import COLOURS, PATTERNS, split_of

SPLITS = ("val", "test")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toyworld")
    return {name: write_benchmark(name, folder/name) for name in BENCHMARKS}


def read(path): return json.loads(path.read_text(encoding="utf-8"))
def png(root): return sorted(root.rglob("*.png"), key=lambda p: p.relative_to(root).as_posix())


def load(name, root, split):
    if name == "fashioniq": return load_fashioniq(root, split, categories=CATEGORIES_FASHIONIQ)
    if name == "cirr": return load_cirr(root, split if split == "val" else "test1")
    return load_circo(root, split) if name == "circo" else load_genecis(root, split)


# ---- the same everywhere

PINNED = {
    "fashioniq": ("64e947d3d98fb173", "749d86a0f2bc3af4"),
    "cirr": ("6abb5d2f8b4a80dc", "89d82c6ede6aba27"),
    "circo": ("04e1f0f663eb2e47", "4890dd0193d9d846"),
    "genecis": ("bde666efa77582a4", "d7a1f34c4b8526ff"),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_same_everywhere(roots, name):
    "Bytes of all JSON files; pixels of every hundredth picture, since the bytes of a PNG depend on zlib's version."
    texts, pixels = hashlib.sha256(), hashlib.sha256()
    for path in sorted(roots[name].rglob("*.json"), key=lambda p: p.relative_to(roots[name]).as_posix()):
        texts.update(path.relative_to(roots[name]).as_posix().encode()); texts.update(path.read_bytes())
    for path in png(roots[name])[::100]:
        pixels.update(path.name.encode()); pixels.update(np.asarray(read_picture(path)).tobytes())
    assert (texts.hexdigest()[:16], pixels.hexdigest()[:16]) == PINNED[name]


def test_pictures_show_what_scenes_json_says(roots):
    for root in roots.values():
        scenes, files = read_scenes(root), png(root)
        assert len(files) == len({p.stem for p in files}) == len(scenes)
        for path in files[::97]: assert (np.asarray(read_picture(path)) == draw_array(scenes[path.stem])).all()


def test_small_enough(roots):
    assert sum(p.stat().st_size for root in roots.values() for p in root.rglob("*") if p.is_file()) < 60e6


# ---- formats

def keys(records): return {frozenset(r) for r in records}


def test_fashioniq_format(roots):
    root = roots["fashioniq"]
    assert {p.name for p in root.iterdir()} == {"captions", "image_splits", "images", "scenes.json", "toyworld.json"}
    for c in CATEGORIES_FASHIONIQ:
        for split in SPLITS:
            records, names = read(root/f"captions/cap.{c}.{split}.json"), read(root/f"image_splits/split.{c}.{split}.json")
            assert keys(records) == {frozenset(("target", "candidate", "captions"))} and {len(r["captions"]) for r in records} == {2}
            assert len(records) == 170 and names == sorted(set(names)) and all((root/f"images/{n}.png").is_file() for n in names)


def test_cirr_format(roots):
    root, pairs = roots["cirr"], []
    for split, folder in (("val", "dev"), ("test1", "test1")):
        records, places = read(root/f"cirr/captions/cap.rc2.{split}.json"), read(root/f"cirr/image_splits/split.rc2.{split}.json")
        assert keys(records) == {frozenset(("pairid", "reference", "target_hard", "target_soft", "caption", "img_set"))}
        assert keys(r["img_set"] for r in records) == {frozenset(("id", "members", "reference_rank", "target_rank"))}
        assert {p.split("/")[1] for p in places.values()} == {folder} and all((root/p).is_file() for p in places.values())
        for r in records:
            members = r["img_set"]["members"]
            assert len(set(members)) == 6 and {r["reference"], r["target_hard"]} <= set(members) and r["target_soft"] == {r["target_hard"]: 1.}
            assert members[r["img_set"]["reference_rank"]] == r["reference"] and members[r["img_set"]["target_rank"]] == r["target_hard"]
        assert set(Counter(r["img_set"]["id"] for r in records).values()) == {2}
        pairs += [r["pairid"] for r in records]
    assert len(set(pairs)) == len(pairs) == 1080


def test_circo_format(roots):
    root = roots["circo"]
    info = read(root/"COCO2017_unlabeled/annotations/image_info_unlabeled2017.json")
    assert set(info) == {"info", "images", "licenses", "categories"}
    assert keys(info["images"]) == {frozenset(("license", "file_name", "coco_url", "height", "width", "date_captured", "flickr_url", "id"))}
    assert all(i["file_name"] == f"{i['id']:012d}.png" and (root/"COCO2017_unlabeled/unlabeled2017"/i["file_name"]).is_file() for i in info["images"])
    assert 4000 <= len(info["images"]) <= 8000
    for split in SPLITS:
        records = read(root/f"annotations/{split}.json")
        assert keys(records) == {frozenset(("reference_img_id", "target_img_id", "relative_caption", "shared_concept", "gt_img_ids", "id", "semantic_aspects"))}
        assert [r["id"] for r in records] == list(range(len(records))) and all(r["target_img_id"] == r["gt_img_ids"][0] for r in records)


def test_genecis_format(roots):
    for split in SPLITS:
        root = roots["genecis"]/split
        for task in TASKS:
            records = read(root/f"genecis/{task}.json")
            entry = frozenset(("image_id", "instance_bbox")) if task.endswith("attribute") else frozenset(("val_image_id",))
            assert keys(records) == {frozenset(("condition", "gallery", "reference", "target"))}
            assert keys(e for r in records for e in (*r["gallery"], r["reference"], r["target"])) == {entry}
            assert {len(r["gallery"]) for r in records} == {9 if task == "focus_attribute" else 14}
            for r in records:
                where = r["target"]
                assert (root/"VG_100K_all"/f"{where['image_id']}.png" if "image_id" in where else root/"coco2017/val2017"/f"{where['val_image_id']:012d}.png").is_file()


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_official_loaders_read_them(roots, name, split):
    bench = load(name, roots[name], split)
    assert 490 <= len(bench.queries) <= 700 and not bench.hidden and not bench.missing and all(q.text.strip() for q in bench.queries)
    assert bench.exclude_reference == (name == "cirr") and bench.images[bench.queries[0].reference].mode == "RGB"
    if name == "circo": assert Counter(a for q in bench.queries for a in q.kinds).keys() == {"new_place", "new_company", "conjunction", "new_look", "removal"}
    if name == "cirr": assert all(len(q.subset) == 6 for q in bench.queries)


# ---- right by meaning

def test_fashioniq_has_one_picture_of_each_meaning(roots):
    scenes = read_scenes(roots["fashioniq"])
    for c in CATEGORIES_FASHIONIQ:
        for split in SPLITS:
            shown = Counter(scenes[n].key for n in read(roots["fashioniq"]/f"image_splits/split.{c}.{split}.json"))
            assert set(shown.values()) == {1} and all(c in key for key in shown)


def test_fashioniq_has_one_picture_of_each_targets_facts(roots):
    "The prop's size and pattern are in no caption, so they cannot make a picture wrong."
    scenes = read_scenes(roots["fashioniq"])
    for c in CATEGORIES_FASHIONIQ:
        for split in SPLITS:
            facts = {n: tuple(Style(*scenes[n].items, scenes[n].background).facts().values()) for n in read(roots["fashioniq"]/f"image_splits/split.{c}.{split}.json")}
            shown = Counter(facts.values())
            assert {shown[facts[r["target"]]] for r in read(roots["fashioniq"]/f"captions/cap.{c}.{split}.json")} == {1}


@pytest.mark.parametrize("split", SPLITS)
def test_cirr_has_one_right_answer(split):
    made = make_cirr(split)
    for q in made.asked: assert [i for i, s in enumerate(made.scenes) if fits(q.wanted, s)] == [q.target] != [q.reference]


def test_circo_lists_all_right_answers_and_only_those(roots):
    scenes = read_scenes(roots["circo"])
    for split, asked in make_circo()[1].items():
        records = read(roots["circo"]/f"annotations/{split}.json")
        assert len(records) == len(asked)
        for r, q in zip(records, asked):
            assert (r["relative_caption"], r["shared_concept"]) == q.texts
            assert sorted(r["gt_img_ids"]) == sorted(int(stem) for stem, s in scenes.items() if fits(q.wanted, s)) and r["reference_img_id"] not in r["gt_img_ids"]


def named(root, split, task):
    "GeneCIS records with each entry replaced by (item or None, scene), found through the box."
    scenes = read_scenes(root)
    def entry(e):
        if "val_image_id" in e: return None, scenes[f"{e['val_image_id']:012d}"]
        scene, (x, y, w, h) = scenes[e["image_id"]], e["instance_bbox"]
        inside = [m[y:y + h, x:x + w].sum() == m.sum() for m in masks(scene)]
        tight = [m[y].any() and m[y + h - 1].any() and m[:, x].any() and m[:, x + w - 1].any() for m in masks(scene)]
        (item,) = [i for i, a, b in zip(scene.items, inside, tight) if a and b]
        return item, scene
    for r in read(root/split/f"genecis/{task}.json"): yield r["condition"], entry(r["reference"]), entry(r["target"]), [entry(e) for e in r["gallery"]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_genecis_has_one_right_answer(roots, split, task):
    value = {v: v for v in (*COLOURS, *PATTERNS)} | {"violet": "purple", "spotted": "dotted"}
    for condition, (it, ref), target, wrong in named(roots["genecis"], split, task):
        def right(entry):
            item, scene = entry
            if item is None: return scene.background == ref.background and any(condition in _NOUNS[i.category] for i in scene.items)
            if task == "focus_attribute": a = {"color": "colour"}.get(condition, condition); return getattr(item, a) == getattr(it, a)
            return item.category == it.category and value[condition] in (item.colour, item.pattern)
        assert right(target) and not any(map(right, wrong))
        if it is None: assert any(condition in _NOUNS[i.category] for i in ref.items) == (task == "focus_object")


def test_training_never_shows_a_reference_or_a_target(roots):
    trained = {s.key for s in training_pairs(3000).images.scenes}
    for name, root in roots.items():
        scenes = read_scenes(root)
        for split in SPLITS:
            bench = load(name, root, split)
            used = {scenes[bench.images.paths[i].stem].key: split_of(scenes[bench.images.paths[i].stem]) for q in bench.queries for i in (q.reference, *q.targets)}
            assert set(used.values()) == {split} and not trained & set(used)


def test_neither_a_name_nor_an_order_tells_the_target(roots):
    for name in ("fashioniq", "cirr", "circo"):
        bench = load(name, roots[name], "val")
        place = [np.mean([q.targets[0] < q.reference for q in bench.queries]), np.mean([abs(q.targets[0] - q.reference) for q in bench.queries]) / len(bench.ids)]
        assert .42 < place[0] < .58 and (.08 if name == "fashioniq" else .28) < place[1]


# ---- writing

FEW = {"cirr": CIRRKnobs(sets=4)}


@pytest.fixture
def few(monkeypatch):
    "A CIRR of four sets a split, quickly written."
    monkeypatch.setitem(benchmarks.KNOBS, "cirr", FEW["cirr"])
    monkeypatch.setattr(make_cirr, "__defaults__", (FEW["cirr"], 0))


def test_an_interrupted_write_leaves_nothing(few, monkeypatch, tmp_path):
    drawn = []
    def draw(scene):
        drawn.append(scene)
        if len(drawn) > 20: raise KeyboardInterrupt
        return real(scene)
    real = benchmarks.draw
    monkeypatch.setattr(benchmarks, "draw", draw)
    with pytest.raises(KeyboardInterrupt): write_benchmark("cirr", tmp_path/"cirr")
    assert len(drawn) == 21 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(benchmarks, "draw", real)
    root = write_benchmark("cirr", tmp_path/"cirr")
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    drawn.clear(); monkeypatch.setattr(benchmarks, "draw", draw)
    with pytest.raises(KeyboardInterrupt): write_benchmark("cirr", root, seed=1)    # the one that was there stays as it was
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before and [p.name for p in tmp_path.iterdir()] == ["cirr"]


def test_written_on_first_use_and_again_only_if_it_must(few, monkeypatch, tmp_path):
    root = benchmark_root("cirr", tmp_path)
    assert root == tmp_path/f"cirr-v{benchmarks.VERSION}" and len(load_cirr(root).queries) == 8
    about, when = read(root/"toyworld.json"), os.stat(root).st_ino
    assert about["version"] == benchmarks.VERSION and about["knobs"]["sets"] == 4
    assert benchmark_root("cirr", tmp_path) == root and os.stat(root).st_ino == when
    (root/"toyworld.json").write_text(json.dumps(about | {"version": 0}), encoding="utf-8")
    assert benchmark_root("cirr", tmp_path) == root and os.stat(root).st_ino != when and read(root/"toyworld.json") == about
    other = benchmark_root("cirr", tmp_path, seed=1)
    assert other != root and load_cirr(other).queries_sha256 != load_cirr(root).queries_sha256
    monkeypatch.chdir(tmp_path)
    assert benchmark_root("cirr") == tmp_path/"_out"/"toyworld"/f"cirr-v{benchmarks.VERSION}"


def test_refuses(tmp_path):
    with pytest.raises(ValueError, match="unknown benchmark 'cire'; expected one of fashioniq"): write_benchmark("cire", tmp_path/"x")
    (tmp_path/"mine").mkdir(); (tmp_path/"mine"/"thesis.txt").write_text("years", encoding="utf-8")
    with pytest.raises(FileExistsError, match="not a ToyWorld benchmark"): write_benchmark("cirr", tmp_path/"mine")
    assert (tmp_path/"mine"/"thesis.txt").read_text(encoding="utf-8") == "years"


def test_other_seeds_are_as_sound():
    "The promises do not hang on one seed."
    knobs = KNOBS["fashioniq"]
    made = make_fashioniq("house", "val", type(knobs)(references=20), seed=7)
    for q in made.asked: assert [i for i, s in enumerate(made.scenes) if fits(q.wanted, s)] == [q.target]
    assert len({s.key for s in genecis_pool("object", "test", seed=7)}) == KNOBS["genecis"].pool[1]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_data_card_counts_right(roots, name):
    counts = load_card("toyworld").counts["on_disk"][name]
    opened = {split: load(name, roots[name], split) for split in SPLITS}
    assert counts == {"queries": {s: len(b.queries) for s, b in opened.items()}, "pictures": {s: len(b.ids) for s, b in opened.items()}}
