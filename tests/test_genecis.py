"""GeneCIS: the real annotation files, and the crop against a literal re-statement of the official rule."""
import json, time
from collections import Counter

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from foco.data.cards import load_card
from foco.data.genecis import Box, TASKS, crop_box, load_genecis, official_edges, pad_square, symmetric_edges
from foco.data.metrics import query_values, rank_targets, score
from foco.data.pictures import Pictures, read_picture
from official import OFFICIAL

REAL = OFFICIAL/"genecis"
needs_files = pytest.mark.skipif(not REAL.is_dir(), reason="GeneCIS's annotation files are not here")
ATTRIBUTE, OBJECT = TASKS[:2], TASKS[2:]


def records(task): return json.loads((REAL/f"{task}.json").read_text(encoding="utf-8"))
def by_task(benchmark): return {t: [q for q in benchmark.queries if q.kinds == (t,)] for t in TASKS}


@pytest.fixture(scope="module")
def real(): return load_genecis(REAL, pictures=False)


# ---- the real files

@needs_files
def test_counts(real):
    tasks, counts = by_task(real), load_card("genecis").counts
    def each(*values): return dict(zip(TASKS, values, strict=True))
    assert {t: len(q) for t, q in tasks.items()} == each(2000, 2112, 1960, 1960) == counts["queries"]
    assert {t: {len(real.galleries[q.gallery]) for q in qs} for t, qs in tasks.items()} == each({10}, {15}, {15}, {15})
    assert {t: len({q.text for q in qs}) for t, qs in tasks.items()} == each(40, 400, 97, 109)
    assert all(len(q) % 8 == 0 for q in tasks.values())                                      # the official batch size divides all of them
    assert (real.data, real.split, real.exclude_reference, real.macro, real.hidden) == ("official", "test", False, True, False)
    assert real.protocol["variant"] == "official"
    assert load_genecis(REAL, crop="symmetric", pictures=False).protocol["variant"] == "crop"
    assert not any("$" in q.text for q in real.queries) and real.metrics == ("R@1", "R@2", "R@3")
    assert json.loads(json.dumps(real.protocol)) == real.protocol


@needs_files
def test_galleries_are_the_records(real):
    "Target first, then the list as it stands, duplicates too; the reference is not added."
    def name(e): return f"{e['val_image_id']:012d}" if "val_image_id" in e else e["image_id"]
    for task, queries in by_task(real).items():
        for i, (q, r) in enumerate(zip(queries, records(task), strict=True)):
            listed, places = [r["target"], *r["gallery"]], real.galleries[q.gallery]
            assert [real.ids[j].split(":")[0] for j in places] == [name(e) for e in listed]
            assert (q.targets, q.id, q.text) == ((places[0],), f"{task} {i}", r["condition"])
            boxes = [real.images.boxes[j] for j in (q.reference, *places)]
            if task in OBJECT: assert real.ids[q.reference] == name(r["reference"]) and not any(boxes); continue
            assert [b[:4] for b in boxes] == [tuple(e["instance_bbox"]) for e in (r["reference"], *listed)]


@needs_files
def test_ids_are_exact_and_different(real):
    assert len(set(real.ids)) == len(real.ids) == 34_083 == load_card("genecis").counts["different"] and "000000121506" in real.ids
    assert "2361447:0,1.6666666666666667,490.1666666666667,140.16666666666669" in real.ids


# boxes; horizontal margin all on the left, vertical margin all above, both, neither; negative corners; smallest side
BOX_COUNTS = {"focus_attribute": (22_000, 12_284, 11_177, 7_628, 6_167, 38, 2), "change_attribute": (33_792, 18_425, 17_646, 11_698, 9_419, 39, 3)}


