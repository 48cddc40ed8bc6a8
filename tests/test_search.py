"""Search in folders of one's own: what happens to an index while files come, go, change and break, and what the command says."""
import functools, importlib, io, json, os, random, shutil, signal, socket, sys, tarfile, time
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image

import foco.galleries.gallery as gallery_module
from foco.backbones import load_backbone
from foco.data.shards import index_shards
from foco.galleries.gallery import Gallery
from foco.galleries.nearest import Exact
from foco.galleries.sources import open_source, walk_pictures
from foco.search import METHODS, Search, default_index, main, open_composer, sheet_html
from foco.weights import MissingWeights

PHOTOS = Path(__file__).resolve().parents[2]/"shared"/"photos"/"flickr8k_aspect200"


def noise(n, size=(40, 30)): return Image.fromarray(np.random.default_rng(n).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def put(path, n, old=True, **options):
    path.parent.mkdir(parents=True, exist_ok=True); noise(n).save(path, **options)
    if old: os.utime(path, ns=(10**18 + n, 10**18 + n))
    return path


class Fast:
    "A backbone that takes no time: the feature of a picture is its smallest thumbnail."
    D, device, patches = 27, torch.device("cpu"), False
    def __init__(self, weights="sha256:a"): self.weights, self.encoded = weights, 0
    @property
    def identity(self): return {"name": "fast", "pretrained": "x", "weights": self.weights, "patch_layer": 3, "activation": "gelu", "preprocess_sha256": "p"}
    def preprocess(self, picture): return torch.from_numpy(np.asarray(picture.resize((3, 3)), dtype=np.float32)).flatten() - 127
    def encode_images(self, pixels):
        self.encoded += len(pixels)
        return type("F", (), {"global_": torch.nn.functional.normalize(pixels, dim=1)})


@pytest.fixture
def folder(tmp_path):
    for n in range(12): put(tmp_path/"photos"/("a" if n % 2 else "b")/f"{n:02d}.png", n)
    return tmp_path/"photos"


@pytest.fixture(scope="module")
def foco(on_cpu): return open_composer(device="cpu")


@pytest.fixture(scope="module", autouse=True)
def opened_once(on_cpu):
    "What the command opens, it opens the first time only: a method with the same arguments is the same."
    with pytest.MonkeyPatch.context() as m: m.setattr("foco.search.open_composer", functools.cache(open_composer)); yield


@pytest.fixture(scope="module")
def still(foco, tmp_path_factory):
    "A folder that no test changes, with its index."
    folder = tmp_path_factory.mktemp("still")/"photos"
    for n in range(12): put(folder/("a" if n % 2 else "b")/f"{n:02d}.png", n)
    Gallery.build(folder, foco.backbone, default_index(folder, foco.backbone))
    return folder


def same(one, other):
    assert one.names == other.names and one.contents == other.contents and one.problems == other.problems
    np.testing.assert_allclose(np.asarray(one.features), np.asarray(other.features), atol=1e-6)


# ---- an index while files change

def test_whatever_happens_to_a_folder_the_index_equals_one_made_from_nothing(folder, tmp_path):
    dice, index = random.Random(0), tmp_path/"index"
    for round in range(15):
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for _ in range(dice.randrange(4)):
            path, n = dice.choice(files), dice.randrange(40)
            if not path.exists(): continue
            match dice.randrange(7):
                case 0: put(folder/dice.choice("abc")/f"{dice.randrange(40):02d}.png", n, old=dice.random() < .5)
                case 1: path.unlink()
                case 2: path.rename(path.with_name(f"moved-{round}-{n}.png"))
                case 3: path.write_bytes(path.read_bytes()[:-dice.randrange(1, 900)])
                case 4: os.utime(path)
                case 5: shutil.copy(path, folder/f"copy-{n}.png")
                case 6: put(path, n)
        same(Gallery.build(folder, Fast(), index, batch_size=dice.choice((1, 3, 64)), verify=dice.random() < .2), Gallery.build(folder, Fast()))
    assert sorted(p.name for p in index.iterdir() if p.is_file()) == ["gallery.json", "lock"] and sum(p.is_dir() for p in index.iterdir()) == 1


def test_only_new_contents_are_encoded_and_unchanged_files_are_not_even_read(folder, tmp_path, monkeypatch):
    index = tmp_path/"index"
    assert Gallery.build(folder, Fast(), index).built.encoded == 12
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} was read"))
    again = Gallery.build(folder, Fast(), index).built
    assert again.encoded == again.new == again.changed == 0
    monkeypatch.undo()
    shutil.copytree(folder, tmp_path/"elsewhere")                                   # all names are known, all times differ
    for p in (tmp_path/"elsewhere").rglob("*.png"): os.utime(p)
    moved = Gallery.build(tmp_path/"elsewhere", Fast(), index).built
    assert (moved.encoded, moved.new, moved.changed, moved.gone) == (0, 0, 0, 0)
    (folder/"a"/"01.png").rename(folder/"a"/"new.png")
    renamed = Gallery.build(folder, Fast(), index).built
    assert (renamed.encoded, renamed.new, renamed.gone) == (0, 1, 1)


