"""One generated tree of all four benchmarks, damaged in every way; what foco_check_data says about it, and what the loaders do."""
import json, os, re, shutil, subprocess, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from foco.data.cards import load_card
from foco.data.check import _READ, Report, _files, check_data, check_quickly, main
from foco.data.circo import GALLERY_LIST, load_circo
from foco.data.cirr import load_cirr
from foco.data.fashioniq import load_fashioniq
from foco.data.genecis import load_genecis
from foco.data.pictures import check_picture, choose_file, find_pictures
from official import OFFICIAL

real = pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the official annotation files are not here")
SIZE = (56, 40)
PHOTO = Image.fromarray((np.kron(np.random.default_rng(0).integers(30, 220, (5, 7, 3)), np.ones((8, 8, 1)))).astype(np.uint8))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def draw(path, hue):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.roll(np.asarray(PHOTO), hue, axis=(0, 1))).save(path)


def fashioniq(root):
    for c in ("dress", "shirt", "toptee"):
        names = [f"{c[0].upper()}{i}" for i in range(4)]
        for split in ("val", "test"):
            record = {"candidate": names[0], "captions": ["is darker", "is plain"]} | ({"target": names[1]} if split == "val" else {})
            write(root/"captions"/f"cap.{c}.{split}.json", [record]); write(root/"image_splits"/f"split.{c}.{split}.json", names)
        for i, name in enumerate(names): draw(root/"images"/f"{name}.jpg", i)


def cirr(root):
    for split, folder in (("val", "dev"), ("test1", "test1")):
        names = [f"{folder}-0-{k}-img0" for k in range(8)]
        record = {"pairid": 7, "reference": names[0], "caption": "is darker", "img_set": {"id": 0, "members": names[:6]}}
        labels = {"target_hard": names[1], "target_soft": {names[1]: 1.}} if split == "val" else {}
        write(root/"cirr"/"captions"/f"cap.rc2.{split}.json", [record | labels])
        write(root/"cirr"/"image_splits"/f"split.rc2.{split}.json", {n: f"./{folder}/{n}.png" for n in names})
        for i, name in enumerate(names): draw(root/folder/f"{name}.png", i)


def write_gallery(root, ids):
    write(root/GALLERY_LIST, {"images": [{"id": i, "file_name": f"{i:012d}.jpg"} for i in ids]})


def circo(root):
    record = {"reference_img_id": 1, "relative_caption": "is darker", "shared_concept": "a wall", "id": 0}
    write(root/"annotations"/"val.json", [record | {"target_img_id": 2, "gt_img_ids": [2, 3], "semantic_aspects": ["addition"]}])
    write(root/"annotations"/"test.json", [record])
    write_gallery(root, range(1, 9))
    for i in range(1, 9): draw(root/"COCO2017_unlabeled"/"unlabeled2017"/f"{i:012d}.jpg", i)


def genecis(root):
    def crop(i): return {"image_id": str(i), "instance_bbox": [10, 8, 20, 20.5]}
    def whole(i): return {"val_image_id": i}
    for task, form in (("focus_attribute", crop), ("change_attribute", crop), ("focus_object", whole), ("change_object", whole)):
        gallery = [form(3), form(4 if task == "focus_object" else 5)]
        write(root/"genecis"/f"{task}.json", [{"condition": "color", "reference": form(1), "target": form(2), "gallery": gallery}])
    for i in range(1, 6): draw(root/("VG_100K", "VG_100K_2")[i % 2]/f"{i}.jpg", i); draw(root/"coco2017"/"val2017"/f"{i:012d}.jpg", i)