@needs_files
@pytest.mark.parametrize("task", ATTRIBUTE)
def test_boxes(task):
    boxes = np.array([e["instance_bbox"] for r in records(task) for e in (r["reference"], r["target"], *r["gallery"])])
    (x, y, w, h), far = boxes.T, (10**6, 10**6)                                              # no border on the right or below
    left, top, right, bottom = np.array([official_edges(Box(*b), far) for b in boxes]).T
    on_left, above = abs(right - x - w) < 1e-6, abs(bottom - y - h) < 1e-6                   # ends where the box ends
    assert (on_left == (x - .7 * w >= 0)).all() and (above == (y - .7 * h >= 0)).all()
    found = (len(boxes), on_left.sum(), above.sum(), (on_left & above).sum(), (~on_left & ~above).sum())
    assert (*found, ((x < 0) | (y < 0)).sum(), min(w.min(), h.min())) == BOX_COUNTS[task]
    assert .66 < (boxes != boxes.astype(int)).any(1).mean() < .71
    assert np.allclose(right - left, 1.7 * w) and np.allclose(bottom - top, 1.7 * h)         # as large as ever, wherever it slides
    counts = load_card("genecis").counts
    assert found == tuple(counts[k][task] for k in ("boxes", "boxes_free_left", "boxes_free_top", "boxes_free_both", "boxes_free_neither"))


@needs_files
def test_oddities(real):
    "What protocols.md says about repeated entries, counted on the loaded benchmark."
    again, repeated, reference, same_picture, in_reference = {}, Counter(), Counter(), Counter(), Counter()
    def photo(j): return real.ids[j].split(":")[0]
    for task, queries in by_task(real).items():
        for i, q in enumerate(queries):
            target, *others = real.galleries[q.gallery].tolist()
            if target in others: again.setdefault(task, []).append(i)
            repeated[task] += len(set(others)) < len(others); reference[task] += q.reference in others
            same_picture[task] += photo(q.reference) in map(photo, others); in_reference[task] += photo(q.reference) == photo(target)
    assert again == {"focus_attribute": [14], "change_object": [19]}
    assert repeated == dict(focus_attribute=6, change_attribute=5, focus_object=0, change_object=0)
    assert reference == dict(focus_attribute=0, change_attribute=79, focus_object=0, change_object=0)
    assert same_picture["change_attribute"] == 92 and in_reference == dict(focus_attribute=0, change_attribute=1, focus_object=0, change_object=0)


# ---- ranks

def features(real, D=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.functional.normalize(torch.randn(n, D, generator=g), dim=-1) for n in (len(real.queries), len(real.ids))]


@needs_files
def test_random_features_score_chance(real):
    composed, gallery = features(real)
    start = time.process_time(); ranks = rank_targets(composed, gallery, real); seconds = time.process_time() - start      # of the processor: what else runs does not count
    found = score(real, ranks)
    for task, q in by_task(real).items():
        size = 10 if task == "focus_attribute" else 15
        for k in (1, 2, 3): assert abs(found.by_kind[task][f"R@{k}"] / 100 - k / size) < 3.5 * (k / size * (1 - k / size) / len(q)) ** .5
    assert found.metrics["R@1"] == pytest.approx(np.mean([v["R@1"] for v in found.by_kind.values()]))
    assert seconds < 5


@needs_files
def test_ranks_against_the_definition(real):
    "Entry 0 is right; an equal entry counts against it."
    composed, gallery = features(real)
    composed, gallery = (composed * 4).round(), (gallery * 4).round()                        # ties
    for q, h, r in list(zip(real.queries, composed, rank_targets(composed, gallery, real).gallery))[::7]:
        s = (gallery[real.galleries[q.gallery]] @ h).tolist()
        assert r.tolist() == [1 + sum(x >= s[0] for x in s[1:])]


@needs_files
def test_constant_features_score_zero(real):
    flat = rank_targets(torch.ones(len(real.queries), 4) / 2, torch.ones(len(real.ids), 4) / 2, real)
    assert score(real, flat).metrics == {"R@1": 0, "R@2": 0, "R@3": 0}
    assert all(r[0] == len(real.galleries[q.gallery]) for r, q in zip(flat.gallery, real.queries))