def test_a_file_that_changes_twice_in_a_tick_is_noticed(folder, tmp_path):
    "Same size, same time: only because the first stamp was too young to be trusted."
    path = folder/"raw.bmp"; noise(1).save(path); now = time.time_ns() + 60 * 10**9; os.utime(path, ns=(now, now))
    first = Gallery.build(folder, Fast(), tmp_path/"index")
    size = path.stat().st_size; noise(2).save(path); os.utime(path, ns=(now, now)); assert path.stat().st_size == size
    assert Gallery.build(folder, Fast(), tmp_path/"index").built.changed == 1
    os.utime(path, ns=(10**18, 10**18)); Gallery.build(folder, Fast(), tmp_path/"index")
    noise(3).save(path); os.utime(path, ns=(10**18, 10**18))                        # what no stamp can show
    assert Gallery.build(folder, Fast(), tmp_path/"index").built.changed == 0
    assert Gallery.build(folder, Fast(), tmp_path/"index", verify=True).built.changed == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_build_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery_module, "_PART_SECONDS", 0)
    if not (child := os.fork()):
        source = open_source(folder); source.threads, load = False, source.load
        source.load = lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == 10 else load(n)
        Gallery.build(source, Fast(), tmp_path/"index", batch_size=2); os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list((tmp_path/"index").glob("part-*")) and not (tmp_path/"index"/"gallery.json").exists()
    with pytest.raises(FileNotFoundError, match="no finished index"): Gallery.load(tmp_path/"index", Fast())
    backbone = Fast(); done = Gallery.build(folder, backbone, tmp_path/"index")
    assert 2 <= backbone.encoded < 12
    same(done, Gallery.build(folder, Fast()))


