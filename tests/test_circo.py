"""CIRCO: the real annotation files, the authors' example submissions, and a gallery of full size without its pictures."""
import json, threading
from dataclasses import replace
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from foco.data.benchmark import write_submission
from foco.data.cards import load_card
from foco.data.circo import GALLERY_LIST, check_circo_submission, load_circo, score_circo_submission
from foco.data.metrics import kind_groups, query_values, rank_lists, rank_targets
from official import OFFICIAL

REAL = OFFICIAL/"circo"
needs_files = pytest.mark.skipif(not (REAL/"annotations").is_dir(), reason="CIRCO's annotation files are not here")
GALLERY = 123_403


def read(path): return json.loads(path.read_text(encoding="utf-8"))
def annotations(split): return read(REAL/"annotations"/f"{split}.json")
def example(split): return read(REAL/"submission_examples"/f"submission_{split}.json")


def write_tree(root, val, test, ids):
    "Write annotations and a list of pictures in the official tree."
    (root/"annotations").mkdir(parents=True); (root/GALLERY_LIST).parent.mkdir(parents=True)
    for name, content in (("val", val), ("test", test)):
        (root/"annotations"/f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    listed = [{"id": i, "file_name": f"{int(i):012d}.jpg"} for i in ids]
    (root/GALLERY_LIST).write_text(json.dumps({"images": listed}), encoding="utf-8")
    return root


def named():
    "The ids of all pictures that the annotations and the example submissions name."
    found = {i for s in ("val", "test") for r in annotations(s) for i in (r["reference_img_id"], *r.get("gt_img_ids", ()))}
    return sorted(found | {i for s in ("val", "test") for listed in example(s).values() for i in listed})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "The real annotations and a list of 123,403 pictures that holds all they name, since COCO's own list is not here."
    texts, ids = [(REAL/"annotations"/f"{s}.json").read_text(encoding="utf-8") for s in ("val", "test")], named()
    return write_tree(tmp_path_factory.mktemp("circo"), *texts, ids + list(range(1_000_000, 1_000_000 + GALLERY - len(ids))))


@pytest.fixture(scope="module")
def val(root): return load_circo(root, pictures=False)
@pytest.fixture(scope="module")
def test(root): return load_circo(root, "test", pictures=False)


# ---- the real files

@needs_files
def test_counts(val, test):
    n = np.array([len(q.targets) for q in val.queries])
    assert (len(val.queries), len(test.queries), len(val.ids), len(test.ids)) == (220, 800, GALLERY, GALLERY)
    assert (n.min(), n.max(), round(n.mean(), 3)) == (1, 14, 4.164)
    assert ((n < 5).sum(), (n > 5).sum(), (n > 10).sum()) == (148, 57, 9)
    assert [q.id for q in val.queries] == [str(i) for i in range(220)]
    assert [q.id for q in test.queries] == [str(i) for i in range(800)]
    assert test.hidden and not val.hidden and all(q.targets is None and q.weights is None for q in test.queries)
    assert not val.exclude_reference and not test.exclude_reference and val.gallery_sha256 == test.gallery_sha256
    assert {q.kinds for q in test.queries} == {("all",)}


@needs_files
def test_aspects(val):
    assert {k: len(g) for k, g in kind_groups(val).items()} == {
        "cardinality": 37, "addition": 80, "negation": 21, "direct_addressing": 119, "compare_change": 86, "comparative_statement": 50,
        "statement_with_conjunction": 164, "spatial_relations_background": 100, "viewpoint": 54} == load_card("circo").counts["aspects"]


@needs_files
def test_queries_are_the_records(val, test):
    for benchmark in (val, test):
        for q, r in zip(benchmark.queries, annotations(benchmark.split), strict=True):
            assert benchmark.ids[q.reference] == str(r["reference_img_id"]) and q.text == r["relative_caption"] and "$" not in q.text
            if "gt_img_ids" not in r: continue
            assert [benchmark.ids[t] for t in q.targets] == [str(i) for i in r["gt_img_ids"]]
            assert r["target_img_id"] == r["gt_img_ids"][0]
            assert q.weights == (1.,) + (0.,) * (len(q.targets) - 1) and q.reference not in q.targets


@needs_files
def test_text_and_protocol(root, val):
    both = load_circo(root, text="with_shared_concept", pictures=False)
    assert both.queries[0].text == "a girl with a traditional Chinese umbrella but shows two people and has a more colorful background"
    assert both.protocol["template"] == "{shared_concept} but {relative_caption}" and val.protocol["template"] == "{relative_caption}"
    assert both.queries_sha256 != val.queries_sha256 and json.loads(json.dumps(val.protocol)) == val.protocol
    assert val.protocol["gallery list"] == "123,403 pictures, not checksummed"
    assert (val.protocol["variant"], both.protocol["variant"]) == ("official", "text")
    assert load_circo(root, preprocess="targetpad", pictures=False).protocol["variant"] == "preprocess"
    assert val.metrics == ("mAP@5", "mAP@10", "mAP@25", "mAP@50", "R@5", "R@10", "R@25", "R@50")


@needs_files
def test_official_or_not(root, val, test, tmp_path):
    assert (val.data, test.data) == ("official", "official")
    text = (root/"annotations"/"val.json").read_text(encoding="utf-8")
    assert load_circo(write_tree(tmp_path/"fewer", text, "[]", named()), pictures=False).data == "unofficial"
    (tmp_path/"annotations").mkdir(); (tmp_path/"annotations"/"val.json").write_text(text + "\n", encoding="utf-8")
    (tmp_path/Path(GALLERY_LIST).name).write_bytes((root/GALLERY_LIST).read_bytes())
    assert load_circo(tmp_path, pictures=False).data == "unofficial"                          # one byte more


@needs_files
def test_ids_as_text_are_the_same_benchmark(val, tmp_path):
    def as_text(k, v):
        if k.endswith("img_id"): return f"{v:012d}"
        return [str(x) for x in v] if k == "gt_img_ids" else str(v) if k == "id" else v
    records = [{k: as_text(k, v) for k, v in r.items()} for r in annotations("val")]
    same = load_circo(write_tree(tmp_path, records, [], [f"{i:012d}" for i in named()]), pictures=False)
    assert (same.queries_sha256, same.ids, same.data) == (val.queries_sha256, val.ids[:len(same.ids)], "unofficial")


# ---- scores of lists

# the authors' example list, scored by a separate implementation of their formulas
GOLDEN = {"mAP@5": .486111, "mAP@10": .517767, "mAP@25": .540035, "mAP@50": .602039,
          "R@5": .909091, "R@10": .909091, "R@25": 1.363636, "R@50": 3.636364}
GOLDEN_ASPECTS = {"cardinality": 0, "addition": .0871, "negation": 0, "direct_addressing": .9197, "compare_change": .0242,
                  "comparative_statement": 1.05, "statement_with_conjunction": .6183, "spatial_relations_background": .1808,
                  "viewpoint": .6173}


@needs_files
def test_golden_values(val):
    found = score_circo_submission(example("val"), val)
    assert {m: round(found[m], 6) for m in GOLDEN} == GOLDEN
    assert {a: round(found[f"semantic mAP@10 {a}"], 4) for a in GOLDEN_ASPECTS} == GOLDEN_ASPECTS
    assert len(found) == len(GOLDEN) + len(GOLDEN_ASPECTS)
    own = [q.id for q in val.queries if int(val.ids[q.reference]) in example("val")[q.id]]
    assert len(own) == 1                                                                     # the reference may stand in its own list


def literal_scores(payload, records):
    "The authors' formulas on ids, one query at a time."
    values = {}
    for r in records:
        listed, right = payload[str(r["id"])], set(r["gt_img_ids"])
        def precision(i): return sum(x in right for x in listed[:i]) / i
        def ap(k): return sum(precision(i) for i in range(1, k + 1) if listed[i - 1] in right) / min(len(right), k)
        for k in (5, 10, 25, 50):
            values.setdefault(f"mAP@{k}", []).append(ap(k))
            values.setdefault(f"R@{k}", []).append(r["target_img_id"] in listed[:k])
        for a in r["semantic_aspects"]: values.setdefault(f"semantic mAP@10 {a}", []).append(ap(10))
    return {name: 100 * np.mean(v) for name, v in values.items()}


@needs_files
def test_ids_as_text_score_the_same(val):
    "SEARLE, LinCIR and CIReVL write text; the official script casts to numbers."
    for form in (str, "{:012d}".format):
        assert score_circo_submission({q: [form(i) for i in listed] for q, listed in example("val").items()}, val) == \
            score_circo_submission(example("val"), val)


@needs_files
def test_scores_against_the_formulas(val):
    rng, records = np.random.default_rng(0), annotations("val")
    payload = {}
    for r in records:                                                                        # half of the right answers, somewhere among wrong ones
        some = [i for i in r["gt_img_ids"] if rng.random() < .5]
        wrong = [int(i) for i in val.ids[-60:]][:50 - len(some)]
        payload[str(r["id"])] = [int(i) for i in rng.permutation([*some, *wrong])]
    assert score_circo_submission(payload, val) == pytest.approx(literal_scores(payload, records), abs=1e-9)


@needs_files
def test_both_sides_of_the_denominator(val):
    others = [int(i) for i in val.ids[-50:]]
    perfect = {q.id: [int(val.ids[t]) for t in q.targets] + others[len(q.targets):] for q in val.queries}
    assert all(v == pytest.approx(100) for v in score_circo_submission(perfect, val).values())
    def with_(n): return replace(val, queries=[next(q for q in val.queries if len(q.targets) == n)])
    single = {"alone": with_(1), "many": with_(14)}
    def mAP(which, places, k=5): # right answers at these places
        q, listed = single[which].queries[0], list(others)
        for place, t in zip(places, q.targets): listed[place - 1] = int(val.ids[t])
        return score_circo_submission({q.id: listed}, single[which])[f"mAP@{k}"] / 100
    assert mAP("alone", [1]) == 1 and mAP("alone", [4]) == .25 and mAP("alone", [6]) == 0    # one right answer: not 1/5
    assert mAP("many", [1, 2, 3, 4, 5]) == 1
    assert mAP("many", [1]) == pytest.approx(1 / 5) and mAP("many", [1], 25) == pytest.approx(1 / 14)


@needs_files
def test_a_right_answer_that_is_not_the_target_counts_for_map_alone(val):
    q = next(q for q in val.queries if len(q.targets) == 3); one = replace(val, queries=[q])
    listed = [int(val.ids[t]) for t in q.targets[1:]] + [int(i) for i in val.ids[-48:]]
    found = score_circo_submission({q.id: listed}, one)
    assert found["R@50"] == 0 and found["mAP@5"] == pytest.approx(200 / 3)


# ---- submissions

@needs_files
def test_example_submissions_pass(val, test):
    check_circo_submission(example("val"), val); check_circo_submission(example("test"), test)


def first(to): return lambda p: p["5"].__setitem__(0, to(p["5"][0]))  # changes an id of query 5
BAD = {
    "duplicate": (lambda p: p["7"].__setitem__(3, p["7"][0]), "query 7: '.*' stands twice"),
    "duplicate in another form": (lambda p: p["7"].__setitem__(3, f"{p['7'][0]:012d}"), "query 7: '.*' stands twice"),
    "query missing": (lambda p: p.pop("799"), "1 of 800 queries are missing, first '799'"),
    "extra query": (lambda p: p.__setitem__("800", p["0"]), "1 keys are no query of test, first '800'"),
    "padded key": (lambda p: p.__setitem__("007", p.pop("7")), "1 of 800 queries are missing, first '7'"),
    "49": (lambda p: p["0"].pop(), "query 0: 49 ids, expected 50"),
    "51": (lambda p: p["0"].append(1_000_000), "query 0: 51 ids, expected 50"),
    "empty": (lambda p: p["0"].clear(), "query 0: 0 ids"),
    "outside": (first(lambda _: 999_999_999), "query 5: '999999999' is not in the gallery"),
    "negative": (first(lambda _: -1), "query 5: picture id -1, expected a whole number"),
    "words": (first(lambda _: "dog"), "query 5: picture id 'dog', expected a whole number"),
    "file name": (first(lambda x: f"{x:012d}.jpg"), "query 5: picture id '.*jpg', expected a whole number"),
    "fraction": (first(float), "expected a whole number"),
    "true": (first(lambda _: True), "picture id True, expected a whole number"),
    "null": (first(lambda _: None), "picture id None, expected a whole number"),
    "object": (lambda p: p.__setitem__("5", {"a": 1}), "query 5: found .*expected a list of 50 ids"),
}


@needs_files
@pytest.mark.parametrize("spoil,words", BAD.values(), ids=BAD)
def test_corrupt_submissions_fail(test, spoil, words):
    payload = example("test"); spoil(payload)
    with pytest.raises(ValueError, match=words): check_circo_submission(payload, test)


@needs_files
def test_hidden_labels_lead_to_the_submission(test):
    with pytest.raises(ValueError, match="labels are hidden.*submission file"):
        rank_targets(torch.zeros(800, 2), torch.zeros(GALLERY, 2), test)
    with pytest.raises(ValueError, match="labels are hidden; send the submission file"): score_circo_submission(example("test"), test)


# ---- a gallery of full size

class Largest(TorchDispatchMode):
    "Remember the most elements that a result of a torch operation had."
    elements = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor): self.elements = max(self.elements, t.numel())
        return out