@needs_files
def test_a_target_that_is_listed_again_ties(real):
    "A perfect method misses these two queries at K = 1 and no others."
    perfect = torch.nn.functional.normalize(torch.randn(len(real.ids), 64, generator=torch.Generator().manual_seed(1)), dim=-1)
    values = query_values(real, rank_targets(perfect[[q.targets[0] for q in real.queries]], perfect, real))
    assert [q.id for q, v in zip(real.queries, values["R@1"]) if v == 0] == ["focus_attribute 14", "change_object 19"]
    assert [q.id for q, v in zip(real.queries, values["R@3"]) if v == 0] == []


# ---- the crop

def literal_crop(path, box):
    "The official steps (datasets/vaw_dataset.py), on the picture as it is stored: dilate, crop, expand to a square."
    picture = Image.open(path); W, H = picture.size
    left, top = max(0, box[0] - 0.7 * box[2]), max(0, box[1] - 0.7 * box[3])
    right, bottom = min(W, left + (1 + 0.7) * box[2]), min(H, top + (1 + 0.7) * box[3])
    crop = picture.crop((left, top, right, bottom)); w, h = crop.size
    if w == h: return crop
    square = Image.new(crop.mode, (max(w, h),) * 2, (0,) if crop.mode == "L" else (0, 0, 0))
    square.paste(crop, (0, (w - h) // 2) if w > h else ((h - w) // 2, 0))
    return square


def noise(W=120, H=80): return Image.fromarray(np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8))
def same(a, b): return a.size == b.size and (np.asarray(a.convert("RGB")) == np.asarray(b.convert("RGB"))).all()


BOXES = {"free": (60, 40, 20, 10), "left": (5, 40, 20, 10), "top": (60, 2, 20, 30), "corner": (1, 1, 60, 50), "right": (90, 50, 30, 20),
         "beyond right": (90, 50, 60, 60), "all": (0, 0, 120, 80), "negative": (-4, -3, 30, 40), "fraction": (33.4, 21.7, 18.9, 7.3),
         "halves": (50.5, 30.5, 5, 5), "tiny": (70.2, 10.6, 2, 3.5), "thin": (64, 4, 2, 70),
         "long fractions": (0.0, 1.6666666666666667, 90.16666666666667, 40.166666666666664)}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_crop_is_the_official_one(tmp_path, box, mode):
    path = tmp_path/"x.png"; noise().convert(mode).save(path)
    assert same(crop_box(read_picture(path), Box(*box)), literal_crop(path, box))


def test_crop_edges_at_the_borders():
    size = (120, 80)
    assert official_edges(Box(60, 40, 20, 10), size) == pytest.approx((46, 33, 80, 50))       # free: ends where the box ends
    assert official_edges(Box(5, 40, 20, 10), size) == pytest.approx((0, 33, 34, 50))         # clamped left: slides right, as wide as ever
    assert official_edges(Box(90, 50, 60, 60), size) == pytest.approx((48, 8, 120, 80))       # clamped right and below
    assert official_edges(Box(-4, -3, 30, 40), size) == pytest.approx((0, 0, 51, 68))
    assert symmetric_edges(Box(60, 40, 20, 10), size) == pytest.approx((53, 36.5, 87, 53.5))
    assert symmetric_edges(Box(5, 40, 20, 10), size) == pytest.approx((0, 36.5, 32, 53.5))


@settings(max_examples=150, deadline=None)
@given(st.floats(-5, 110), st.floats(-5, 70), st.floats(2, 130), st.floats(2, 90))
def test_crop_of_any_box(x, y, w, h):
    whole, box = noise(), Box(x, y, w, h)
    left, top, right, bottom = map(round, official_edges(box, whole.size))
    inner = whole.crop((left, top, right, bottom)); square = crop_box(whole, box)
    side = max(inner.size)
    assert square.size == (side, side)
    dx, dy = (side - inner.size[0]) // 2, (side - inner.size[1]) // 2
    assert same(square.crop((dx, dy, dx + inner.size[0], dy + inner.size[1])), inner)
    assert np.asarray(square).astype(int).sum() == np.asarray(inner).astype(int).sum()       # the rest is black


def test_padding_is_floored():
    assert np.flatnonzero(np.asarray(pad_square(Image.new("L", (5, 2), 255)))[:, 0]).tolist() == [1, 2]
    assert np.flatnonzero(np.asarray(pad_square(Image.new("L", (2, 5), 255)))[0]).tolist() == [1, 2]
    assert pad_square(Image.new("RGB", (4, 4))).size == (4, 4)


def test_crops_of_all_kinds_of_pictures(tmp_path):
    "Grey, CMYK, palette, 16-bit and turned pictures are RGB, upright as stored, and padded with black."
    photo, box, turned = noise(), Box(60, 10, 20, 50), Image.Exif(); turned[274] = 6
    deep = Image.fromarray((np.arange(80 * 120).reshape(80, 120) * 6).astype(np.uint16))
    kinds = {"grey.jpg": photo.convert("L"), "cmyk.jpg": photo.convert("CMYK"), "palette.png": photo.quantize(32), "deep.png": deep,
             "turned.jpg": photo, "bits.png": photo.convert("1")}
    for name, picture in kinds.items():
        picture.save(tmp_path/name, **({"exif": turned} if name == "turned.jpg" else {}))
        crop = Pictures([tmp_path/name], crop=crop_box, boxes=[box])[0]
        assert crop.mode == "RGB" and crop.size == (80, 80), name                            # 46 to 80 and 0 to 80 is 34 x 80
        columns = np.asarray(crop).astype(int).sum((0, 2))
        assert not columns[:23].any() and not columns[57:].any() and columns[23:57].all(), name
        assert same(crop, pad_square(read_picture(tmp_path/name).crop((46, 0, 80, 80))))
        if name == "grey.jpg": assert same(crop, literal_crop(tmp_path/name, box[:4]))


@pytest.mark.parametrize("box", [(130, 10, 10, 10), (10, 200, 10, 10), (-40, 10, 10, 10)])
def test_a_box_outside_its_picture(box):
    if box[0] < 0: assert crop_box(noise(), Box(*box)).size == (17, 17); return               # clamped to 0, as the official code does
    with pytest.raises(ValueError, match="leaves no pixel of a picture of 120 x 80"): crop_box(noise(), Box(*box))


# ---- a tree with pictures

def write_tree(root):
    "Four tasks of two queries; attribute pictures in two folders."
    def box(i): return {"image_id": str(2000 + i), "instance_bbox": [10 + i, 20.5, 30, 15]}
    def whole(i): return {"val_image_id": 40 + i}
    for folder in ("genecis", "VG_100K", "VG_100K_2", "val2017"): (root/folder).mkdir(parents=True)
    for task in TASKS:
        form = box if task in ATTRIBUTE else whole
        rows = [dict(condition="color", reference=form(r), target=form(t), gallery=[form(g) for g in others])
                for r, t, others in ((0, 1, [2, 3]), (4, 5, [3, 0]))]
        (root/"genecis"/f"{task}.json").write_text(json.dumps(rows), encoding="utf-8")
    for i in range(6):
        noise().save(root/("VG_100K", "VG_100K_2")[i % 2]/f"{2000 + i}.jpg"); noise().save(root/"val2017"/f"{40 + i:012d}.jpg")
    return root


def test_missing_and_broken_pictures(tmp_path):
    write_tree(tmp_path)
    assert load_genecis(tmp_path).missing == {} and load_genecis(tmp_path).data == "unofficial"
    (tmp_path/"VG_100K_2"/"2003.jpg").unlink(); (tmp_path/"VG_100K_2"/"2005.jpg").write_bytes(b"")
    cut = tmp_path/"val2017"/f"{41:012d}.jpg"; cut.write_bytes(cut.read_bytes()[:500])
    words = r"2 of 12 pictures are missing or have 0 bytes, first 2003:13,20.5,30,15, 2005:.*Missing: 2 of 6 files of Visual Genome"
    with pytest.raises(FileNotFoundError, match=words): load_genecis(tmp_path)
    assert load_genecis(tmp_path, tasks=OBJECT).missing == {}                                # unused pictures are not asked for
    left = load_genecis(tmp_path, allow_missing=True)
    assert {k: left.missing[k] for k in ("queries", "gallery")} == {"queries": [4, 8], "gallery": [7, 10]} and left.missing["whole"][1] == 4 and left.data == "unofficial"
    crops, photos = ["2001", "2002"], [f"{i:012d}" for i in (45, 43, 40)]
    assert {q.id: [left.ids[j].split(":")[0] for j in left.galleries[q.gallery]] for q in left.queries} == {
        "focus_attribute 0": crops, "change_attribute 0": crops, "focus_object 1": photos, "change_object 1": photos}
    assert {p.size for p in left.images} == {(120, 80), (51, 51)}


def test_both_trees_and_splits(tmp_path):
    write_tree(tmp_path/"toy"/"val"); write_tree(tmp_path/"toy"/"test"); write_tree(tmp_path/"one")
    (tmp_path/"one"/"VG_100K").rename(tmp_path/"one"/"VG_100K_all")
    for p in (tmp_path/"one"/"VG_100K_2").iterdir(): p.rename(tmp_path/"one"/"VG_100K_all"/p.name)
    (tmp_path/"one"/"coco2017").mkdir(); (tmp_path/"one"/"val2017").rename(tmp_path/"one"/"coco2017"/"val2017")
    one, toy = load_genecis(tmp_path/"one"), load_genecis(tmp_path/"toy", "val")
    assert (one.split, toy.split, one.ids, one.missing) == ("test", "val", toy.ids, {}) and load_genecis(tmp_path/"toy").split == "test"
    with pytest.raises(ValueError, match="GeneCIS has one split, 'test'"): load_genecis(tmp_path/"one", "val")
    with pytest.raises(FileNotFoundError, match="no genecis/focus_attribute.json"): load_genecis(tmp_path)
    with pytest.raises(ValueError, match="unknown split 'eval'"): load_genecis(tmp_path/"one", "eval")


def test_options_are_part_of_the_benchmark(tmp_path):
    write_tree(tmp_path)
    plain = load_genecis(tmp_path)
    other = load_genecis(tmp_path, crop="symmetric", condition="a photo with {condition}", preprocess="targetpad")
    assert {q.text for q in plain.queries} == {"color"} and {q.text for q in other.queries} == {"a photo with color"}
    assert not same(plain.images[0], other.images[0]) and plain.images.manifest() != other.images.manifest()
    chosen = {"crop": "symmetric", "condition": "a photo with {condition}", "preprocess": "targetpad", "variant": "condition, crop, preprocess"}
    assert {k: other.protocol[k] for k in chosen} == chosen and plain.protocol["variant"] == "official"
    i = plain.ids.index("000000000040")
    assert plain.images[i].size == (120, 80) and other.images[i].size == (120, 96)            # object tasks: no padding, unless it is asked for


DAMAGE = {"condition": ({"condition": 3}, "record 1: condition is 3"), "gallery": ({"gallery": {}}, "record 1: gallery is"),
          "target": ({"target": {"val_image_id": 3}}, "record 1: found .*expected an object with image_id and instance_bbox"),
          "box": ({"target": {"image_id": "1", "instance_bbox": [1, 2, 0, 5]}}, r"record 1: instance_bbox \[1, 2, 0, 5\] has no area"),
          "short gallery": ({"gallery": [{"image_id": "1", "instance_bbox": [1, 2, 3, 5]}]}, "record 1: gallery of 1, expected 2")}


@pytest.mark.parametrize("change,words", DAMAGE.values(), ids=DAMAGE)
def test_damaged_annotations(tmp_path, change, words):
    write_tree(tmp_path); file = tmp_path/"genecis"/"change_attribute.json"; good = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps([good[0], good[1] | change]), encoding="utf-8")
    with pytest.raises(ValueError, match=f"change_attribute.json, {words}"): load_genecis(tmp_path)


def test_a_record_without_a_target(tmp_path):
    write_tree(tmp_path); file = tmp_path/"genecis"/"change_attribute.json"; good = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps([good[0], {k: v for k, v in good[1].items() if k != "target"}]), encoding="utf-8")
    words = "record 1: no target; expected an object with condition, reference, target, gallery"
    with pytest.raises(ValueError, match=words): load_genecis(tmp_path)