def test_an_index_is_refused_with_other_weights_and_kept_apart_by_default(folder, tmp_path, tiny):
    Gallery.build(folder, Fast(), tmp_path/"index")
    for use in (Gallery.build, lambda f, b, i: Gallery.load(i, b)):
        with pytest.raises(ValueError, match="another backbone, 'fast' .weights: 'sha256:a', now 'sha256:b'.*again=True"): use(folder, Fast("sha256:b"), tmp_path/"index")
    assert Gallery.build(folder, Fast("sha256:b"), tmp_path/"index", again=True).built.encoded == 12
    table = json.loads((tmp_path/"index"/"gallery.json").read_text()); table["about"]["foco"] = "0.0.0"; (tmp_path/"index"/"gallery.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="foco: '0.0.0', now"): Gallery.build(folder, Fast("sha256:b"), tmp_path/"index")
    other = load_backbone("tiny-clip", "random", device="cpu")
    assert default_index(folder, tiny) != default_index(folder, other) and default_index(folder, tiny) == default_index(folder, tiny.at_layer(0))


def test_an_index_holds_json_and_plain_arrays_only(folder, tmp_path):
    Gallery.build(folder, Fast(), tmp_path/"index")
    assert {p.name for p in (tmp_path/"index").rglob("*") if p.is_file()} == {"gallery.json", "lock", "features.npy", "key.json"}
    features = next((tmp_path/"index").rglob("features.npy"))
    np.save(features, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(OSError, match="gone or damaged"): Gallery.load(tmp_path/"index", Fast())


# ---- pictures of all kinds

ODD = {"wide": ("RGB", (400, 1)), "tall": ("RGB", (1, 400)), "one": ("L", (1, 1)), "LA": ("LA", (9, 9)), "bits": ("1", (33, 9)), "palette": ("P", (20, 20)), "clear": ("RGBA", (20, 20)), "deep": ("I;16", (20, 20))}


def test_every_kind_of_picture_gives_a_feature_and_every_broken_one_a_reason(tmp_path, tiny):
    folder = tmp_path/"odd"; folder.mkdir()
    for name, (mode, size) in ODD.items(): Image.new(mode, size).save(folder/f"{name}.png")
    noise(0).convert("CMYK").save(folder/"cmyk.jpg"); noise(0).convert("CMYK").save(folder/"cmyk.tif")
    noise(1).save(folder/"moving.gif", save_all=True, append_images=[noise(2)], duration=50); noise(1).quantize(256).save(folder/"first.png")
    turned = noise(3).rotate(90, expand=True); exif = turned.getexif(); exif[0x0112] = 6; turned.save(folder/"turned.png", exif=exif); noise(3).save(folder/"upright.png")
    (folder/"zero.jpg").touch(); (folder/"page.png").write_text("<html></html>"); (folder/"cut.png").write_bytes((folder/"upright.png").read_bytes()[:-2000]); (folder/"lost.jpg").symlink_to(folder/"nowhere.jpg")
    if hasattr(os, "mkfifo"): os.mkfifo(folder/"pipe.jpg")
    gallery = Gallery.build(folder, tiny)
    assert len(gallery) == len(ODD) + 6 and np.isfinite(gallery.features).all()
    assert {n: gallery.problems[n] for n in ("zero.jpg", "page.png", "lost.jpg")} == {"zero.jpg": "0 bytes", "page.png": "an HTML page, not a picture", "lost.jpg": "No such file or directory"}
    assert "truncated" in gallery.problems["cut.png"] and len(gallery.problems) == 4 and "4 files could not be read" in str(gallery.built)
    row = {n: gallery.features[gallery.names.index(n)] for n in gallery.names}
    assert row["turned.png"] @ row["upright.png"] > .999 and row["moving.gif"] @ row["first.png"] > .98 and row["cmyk.jpg"] @ row["cmyk.tif"] > .9
    white = Gallery.build([{"image": Image.new("RGB", (20, 20), "white")}], tiny).features[0]
    assert row["clear.png"] @ white > .999


def test_features_do_not_depend_on_batches_and_equal_the_backbones(folder, tiny):
    one, many = Gallery.build(folder, tiny, batch_size=1), Gallery.build(folder, tiny, batch_size=16)
    np.testing.assert_allclose(one.features, many.features, atol=1e-4)
    np.testing.assert_allclose(many.features, tiny.encode_pictures([many.picture(n) for n in range(12)], patches=False).global_.numpy(), atol=1e-4)


def test_folders_that_are_linked_into_each_other_are_visited_once(folder):
    (folder/"a"/"up").symlink_to(folder, target_is_directory=True); (folder/"loop").symlink_to(folder/"loop"); (folder/"0-link").symlink_to(folder/"b", target_is_directory=True)
    assert list(walk_pictures(folder)[0]) == sorted(f"{'a' if n % 2 else 'b'}/{n:02d}.png" for n in range(12))


# ---- other sources

def test_shards(tmp_path, foco):
    (tmp_path/"cc").mkdir()
    turned = noise(0).rotate(90, expand=True); exif = turned.getexif(); exif[0x0112] = 6
    with tarfile.open(tmp_path/"cc"/"00000.tar", "w") as tar:
        for n in range(5):
            out = io.BytesIO(); turned.save(out, "JPEG", quality=95, exif=exif) if n == 0 else noise(n).save(out, "JPEG", quality=95)
            for kind, content in (("jpg", out.getvalue() if n < 4 else b"x"), ("txt", f"picture {n}".encode())):
                info = tarfile.TarInfo(f"00000000{n}.{kind}"); info.size = len(content); tar.addfile(info, io.BytesIO(content))
    index_shards(tmp_path/"cc", worst=1)
    gallery = Gallery.build(tmp_path/"cc", foco.backbone, tmp_path/"index")
    assert gallery.names == [f"00000000{n}" for n in range(4)] and gallery.picture(0).size == (40, 30) and gallery.built.encoded == 4
    assert Gallery.build(tmp_path/"cc", foco.backbone, tmp_path/"index").built.encoded == 0
    search = Search(gallery, foco)
    assert search.query(texts="a car", where={"caption": lambda c: c.str.endswith("2")}, k=None)["file"].tolist() == ["000000002"]
    assert "000000001" not in search.query("000000001", "make it red", k=3)["file"].tolist() and search.gallery.path(0) is None


class Dataset:
    "What Hugging Face's data sets look like from outside."
    column_names = ["image", "label"]
    def __init__(self, n, mark): self.n, self._fingerprint, self.read = n, mark, 0
    def __len__(self): return self.n
    def __getitem__(self, n):
        if n == "label": return list(range(self.n))
        if isinstance(n, str): pytest.fail("all pictures were decoded at once")
        self.read += 1
        return {"image": noise(n), "label": n}


def test_data_sets(tmp_path):
    first = Gallery.build(Dataset(6, "x"), Fast(), tmp_path/"index")
    assert first.built.encoded == 6 and first.mask({"label": [1, 2]}).sum() == 2 and first.picture(3).tobytes() == noise(3).tobytes()
    same_set = Dataset(6, "x"); assert Gallery.build(same_set, Fast(), tmp_path/"index").built.encoded == 0 and same_set.read <= 2
    grown = Gallery.build(Dataset(8, "y"), Fast(), tmp_path/"index").built
    assert (grown.encoded, grown.new, grown.changed) == (2, 2, 0)


# ---- asking

def test_a_reference_is_recognised_by_its_content_not_by_its_path(folder, foco, tmp_path):
    shutil.copy(folder/"a"/"01.png", tmp_path/"outside.png"); shutil.copy(folder/"a"/"01.png", folder/"b"/"copy.png")
    search = Search(Gallery.build(folder, foco.backbone), foco)
    for spelled in (tmp_path/"outside.png", "a/01.png", str(folder/"b"/".."/"a"/"01.png"), search.gallery.names.index("b/copy.png")):
        found = search.query(spelled, "make it red", k=11)["file"].tolist()
        assert not {"a/01.png", "b/copy.png"} & set(found)
        assert {"a/01.png", "b/copy.png"} == set(search.query(spelled, k=2, leave_out=False)["file"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_every_kind_of_question(still, method):
    composer = open_composer(method, device="cpu")
    search = Search(Gallery.load(default_index(still, composer.backbone), composer.backbone, still), composer)
    for ask in (dict(image="a/01.png"), dict(texts="a red car"), dict(image="a/01.png", texts=["make it red", "at night"], without=["a tree", "snow"]), dict(texts=["a car", "at night"], without="snow")):
        found = search.query(**ask, k=5)
        assert len(found) == 5 and found["score"].is_monotonic_decreasing and np.isfinite(found["score"]).all() and found["score"].abs().max() <= 1.0001


def test_prepared_galleries_come_in_chunks():
    sizes = []
    def prepare(x): sizes.append(len(x)); return x
    Exact(torch.randn(5000, 4), prepare, chunk=512).search(torch.randn(3, 4), 7)
    assert max(sizes) == 512 and sum(sizes) == 5000


def test_a_search_needs_no_network(folder, foco, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("a connection was opened"))
    assert len(Search(Gallery.build(folder, foco.backbone), foco).query("a/01.png", "make it red", k=3)) == 3


# ---- the command

def run(capsys, *argv):
    try: code = main([str(a) for a in argv])
    except SystemExit as e: code = e.code
    return code, *capsys.readouterr()


def test_command(folder, capsys, tmp_path):
    code, out, err = run(capsys, "--gallery", folder, "--image", folder/"a"/"01.png", "--text", "make it red", "--text", "at night", "-k", 3, "--json", "--sheet", tmp_path/"s.html")
    said = json.loads(out)
    assert code == 0 and [r["rank"] for r in said["results"]] == [1, 2, 3] and said["query"]["texts"] == ["make it red", "at night"] and (tmp_path/"s.html").stat().st_size > 5000
    assert "features are kept in" in err and str(folder/".foco") in err and "--index" in err and "knows only ToyWorld's drawings" in err
    code, out, err = run(capsys, "--gallery", folder, "--text", "a car"); assert code == 0 and len(out.splitlines()) == 10 and "features are kept" not in err and "pictures (" not in err
    code, out, err = run(capsys, "--gallery", folder, "--text", "a car", "--files", "a/*", "-k", 7); assert code == 1 and "k=7, but 6 pictures can be ranked (of 12" in err
    (tmp_path/"years.csv").write_text("file,year\n01.png,2020\n03.png,2021\n", encoding="utf-8")
    code, out, err = run(capsys, "--gallery", folder, "--text", "a car", "--metadata", tmp_path/"years.csv", "--where", "year=2021.0"); assert code == 0 and out.split()[-1] == "a/03.png" and len(out.splitlines()) == 1
    assert sorted(p.name for p in folder.iterdir()) == [".foco", "a", "b"]                                  # nothing else was written


@pytest.mark.parametrize("argv, code, words", [
    ((), 2, "give --image, --text, or both"), (("--without", "a car"), 2, "nothing to search for"), (("--text", " "), 2, "a text is empty"), (("--text", "a", "-k", "0"), 2, "expected 1 or more"),
    (("--image", "nowhere.jpg"), 1, "no such file: nowhere.jpg"), (("--text", "a", "-k", "13"), 1, "k=13, but 12 pictures can be ranked"), (("--text", "a", "--where", "year"), 2, "expected COLUMN=VALUE"),
    (("--text", "a", "--where", "year=2020"), 1, "there is no metadata 'year'"), (("--text", "a", "--sheet", "x.pdf"), 2, "ends in .html or .png"), (("--text", "a", "--sheet", "nowhere/x.png"), 2, "no such folder"),
    (("--text", "a", "--backbone", "ViT-L-14"), 1, "FoCo needs a checkpoint that was trained on ViT-L-14"), (("--text", "a", "--checkpoint", "nowhere"), 1, "foco.json"), (("--text", "a", "--method", "best"), 2, "invalid choice")])
def test_what_the_command_says_to_a_wrong_question(still, capsys, argv, code, words):
    found, out, err = run(capsys, "--gallery", still, *argv)
    assert found == code and words in err and out == "" and "Traceback" not in err


def test_command_where_it_cannot_write_or_nothing_is_there(folder, capsys, tmp_path, monkeypatch):
    (folder/".foco").write_text("a file in the way")
    code, out, err = run(capsys, "--gallery", folder, "--text", "a"); assert code == 1 and "name another folder with index=... (--index)" in err
    assert run(capsys, "--gallery", folder, "--text", "a", "--index", tmp_path/"elsewhere")[0] == 0 and (tmp_path/"elsewhere"/"gallery.json").exists()
    (tmp_path/"empty").mkdir(); code, out, err = run(capsys, "--gallery", tmp_path/"empty", "--text", "a"); assert code == 1 and "no pictures in" in err
    monkeypatch.setitem(sys.modules, "faiss", None)
    code, out, err = run(capsys, "--gallery", folder, "--index", tmp_path/"elsewhere", "--text", "a", "--approximate"); assert code == 1 and "pip install 'foco[search]'" in err
    def missing(*args, **options): raise MissingWeights("ViT-L-14: put the file there")
    monkeypatch.setattr("foco.search.load_backbone", missing)
    code, out, err = run(capsys, "--gallery", folder, "--text", "a", "--method", "average", "--backbone", "ViT-L-14"); assert code == 1 and err.strip() == "foco_search: ViT-L-14: put the file there"


def test_without_matplotlib_a_sheet_is_html_and_a_png_is_refused_before_any_work(folder, capsys, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib" or n == "foco" or n.startswith("foco.")]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)                            # as if it were not installed, for a foco that is imported anew
    bare = importlib.import_module("foco.search"); assert "foco.visualize" not in sys.modules
    with monkeypatch.context() as m:
        m.setattr(bare, "open_composer", lambda *args: pytest.fail("a model was loaded")); m.setattr(bare, "open_source", lambda *args: pytest.fail("files were read"))
        assert bare.main(["--gallery", str(folder), "--text", "a", "--sheet", str(tmp_path/"s.PNG")]) == 1
    out, err = capsys.readouterr(); assert out == "" and len(err.splitlines()) == 1 and err.startswith("foco_search: --sheet") and "drawing needs matplotlib: pip install 'foco[paper]'" in err and ".html" in err
    assert sorted(p.name for p in folder.iterdir()) == ["a", "b"] and not (tmp_path/"s.PNG").exists()
    assert bare.main(["--gallery", str(folder), "--image", "a/01.png", "--text", "a", "-k", "3", "--sheet", str(tmp_path/"s.html")]) == 0
    assert (tmp_path/"s.html").read_text(encoding="utf-8").count("<img ") == 4 and "foco.visualize" not in sys.modules
    composer = bare.open_composer(); search = bare.Search(bare.Gallery.load(bare.default_index(folder, composer.backbone), composer.backbone, folder), composer)
    with pytest.raises(ModuleNotFoundError, match="drawing needs matplotlib"): bare.contact_sheet(search, search.query(texts="a", k=1))


def test_strange_names(tmp_path, foco, capsys):
    folder = tmp_path/"names"; folder.mkdir(); names = ["a\x1b[31m.png", "<img src=x onerror=alert(1)>.png", "夜 & Tag.png", "two\nlines.png", "$x_1$.png", b"latin-\xe9.png"]
    for n, name in enumerate(names): path = os.path.join(os.fsencode(folder), os.fsencode(name)); noise(n).save(out := io.BytesIO(), "PNG"); open(path, "wb").write(out.getvalue())
    search = Search(Gallery.build(folder, foco.backbone, tmp_path/"index"), foco)
    page = sheet_html(search, search.query(texts="a car", k=6), texts='"><script>alert(1)</script>')
    page.encode("utf-8"); assert page.count("<img ") == 6 and "<script" not in page and "onerror=alert(1)&gt;" in page and "\x1b" not in page
    code, out, err = run(capsys, "--gallery", folder, "--text", "a car", "--files", "*", "--sheet", tmp_path/"s.png"); assert code == 0 and len(out.splitlines()) == 6 and "\x1b" not in out and "latin-\\udce9.png" in out
    code, out, err = run(capsys, "--gallery", folder, "--text", "a car", "--json"); assert code == 0 and {r["file"] for r in json.loads(out)["results"]} == {os.fsdecode(n) for n in names}


def test_the_command_is_installed():
    project = (Path(__file__).resolve().parents[1]/"pyproject.toml").read_text(encoding="utf-8")
    assert 'foco_search = "foco.search:main"' in project.split("[project.scripts]")[1].split("\n[")[0]


# ---- photos

@pytest.mark.skipif(not PHOTOS.is_dir(), reason="no photos here")
def test_photos(tmp_path, foco):
    photos = sorted((PHOTOS/"images").glob("*.jpg") if (PHOTOS/"images").is_dir() else PHOTOS.glob("*.jpg"))[:40]
    gallery = Gallery.build(photos, foco.backbone, tmp_path/"index")
    assert len(gallery) == 40 and not gallery.problems and np.isfinite(gallery.features).all()
    assert Gallery.build(photos, foco.backbone, tmp_path/"index").built.encoded == 0
    assert len(Search(gallery, foco).query(photos[3], "at night", k=39)) == 39