class PeakMemory:
    "Measure how much the process grows, by looking every two milliseconds."
    def now(self): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    def watch(self):
        while not self.done.wait(.002): self.top = max(self.top, self.now())
    def __enter__(self):
        self.start = self.top = self.now(); self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch); self.thread.start()
        return self
    def __exit__(self, *_): self.done.set(); self.thread.join(); self.mib = (self.top - self.start) / 2**20


def features(benchmark, D=8):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.functional.normalize(torch.randn(n, D, generator=g), dim=-1) for n in (len(benchmark.queries), len(benchmark.ids))]


@needs_files
def test_ranking_never_holds_the_full_matrix(test, tmp_path):
    "800 x 123,403 similarities would be 377 MiB."
    composed, gallery = features(test)
    with Largest() as largest: lists = rank_lists(composed, gallery, test)
    assert largest.elements < 800 * GALLERY / 10
    path, = write_submission(test, lists, tmp_path)
    payload = read(path)
    check_circo_submission(payload, test)
    assert path.name == "circo_test.json" and all(type(i) is int for listed in payload.values() for i in listed)
    assert payload["3"][0] == int(test.ids[int((gallery @ composed[3]).argmax())])
    assert list(tmp_path.iterdir()) == [path]


@needs_files
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_memory_of_ranking(test):
    composed, gallery = features(test)
    rank_lists(composed[:8], gallery, replace(test, queries=test.queries[:8]))                # what torch sets up once
    with PeakMemory() as peak: rank_lists(composed, gallery, test)
    assert peak.mib < 250