# benchmark -> writer, loader, split of the loader, split of the check; a picture that is only a wrong answer: its path and id;
# a target's path; queries and pictures
SETS = {
    "fashioniq": (fashioniq, load_fashioniq, "val", "val", "images/D3.jpg", "D3", "images/D1.jpg", 3, 12),
    "cirr": (cirr, load_cirr, "val", "val", "dev/dev-0-7-img0.png", "dev-0-7-img0", "dev/dev-0-1-img0.png", 1, 8),
    "circo": (circo, load_circo, "val", "val", "COCO2017_unlabeled/unlabeled2017/000000000008.jpg", "8", None, 1, 8),
    "genecis": (genecis, load_genecis, "test", "focus_object", "coco2017/val2017/000000000004.jpg", "000000000004",
                "coco2017/val2017/000000000002.jpg", 4, 9),
}
BROKEN = {
    "missing": (lambda p: p.unlink(), "missing"),
    "0 bytes": (lambda p: p.write_bytes(b""), "0 bytes"),
    "HTML": (lambda p: p.write_text("<!DOCTYPE html>\n<html>404</html>", encoding="utf-8"), "an HTML page, not a picture"),
    "truncated": (lambda p: (PHOTO.save(p, "JPEG"), p.write_bytes(p.read_bytes()[:-40])), "truncated"),
    "truncated PNG": (lambda p: (PHOTO.save(p, "PNG"), p.write_bytes(p.read_bytes()[:-40])), "truncated"),
    "text": (lambda p: p.write_text("not found", encoding="utf-8"), "not a readable picture (9 bytes)"),
}
ramp = (np.arange(SIZE[0] * SIZE[1]).reshape(SIZE[::-1]) * 29).astype(np.uint16)
turned = Image.Exif(); turned[274] = 6 # "rotate by 90 degrees to view"
GOOD = { # how it is stored; the pixels that the official code sees, and how far off compression may be
    "palette": (lambda p: PHOTO.quantize(200).save(p, "PNG"), PHOTO, 6),
    "CMYK": (lambda p: PHOTO.convert("CMYK").save(p, "JPEG", quality=95), PHOTO, 6),
    "16-bit": (lambda p: Image.fromarray(ramp).save(p, "PNG"), Image.fromarray((ramp / 257).round().astype(np.uint8)).convert("RGB"), 0),
    "EXIF-rotated": (lambda p: PHOTO.save(p, "JPEG", exif=turned, quality=95), PHOTO, 6),
    "grey": (lambda p: PHOTO.convert("L").save(p, "JPEG", quality=95), PHOTO.convert("L").convert("RGB"), 6),
    "JPEG or PNG under the other name": (lambda p: PHOTO.save(p, "PNG" if p.suffix == ".jpg" else "JPEG"), PHOTO, 8),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    base = tmp_path_factory.mktemp("originals")
    for name, (writer, *_) in SETS.items(): writer(base/name)
    return base


@pytest.fixture
def root(originals, tmp_path, request):
    "A fresh copy of one benchmark; equal pictures are hard links, which `damage` breaks up."
    return Path(shutil.copytree(originals/request.param, tmp_path/request.param, copy_function=os.link))


def damage(path, how):
    content = path.read_bytes(); path.unlink(); path.write_bytes(content); how(path)


def split_of(report, name): return next(s for s in report.splits if s.name == name)


each = pytest.mark.parametrize("root", SETS, indirect=True)


@each
def test_whole_trees_are_complete(root):
    _, load, split, *_, n_queries, n_pictures = SETS[root.name]
    report = check_data(root.name, root, unofficial=True)
    assert report.complete and not check_data(root.name, root).complete and "0 missing" not in str(report)
    assert "expected" in check_data(root.name, root).table() and "expected" not in report.table() and "different" not in str(report)
    b = load(root, split)
    assert (len(b.queries), len(b.ids), b.missing, b.data) == (n_queries, n_pictures, {}, "unofficial")
    assert all(b.images[i].mode == "RGB" for i in range(len(b.ids)))


@each
@pytest.mark.parametrize("kind", ["whole", "missing", "0 bytes", "copy", "conflict"])
def test_the_search_is_that_of_the_loaders(root, kind):
    "`find_pictures` stops at the first conflict; the check goes on. They find the same files."
    _, _, _, part, path, *_ = SETS[root.name]
    copy = (root/path).parent/"zz"/(Path(path).stem + ".jpeg")
    if kind in BROKEN: damage(root/path, BROKEN[kind][0])
    if kind in ("copy", "conflict"): copy.parent.mkdir(); copy.write_bytes((root/path).read_bytes() + b"?" * (kind == "conflict"))
    wanted = _READ[root.name](load_card(root.name), root, part)
    chosen = {name: choose_file(files) for name, files in _files(wanted._replace(places=dict.fromkeys(wanted.places, "")), root).items()}
    if kind == "conflict":
        assert [n for n, (_, why) in chosen.items() if why] == [copy.stem]
        with pytest.raises(ValueError, match="two different files"): find_pictures(wanted.folders, wanted.places)
        return
    found, missing = find_pictures(wanted.folders, wanted.places)
    assert {n: p for n, (p, _) in chosen.items() if p} == found and sorted(n for n, (_, why) in chosen.items() if why) == missing


@each
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_pictures(root, kind):
    _, load, split, part, path, id_, _, n_queries, n_pictures = SETS[root.name]
    how, words = BROKEN[kind]
    path = root/path
    damage(path, how)
    report = check_data(root.name, root, unofficial=True)
    found = split_of(report, part)
    assert not report.complete and found.here == len(found.needed) - 1
    if kind == "missing": assert found.missing == (path.stem,) and not found.broken
    else: assert list(found.broken) == [path.stem] and words in found.broken[path.stem] and not found.missing
    assert path.stem in str(report) and "What to do" in str(report) and (kind != "missing" or f"looked below {root}" in str(report))
    assert check_data(root.name, root, open_pictures=False, unofficial=True).complete == (kind not in ("missing", "0 bytes"))
    if kind in ("missing", "0 bytes"):                                      # refused at once
        with pytest.raises(FileNotFoundError, match="1 of"): load(root, split)
    else:                                                                   # refused where it is read, by name
        b = load(root, split)
        with pytest.raises(OSError, match=re.escape(path.name)): b.images[b.ids.index(id_)]
    b = load(root, split, allow_missing=True)
    assert {k: n for k, n in b.missing.items() if k != "whole"} == {"queries": [n_queries, n_queries], "gallery": [n_pictures - 1 - len(refs(b, root)), n_pictures - len(refs(b, root))]}
    assert id_ not in b.ids and b.data == "unofficial" and all(b.images[i].mode == "RGB" for i in range(len(b.ids)))


def refs(b, root): # references that stand in no gallery of GeneCIS
    return set(range(len(b.ids))) - {j for g in b.galleries for j in g.tolist()} if root.name == "genecis" else set()


@each
@pytest.mark.parametrize("kind", GOOD)
def test_unusual_pictures_are_fine(root, kind):
    _, load, split, _, path, id_, _, n_queries, n_pictures = SETS[root.name]
    how, expected, off = GOOD[kind]
    damage(root/path, how)
    assert check_data(root.name, root, unofficial=True).complete
    b = load(root, split, allow_missing=True)
    seen = b.images[b.ids.index(id_)]
    assert b.missing == {} and len(b.ids) == n_pictures and len(b.queries) == n_queries and seen.size == SIZE and seen.mode == "RGB"
    assert np.abs(np.asarray(seen).astype(int) - np.asarray(expected).astype(int)).mean() <= off


@pytest.mark.parametrize("root", [n for n, s in SETS.items() if s[6]], indirect=True)
def test_a_kind_whose_only_query_is_gone_is_refused(root):
    "The query itself is left out; what is left then is another benchmark."
    _, load, split, part, _, _, target, n_queries, _ = SETS[root.name]
    damage(root/target, BROKEN["truncated"][0])
    assert list(split_of(check_data(root.name, root, unofficial=True), part).broken) == [Path(target).stem]
    words = "no query can be asked without them" if root.name == "cirr" else "no query of (dress|focus_|change_).* is left"
    with pytest.raises((ValueError, FileNotFoundError), match=words): load(root, split, allow_missing=True)


@pytest.mark.parametrize("root", ["circo"], indirect=True)
def test_a_query_with_another_target_stays(root):
    damage(root/"COCO2017_unlabeled"/"unlabeled2017"/"000000000003.jpg", BROKEN["HTML"][0])
    b = load_circo(root, allow_missing=True)
    assert b.missing == {"queries": [1, 1], "gallery": [7, 8], "whole": [0, 1]} and len(b.queries[0].targets) == 1


@each
def test_two_different_files_for_one_picture(root):
    _, load, split, part, path, *_ = SETS[root.name]
    copy = (root/path).parent/"again"/(Path(path).stem + ".jpeg")
    copy.parent.mkdir(); shutil.copy(root/path, copy)
    assert check_data(root.name, root, unofficial=True).complete and load(root, split)      # an equal copy is harmless
    copy.unlink(); copy.write_bytes((root/path).read_bytes()[:-1] + b"?")                  # as long and as old, and yet different
    os.utime(copy, ns=((root/path).stat().st_mtime_ns,) * 2)
    if root.name == "cirr": # its split file says which one is meant; in another tree nobody knows
        assert check_data(root.name, root, unofficial=True).complete and load(root, split)
        moved = root/"img_raw"; (root/"dev").rename(moved)
    found = split_of(check_data(root.name, root, unofficial=True), part)
    assert list(found.twice) == [Path(path).stem] and found.twice[Path(path).stem].count(Path(path).stem) == 2
    with pytest.raises(ValueError, match="two different files"): load(root, split)


@each
def test_pictures_that_no_split_asks_for_do_not_count(root):
    path = root/SETS[root.name][4]
    for kind in ("0 bytes", "HTML", "truncated"): p = path.with_name(f"unused-{len(kind)}.jpg"); p.touch(); BROKEN[kind][0](p)
    (path.parent/"link.jpg").symlink_to("nowhere"); (path.parent/"folder.jpg").mkdir()
    assert check_data(root.name, root, unofficial=True).complete


@each
def test_wrong_roots_are_recognised(root, tmp_path):
    inside = next(p for p in sorted(root.iterdir()) if p.is_dir())
    for wrong in (root.parent, inside):
        report = check_data(root.name, wrong, unofficial=True)
        assert not report.complete and report.better_root == str(root) and f"Pass --root {root}" in str(report)
    assert check_data(root.name, root).better_root == ""


@each
def test_annotations_that_are_absent_or_make_no_sense(root):
    card, part = load_card(root.name), SETS[root.name][3]
    path = root/next(iter(p for p in card.annotations if f"{part}.json" in p))
    for text, words in (("{oops", "not JSON"), ("[]", "empty"), ("[3]", "record 0"), ('[{"caption": 1}]', "record 0")):
        damage(path, lambda p: p.write_text(text, encoding="utf-8"))
        report = check_data(root.name, root, unofficial=True)
        assert words in split_of(report, part).problem and path.name in split_of(report, part).problem and not report.complete
    path.unlink()
    report = check_data(root.name, root, unofficial=True)
    assert split_of(report, part).annotations[path.relative_to(root).as_posix()] == "absent"
    assert "Annotations:" in str(report) and str(root) in str(report)
    assert [s.name for s in report.splits if s.whole] == [s.name for s in report.splits if s.name != part] # the others are still checked


@pytest.mark.parametrize("root", ["fashioniq"], indirect=True)
def test_training_data_counts_where_there_is_some(root):
    for c in ("dress", "shirt", "toptee"):
        write(root/"captions"/f"cap.{c}.train.json", [{"candidate": f"{c}1", "target": f"{c}2", "captions": ["", "is red"]}])
        write(root/"image_splits"/f"split.{c}.train.json", [f"{c}1", f"{c}2"])
    report = check_data("fashioniq", root, unofficial=True)
    assert [s.name for s in report.splits] == ["train", "val", "test"] and len(report.splits[0].missing) == 6
    assert check_data("fashioniq", root, ["val", "test"], unofficial=True).complete


def test_every_card_has_a_step_for_every_need():
    for name in SETS:
        steps = load_card(name).get
        assert steps[0].startswith("Annotations:") and any(s.startswith("Pictures") for s in steps) and steps[-1].startswith("Run: foco_check_data")


# ---- the command

@each
def test_exit_codes(root, capsys):
    call = [root.name, "--root", str(root)]
    assert main([*call, "--unofficial"]) == 0 and "complete" in capsys.readouterr().out
    assert main(call) == 1 and "not the official ones" in capsys.readouterr().out
    damage(root/SETS[root.name][4], BROKEN["HTML"][0])
    assert main([*call, "--unofficial"]) == 1 and "HTML" in capsys.readouterr().out
    assert main([*call, "--unofficial", "--quick"]) == 0 and "were not opened" in capsys.readouterr().out
    assert main([*call, "--unofficial", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["complete"] is False and sum(len(s["broken"]) for s in said["splits"]) >= 1 and said["next"]


@pytest.mark.parametrize("argv, words", [("fashion200k --root .", "invalid choice"), ("cirr", "--root"), ("cirr --root nowhere", "no such folder"),
                                         ("cirr --root . --split test", "expected some of val, test1"),
                                         ("cirr --root . --workers 0", "expected 1 or more"), ("cirr --root . --fast", "unrecognized"),
                                         ("", "required")])
def test_a_wrong_question_exits_with_2(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error: main(argv.split())
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("root", ["cirr"], indirect=True)
def test_as_a_program(root):
    damage(root/"dev"/"dev-0-3-img0.png", BROKEN["truncated"][0])
    argv = [sys.executable, "-m", "foco.data.check", "cirr", "--root", ".", "--unofficial"]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "dev-0-3-img0: truncated" in done.stdout and "Traceback" not in done.stderr


def test_the_command_is_installed():
    settings = (Path(__file__).resolve().parents[1]/"pyproject.toml").read_text(encoding="utf-8")
    assert 'foco_check_data = "foco.data.check:main"\n' in settings.split("[project.scripts]")[1].split("\n[")[0]


# ---- decoding at an eighth

jpegs = pytest.mark.parametrize("options", [{}, dict(progressive=True), dict(subsampling=0), dict(restart_marker_blocks=2)], ids=str)
modes = pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])


@jpegs
@modes
def test_a_quick_look_agrees_with_a_full_one(tmp_path, monkeypatch, options, mode):
    path = tmp_path/"x.jpg"
    PHOTO.resize((112, 80)).convert(mode).save(path, quality=90, **options)
    whole = path.read_bytes()
    verdicts, sizes, load = [], [], JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", lambda self: (sizes.append(self.size), load(self))[1])
    check_quickly(path)
    assert sizes[-1] == (14, 10)                                                # the shortcut is taken
    for cut in [*range(0, len(whole), 61), *range(len(whole) - 4, len(whole) + 1)]:
        path.write_bytes(whole[:cut])
        verdicts.append(check_quickly(path))
        assert (verdicts[-1] is None) == (check_picture(path) is None), cut
    assert verdicts[-1] is None and all(verdicts[:-6])


@jpegs
@modes
def test_a_quick_look_agrees_on_damage_in_the_middle(tmp_path, options, mode):
    "Bytes replaced, overwritten with markers, or left out anywhere; neither way notices what still decodes."
    path, rng, verdicts = tmp_path/"x.jpg", np.random.default_rng(0), []
    PHOTO.resize((112, 80)).convert(mode).save(path, quality=90, **options)
    whole = path.read_bytes()
    for k in range(150):
        i, n = int(rng.integers(2, len(whole) - 2)), int(rng.integers(1, (2, 8, 64)[k % 3]))
        path.write_bytes(whole[:i] + (rng.bytes(n), b"\xff" * n, b"")[k // 3 % 3] + whole[i + n:])
        full, quick = check_picture(path), check_quickly(path)
        assert (full is None) == (quick is None), (i, n, full, quick)
        verdicts.append(full is not None)
    assert any(verdicts) and not all(verdicts)


# ---- the official annotation files

@real
def test_real_cirr_val_with_stand_ins_is_complete(tmp_path):
    for folder in ("captions", "image_splits"): shutil.copytree(OFFICIAL/"cirr"/folder, tmp_path/"cirr"/folder)
    PHOTO.resize((8, 8)).save(tmp_path/"picture.png")
    (tmp_path/"dev").mkdir()
    places = json.loads((OFFICIAL/"cirr"/"image_splits"/"split.rc2.val.json").read_text(encoding="utf-8"))
    for place in places.values(): os.link(tmp_path/"picture.png", tmp_path/place)
    report = check_data("cirr", tmp_path, "val")
    assert report.complete and "2,297 unique ids = complete" in str(report)
    assert report.splits[0].counts == {"queries": (4181, 4181), "pictures": (2297, 2297)}
    whole = check_data("cirr", tmp_path)
    assert not whole.complete and len(whole.splits[1].missing) == 2315 and "NLVR2" in str(whole)
    damage(tmp_path/"dev"/"dev-244-0-img0.png", BROKEN["HTML"][0])
    assert list(check_data("cirr", tmp_path, "val").splits[0].broken) == ["dev-244-0-img0"]


@real
def test_real_fashioniq_counts():
    report = check_data("fashioniq", OFFICIAL/"fashioniq")
    assert [s.name for s in report.splits] == ["train", "val", "test"] and all(s.official and not s.problem for s in report.splits)
    assert [len(s.missing) for s in report.splits] == [45429, 15415, 15417] and "0 of 74,381 unique ids" in str(report)
    found = Report("fashioniq", "ROOT", tuple(replace(s, missing=()) for s in report.splits), True)
    assert found.complete and "74,381 unique ids = complete (77,683 names" in str(found)
    edited = replace(found, splits=(replace(found.splits[0], annotations={"captions/cap.dress.train.json": "different"}), *found.splits[1:]))
    assert not edited.complete and "not the official ones" in str(edited)


@real
def test_real_genecis_and_circo_counts(tmp_path):
    report = check_data("genecis", OFFICIAL, ["focus_attribute", "focus_object"])
    assert all(s.official and not s.problem and len(s.missing) == len(s.needed) for s in report.splits)
    assert [s.counts["queries"][0] for s in report.splits] == [2000, 1960]
    shutil.copytree(OFFICIAL/"circo"/"annotations", tmp_path/"annotations")
    asked = json.loads((tmp_path/"annotations"/"val.json").read_text(encoding="utf-8"))
    named = {i for r in asked for i in (r["reference_img_id"], *r["gt_img_ids"])}           # COCO's own list is not here
    write_gallery(tmp_path, sorted(named))
    circo = check_data("circo", tmp_path, "val")
    assert circo.splits[0].annotations == {"annotations/val.json": "official", GALLERY_LIST: "unpinned"}
    assert not circo.splits[0].official and f"pictures {len(named):,}, not 123,403" in str(circo)