@needs_files
def test_random_and_constant_features_score_nothing(val):
    few = replace(val, queries=val.queries[:60])
    values = query_values(few, rank_targets(*features(few), few))
    assert values["R@50"].sum() <= 1 and values["mAP@50"].mean() < .01
    flat = rank_targets(torch.ones(60, 2), torch.ones(GALLERY, 2), few)
    assert all(v.sum() == 0 for v in query_values(few, flat).values())
    assert all((r > GALLERY - len(q.targets)).all() for r, q in zip(flat.gallery, few.queries))


# ---- pictures

def small_tree(root):
    "Ten pictures of all kinds, some of them no pictures; four queries."
    def record(i, reference, right):
        return dict(id=i, reference_img_id=reference, relative_caption="x", shared_concept="y", target_img_id=right[0], gt_img_ids=right,
                    semantic_aspects=["addition"])
    val = [record(0, 1, [2, 3]), record(1, 2, [9]), record(2, 10, [1]), record(3, 4, [8, 5])]
    write_tree(root, val, [{k: r[k] for k in ("id", "reference_img_id", "relative_caption")} for r in val], range(1, 11))
    folder = root/"COCO2017_unlabeled"/"unlabeled2017"; folder.mkdir()
    photo = Image.fromarray((np.add.outer(np.arange(24) * 5, np.arange(32) * 4)[:, :, None] % 256 * [1, .5, .2]).astype(np.uint8))
    turned = Image.Exif(); turned[274] = 6
    def file(i, suffix=".jpg"): return folder/f"{i:012d}{suffix}"
    photo.save(file(1))
    photo.convert("CMYK").save(file(2, ".JPG"), "JPEG")
    photo.quantize(16).save(file(3, ".png"))
    photo.save(file(4, ".jpeg"), exif=turned)
    photo.convert("L").save(file(5))
    Image.fromarray((np.arange(24 * 32).reshape(24, 32) * 85).astype(np.uint16)).save(file(6, ".png"))
    photo.save(file(7))
    file(8).touch(); file(9).write_text("<!DOCTYPE html>", encoding="utf-8"); file(10).write_bytes(file(1).read_bytes()[:400])
    return root


def test_pictures_missing_and_broken(tmp_path):
    small_tree(tmp_path)
    words = r"CIRCO val: 1 of 10 pictures are missing or have 0 bytes, first 8\. What to do"
    with pytest.raises(FileNotFoundError, match=words): load_circo(tmp_path)
    left = load_circo(tmp_path, allow_missing=True)
    assert {k: left.missing[k] for k in ("queries", "gallery")} == {"queries": [2, 4], "gallery": [7, 10]} and left.ids == [str(i) for i in range(1, 8)]
    found = [(q.id, q.targets, q.weights) for q in left.queries]
    assert found == [("0", (1, 2), (1., 0.)), ("3", (4,), (0.,))]                            # 8, a target, is gone; 5 is still right for mAP@K
    assert {p.mode for p in left.images} == {"RGB"} and {p.size for p in left.images} == {(32, 24)}
    assert load_circo(tmp_path, "test", allow_missing=True).missing["queries"] == [3, 4]      # without labels a query needs its reference only
    with pytest.raises(ValueError, match="2 of 4 queries and 7 of 10 gallery pictures are here"): check_circo_submission({}, left)


def test_two_different_files_for_one_picture(tmp_path):
    small_tree(tmp_path)
    Image.new("RGB", (5, 5)).save(tmp_path/"COCO2017_unlabeled"/"unlabeled2017"/f"{1:012d}.png")
    with pytest.raises(ValueError, match="two different files for picture '000000000001'"): load_circo(tmp_path, allow_missing=True)


def test_no_root_and_no_list(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"): load_circo(tmp_path/"nowhere")
    small_tree(tmp_path); (tmp_path/GALLERY_LIST).unlink()
    with pytest.raises(FileNotFoundError, match="image_info_unlabeled2017.json"): load_circo(tmp_path)
