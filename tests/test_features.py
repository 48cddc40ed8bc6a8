"""Cached features: what is a hit, what is a miss, and what an interrupted, competing or hostile writer leaves behind."""
import errno, io, json, multiprocessing, os, pickle, shutil, subprocess, sys, warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from foco.backbones import load_backbone
from foco.data import entries as e
from foco.data import features as f
from foco.data.features import StoredFeatures, cache_key, cache_size, clear_cache, encode_cached, encode_texts_cached
from foco.data.genecis import crop_box
from foco.data.pictures import Pictures

N = 20
DIES = """
import os, signal, sys
from pathlib import Path
from foco.backbones import load_backbone
from foco.data.features import encode_cached
from foco.data.pictures import Pictures
backbone, calls = load_backbone("tiny-clip", device="cpu"), []
encode = backbone.encode_images
def watched(pixels):
    calls.append(len(pixels))
    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return encode(pixels)
backbone.encode_images = watched
encode_cached(backbone, Pictures(sorted(Path(sys.argv[1]).glob("*.png"))), patches=True, cache=sys.argv[2], batch_size=4)
"""
DIES_BEHIND_A_MARK = """
import os, signal, sys
from pathlib import Path
import torch
from foco.backbones import load_backbone
from foco.data import entries, features
from foco.data.pictures import Pictures
torch.set_num_threads(1)
what, folder, cache, batches = *sys.argv[1:4], int(sys.argv[4])
backbone, calls, entries._MARK_SECONDS, features._PART = load_backbone("tiny-clip", device="cpu"), [], 0, 8
def watched(name, encode):
    def run(*args):
        if len(calls) == batches: os.kill(os.getpid(), signal.SIGKILL)
        calls.append(1)
        return encode(*args)
    setattr(backbone, name, run)
for name in ("encode_images", "encode_texts"): watched(name, getattr(backbone, name))
if what == "texts": features.encode_texts_cached(backbone, [f"{i} red balls" for i in range(20)], cache=cache)
else: features.encode_cached(backbone, Pictures(sorted(Path(folder).glob("*.png"))), patches=True, dtype=what, cache=cache, batch_size=4)
"""
TEXTS = [f"{i} red balls" for i in range(20)]
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "photos"


@pytest.fixture(scope="module")
def backbone(tiny):
    torch.set_num_threads(1)
    return tiny


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (N, 40, 56, 3), dtype=np.uint8)
    for i, x in enumerate(noise): Image.fromarray(x).save(tmp_path / "pictures" / f"{i:02}.png")
    return tmp_path / "pictures"


@pytest.fixture
def pictures(folder): return Pictures(sorted(folder.glob("*.png")))


@pytest.fixture
def cache(tmp_path): return tmp_path / "cache"


def encoded(backbone, pictures, cache, monkeypatch, **options):
    "Features, and how many pictures reached the model."
    seen, encode = [], type(backbone).encode_images
    with monkeypatch.context() as m:
        m.setattr(backbone, "encode_images", lambda pixels: (seen.append(len(pixels)), encode(backbone, pixels))[1], raising=False)
        return encode_cached(backbone, pictures, cache=cache, **options), sum(seen)


def names(cache): return sorted(p.name for p in cache.iterdir()) if cache.exists() else []
def entry(cache): return next(p for p in cache.iterdir() if not p.name.startswith("."))


def test_killed_in_the_middle_leaves_no_entry(backbone, folder, pictures, cache, monkeypatch):
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert subprocess.run([sys.executable, "-c", DIES, str(folder), str(cache)], env=env, timeout=120).returncode == -9
    left, = names(cache)
    assert left.startswith(".writing-") and not list(cache.rglob("key.json"))
    found, n = encoded(backbone, pictures, cache, monkeypatch, patches=True)
    assert n == N and len(names(cache)) == 2 and len(found) == N
    os.utime(cache / left, (0, 0))                                          # two days later, the next writer tidies up
    encoded(backbone, pictures, cache, monkeypatch)
    assert left not in names(cache) and len(names(cache)) == 2


def contents(cache): return {p.relative_to(cache).as_posix(): p.read_bytes() for p in cache.rglob("*") if p.is_file()}


def killed(what, folder, cache, batches):
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    run = subprocess.run([sys.executable, "-c", DIES_BEHIND_A_MARK, what, str(folder), str(cache), str(batches)], env=env, timeout=120, capture_output=True, text=True)
    assert run.returncode == -9, run.stderr


def encoded_texts(backbone, texts, cache, monkeypatch, **options):
    "Features, and how many texts reached the model."
    seen, encode = [], type(backbone).encode_texts
    with monkeypatch.context() as m:
        m.setattr(backbone, "encode_texts", lambda part, size: (seen.append(len(part)), encode(backbone, part, size))[1], raising=False)
        return encode_texts_cached(backbone, texts, cache=cache, **options), seen


@pytest.mark.skipif(e.fcntl is None, reason="needs file locks")
def test_killed_behind_a_mark_goes_on(backbone, folder, pictures, cache, tmp_path, monkeypatch):
    "The finished entry has the bytes of an uninterrupted one; nothing is left over."
    for batches in (2, 1): killed("int8", folder, cache, batches)           # killed twice: after 8 pictures, and after 4 more
    left, = names(cache)
    assert json.loads((cache / left / "progress.json").read_text(encoding="utf-8"))["rows"] == 12 and not list(cache.rglob("key.json"))
    options = dict(patches=True, dtype="int8", batch_size=4)
    with (cache / left / "entry" / "patches.npy").open("ab") as file: file.write(b"torn")   # written behind the mark when the power failed
    found, n = encoded(backbone, pictures, cache, monkeypatch, **options)
    encode_cached(backbone, pictures, cache=tmp_path / "whole", **options)
    assert n == N - 12 and contents(cache) == contents(tmp_path / "whole") and len(contents(cache)) == 3
    assert encoded(backbone, pictures, cache, monkeypatch, **options)[1] == 0


@pytest.mark.skipif(e.fcntl is None, reason="needs file locks")
def test_killed_while_encoding_texts_goes_on(backbone, folder, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(f, "_PART", 8)
    killed("texts", folder, cache, 2)
    found, seen = encoded_texts(backbone, TEXTS, cache, monkeypatch)
    encode_texts_cached(backbone, TEXTS, cache=tmp_path / "whole")
    assert seen == [4] and contents(cache) == contents(tmp_path / "whole") and len(contents(cache)) == 2


def finish_together(backbone, pictures, cache, start, said):
    calls, encode = [], backbone.encode_images
    backbone.encode_images = lambda pixels: (calls.append(len(pixels)), encode(pixels))[1]
    start.wait(60)
    found = encode_cached(backbone, pictures, patches=True, cache=cache, batch_size=4)
    said.put((sum(calls), float(found.patches.double().sum())))


@pytest.mark.skipif(e.fcntl is None or "fork" not in multiprocessing.get_all_start_methods(), reason="needs file locks and fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_only_one_program_takes_over(backbone, folder, pictures, cache, tmp_path):
    killed("float32", folder, cache, 4)
    context = multiprocessing.get_context("fork")
    start, said = context.Barrier(3), context.Queue()
    writers = [context.Process(target=finish_together, args=(backbone, pictures, cache, start, said)) for _ in range(3)]
    for w in writers: w.start()
    answers = [said.get(timeout=60) for _ in writers]
    for w in writers: w.join(60)
    assert [w.exitcode for w in writers] == [0, 0, 0] and len({total for _, total in answers}) == 1
    assert [n for n, _ in answers].count(N - 16) == 1 and {n for n, _ in answers} <= {N - 16, N, 0}     # 0: it came when the entry was there
    encode_cached(backbone, pictures, patches=True, cache=tmp_path / "whole", batch_size=4)
    assert contents(cache) == contents(tmp_path / "whole")


def write_together(backbone, pictures, cache, start, said):
    for entry in range(4):
        start.wait(60)
        found = encode_cached(backbone, pictures.take(range(N - entry)), patches=True, cache=cache, batch_size=8)
        said.put((entry, float(found.global_.double().sum()), float(found.patches.double().sum())))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_the_same_entries(backbone, pictures, cache, monkeypatch):
    context = multiprocessing.get_context("fork")
    start, said = context.Barrier(3), context.Queue()
    writers = [context.Process(target=write_together, args=(backbone, pictures, cache, start, said)) for _ in range(3)]
    for w in writers: w.start()
    answers = [said.get(timeout=60) for _ in range(12)]
    for w in writers: w.join(60)
    assert [w.exitcode for w in writers] == [0, 0, 0] and len(set(answers)) == 4 and len(names(cache)) == 4
    for entry, total, _ in answers[:4]:
        found, n = encoded(backbone, pictures.take(range(N - entry)), cache, monkeypatch, patches=True)
        assert n == 0 and float(found.global_.double().sum()) == total


def test_overtaken_by_another_writer(backbone, pictures, cache, monkeypatch):
    "A second writer begins and finishes while the first is in the middle."
    encode, calls = backbone.encode_images, []
    def overtaken(pixels):
        calls.append(1)
        if len(calls) == 2: encode_cached(backbone, pictures, cache=cache, batch_size=4)
        return encode(pixels)
    monkeypatch.setattr(backbone, "encode_images", overtaken, raising=False)
    first = encode_cached(backbone, pictures, cache=cache, batch_size=4)
    assert len(calls) == 10 and len(names(cache)) == 1 and torch.equal(first.global_, encode_cached(backbone, pictures, cache=cache).global_)


def test_an_interrupt_leaves_nothing(backbone, pictures, cache, monkeypatch):
    def interrupted(pixels): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(backbone, "encode_images", interrupted, raising=False)
        encode_cached(backbone, pictures, cache=cache)
    assert names(cache) == []


@pytest.mark.parametrize("name, content, words", [("07", b"", "0 bytes"), ("07", b"<!DOCTYPE html><p>404", "HTML"),
                                                  ("07", None, "truncated"), ("19", None, "truncated")])
def test_unreadable_picture_is_named(backbone, folder, pictures, cache, name, content, words):
    path = folder / f"{name}.png"
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    for where in (cache, None):
        with pytest.raises(OSError) as error: encode_cached(backbone, pictures, cache=where, batch_size=4)
        assert f"picture {int(name)} of {N}" in str(error.value) and str(path) in str(error.value) and words in str(error.value)
    assert names(cache) == []


def test_changed_content_under_the_same_name_is_a_miss(backbone, folder, pictures, cache, monkeypatch):
    path = folder / "03.png"
    Image.new("RGB", (40, 56)).save(path.with_suffix(".bmp"))
    before, n = encoded(backbone, pictures, cache, monkeypatch)
    assert n == N
    size, when = path.stat().st_size, path.stat().st_mtime_ns
    other = io.BytesIO(); Image.fromarray(np.random.default_rng(9).integers(0, 256, (40, 56, 3), dtype=np.uint8)).save(other, "PNG")
    path.write_bytes(other.getvalue().ljust(size, b"\0")[:max(size, len(other.getvalue()))])
    os.utime(path, ns=(when, when + 1))                                     # the same name, a nanosecond later
    after, n = encoded(backbone, pictures, cache, monkeypatch)
    assert n == N and not torch.allclose(before.global_[3], after.global_[3], atol=1e-3) and torch.equal(before.global_[4:], after.global_[4:])


def test_a_picture_that_changes_while_encoding_is_not_cached(backbone, folder, pictures, cache, monkeypatch):
    encode = backbone.encode_images
    def changing(pixels):
        os.utime(folder / "00.png", ns=(1, 1))
        return encode(pixels)
    with monkeypatch.context() as m, pytest.raises(OSError, match="changed while they were encoded"):
        m.setattr(backbone, "encode_images", changing, raising=False)
        encode_cached(backbone, pictures, cache=cache)
    assert names(cache) == []


def test_options_are_misses_and_come_back(backbone, pictures, cache, monkeypatch):
    other, padded = load_backbone("tiny-clip", "random", device="cpu"), Pictures(pictures.paths, pad=1.25)
    runs = [(backbone, pictures, {}), (backbone, pictures, dict(patches=True)), (backbone.at_layer(0), pictures, dict(patches=True)),
            (other, pictures, {}), (backbone, padded, {}), (backbone, pictures, dict(dtype="float16")), (backbone, pictures.take(range(10)), {})]
    assert [encoded(b, p, cache, monkeypatch, **o)[1] for b, p, o in runs] == [N] * 6 + [10]
    for b, p, o in runs:
        found, n = encoded(b, p, cache, monkeypatch, **o)
        plain = b.encode_pictures(p)
        assert n == 0 and torch.allclose(found.global_.float(), plain.global_, atol=1e-3 if o.get("dtype") else 1e-5)
        if o.get("patches"): assert torch.allclose(found.patches, plain.patches, atol=1e-5)


@pytest.mark.parametrize("name, value", [("FORMAT", 99), ("_code_sha256", lambda crop=None: "0" * 64)])
def test_other_code_is_a_miss(backbone, pictures, cache, monkeypatch, name, value):
    encode_cached(backbone, pictures, cache=cache)
    monkeypatch.setattr(f, name, value)
    assert encoded(backbone, pictures, cache, monkeypatch)[1] == N


def test_another_way_to_cut_boxes_is_a_miss(backbone, pictures, cache, monkeypatch):
    boxes = [(0, 0, 20, 20)] * N
    runs = [Pictures(pictures.paths, crop=c, boxes=boxes) for c in (lambda p, b: p.crop(b), crop_box)]
    keys = [cache_key(backbone, [], False, "float32", r.crop) for r in runs]
    assert runs[0].manifest() == runs[1].manifest() and keys[0] != keys[1]
    assert encoded(backbone, runs[0], cache, monkeypatch)[1] == N
    assert encoded(backbone, runs[0], cache, monkeypatch)[1] == 0


def test_other_version_or_type_of_computation_is_a_miss(backbone, monkeypatch):
    key = cache_key(backbone, [], True, "float32")
    with monkeypatch.context() as m: m.setattr("foco.__version__", "9.9"); assert cache_key(backbone, [], True, "float32") != key
    with monkeypatch.context() as m: m.setattr(backbone, "dtype", torch.bfloat16); assert cache_key(backbone, [], True, "float32") != key


def spoil_key(e, **changes):
    key = json.loads((e / "key.json").read_text(encoding="utf-8"))
    (e / "key.json").write_text(json.dumps(key | changes), encoding="utf-8")


class Evil:
    def __reduce__(self): return os.mkdir, (os.environ["FOCO_EVIL"],)


SPOIL = {
    "another key under the same name": lambda e: spoil_key(e, pictures="0" * 64),
    "an edited key": lambda e: spoil_key(e, comment="mine"),
    "a cut-off key": lambda e: (e / "key.json").write_text((e / "key.json").read_text(encoding="utf-8")[:50], encoding="utf-8"),
    "a key that is no UTF-8": lambda e: (e / "key.json").write_bytes(b"\xff\xfe{"),
    "no key": lambda e: (e / "key.json").unlink(),
    "cut-off rows": lambda e: (e / "global.npy").write_bytes((e / "global.npy").read_bytes()[:-1]),
    "a cut-off header": lambda e: (e / "global.npy").write_bytes((e / "global.npy").read_bytes()[:40]),
    "an empty file": lambda e: (e / "global.npy").write_bytes(b""),
    "no array": lambda e: (e / "global.npy").unlink(),
    "fewer rows": lambda e: np.save(e / "global.npy", np.zeros((N - 1, 128), "float32")),
    "another type": lambda e: np.save(e / "global.npy", np.zeros((N, 128), "float16")),
    "the other byte order": lambda e: np.save(e / "global.npy", np.zeros((N, 128), ">f4")),
    "columns first": lambda e: np.save(e / "global.npy", np.zeros((N, 128), "float32", order="F")),
    "a pickle": lambda e: (e / "global.npy").write_bytes(pickle.dumps(Evil())),
    "an array of objects": lambda e: np.save(e / "global.npy", np.array([Evil()] * N), allow_pickle=True),
    "a file instead of a folder": lambda e: (shutil.rmtree(e), e.write_bytes(b"")),
    "an empty folder": lambda e: (shutil.rmtree(e), e.mkdir()),
}


@pytest.mark.parametrize("what", SPOIL)
def test_a_spoilt_entry_is_a_miss_and_is_repaired(backbone, pictures, cache, monkeypatch, tmp_path, what):
    monkeypatch.setenv("FOCO_EVIL", str(tmp_path / "evil"))
    good = encode_cached(backbone, pictures, cache=cache).global_.clone()
    SPOIL[what](entry(cache))
    found, n = encoded(backbone, pictures, cache, monkeypatch)
    assert n == N and torch.equal(found.global_, good) and not (tmp_path / "evil").exists()
    assert encoded(backbone, pictures, cache, monkeypatch)[1] == 0 and len(names(cache)) == 1


def test_half_precision_is_close_and_ranks_alike(backbone, pictures, cache):
    full, half = (encode_cached(backbone, pictures, patches=True, cache=cache, dtype=d) for d in ("float32", "float16"))
    assert half.global_.dtype == half.patches.dtype == torch.float16
    assert (half.global_.float() - full.global_).abs().max() < 5e-4 and (half.patches.float() - full.patches).abs().max() < 5e-4
    sims = [x.global_.float() @ x.global_.float().T for x in (full, half)]
    assert (sims[0] - sims[1]).abs().max() < 1e-3


def test_features_are_mapped_not_read(backbone, pictures, cache):
    "A hit gives tensors that lie in the mapped file; nothing warns, and a change stays in the program."
    good = encode_cached(backbone, pictures, patches=True, cache=cache)
    key = cache_key(backbone, pictures.manifest(), True, "float32")
    arrays = e.read_entry(entry(cache), key, f._layout(backbone, N, True, "float32"))
    assert all(type(a) is np.memmap and a.mode == "c" and Path(a.filename).parent == entry(cache) for a in arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = encode_cached(backbone, pictures, patches=True, cache=cache)
    maps = Path("/proc/self/maps")
    if maps.exists():
        regions = [l.split() for l in maps.read_text().splitlines() if l.endswith(".npy")]
        for x, name in ((found.global_, "global.npy"), (found.patches, "patches.npy")):
            spans = [[int(end, 16) for end in r[0].split("-")] for r in regions if r[-1] == str(entry(cache) / name)]
            assert any(low <= x.data_ptr() < high for low, high in spans)
    before = (entry(cache) / "global.npy").read_bytes()
    found.global_.zero_()
    assert (entry(cache) / "global.npy").read_bytes() == before and good.global_.any()


@pytest.mark.parametrize("full", [lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")), None])
def test_a_full_disk_is_an_error_and_leaves_nothing(backbone, pictures, cache, monkeypatch, full):
    if full: monkeypatch.setattr(f.os, "fsync", full)
    else: monkeypatch.setattr(f.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(OSError, match="No space left" if full else "GiB free"): encode_cached(backbone, pictures, cache=cache)
    assert names(cache) == []


def test_a_cache_that_is_a_file_is_an_error(backbone, pictures, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"): encode_cached(backbone, pictures, cache=tmp_path / "file")


def test_pictures_without_files_are_not_cached(backbone, pictures, cache, monkeypatch):
    drawn = [pictures[i] for i in range(3)]
    for _ in range(2): assert encoded(backbone, drawn, cache, monkeypatch)[1] == 3
    assert not cache.exists() and encoded(backbone, pictures, None, monkeypatch)[1] == N and not cache.exists()


def test_clear_cache_removes_entries_only(backbone, pictures, cache):
    encode_cached(backbone, pictures, cache=cache)
    (cache / "notes.txt").write_text("mine", encoding="utf-8"); (cache / "folder").mkdir(); (cache / ("a" * 32)).mkdir()
    assert clear_cache(cache, older_than_days=1) == 0 and len(names(cache)) == 4
    assert clear_cache(cache) > N * 128 * 4 and names(cache) == ["a" * 32, "folder", "notes.txt"]


@pytest.mark.skipif(e.fcntl is None, reason="needs file locks")
def test_clear_cache_removes_what_was_left_unfinished(backbone, folder, cache):
    killed("float32", folder, cache, 2)
    assert clear_cache(cache, older_than_days=1) == 0 and len(names(cache)) == 1
    assert clear_cache(cache) > 8 * 128 * 4 and names(cache) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("patches", [False, True])
def test_the_estimated_size_is_what_is_written(backbone, pictures, cache, dtype, patches, capsys):
    encode_cached(backbone, pictures, patches=patches, dtype=dtype, cache=cache, progress=True)
    if dtype != "int8": encode_texts_cached(backbone, TEXTS, dtype=dtype, cache=cache, progress=True)
    sizes = cache_size(backbone, N, 0 if dtype == "int8" else len(TEXTS), patches, dtype)
    assert sizes == cache_size((backbone.D, backbone.P), N, 0 if dtype == "int8" else len(TEXTS), patches, dtype)
    files = list(cache.rglob("*.npy"))
    assert len(files) == 1 + patches + (dtype != "int8") and sizes["total"] == sum(np.load(p, mmap_mode="r").nbytes for p in files)
    assert 0 < sum(p.stat().st_size for p in files) - sizes["total"] <= 256 * len(files)
    said = capsys.readouterr().out
    assert f"features of {N} pictures as {dtype if patches else dtype.replace('int8', 'float16')}: global 0.0 GiB" in said and ("patches 0.0" in said) == patches
    assert "GiB to write" in said and "GiB free" in said and ("texts 0.0 GiB" in said) == (dtype != "int8")
    encode_cached(backbone, pictures, patches=patches, dtype=dtype, cache=cache, progress=True)
    assert capsys.readouterr().out == ""                                    # a hit writes nothing and says nothing


def test_int8_takes_the_space_check_with_its_own_size(backbone, pictures, cache, monkeypatch):
    "Room for int8 is not room for float16."
    size = cache_size(backbone, N, patches=True, dtype="int8")["total"]
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(size, 0, size))
    with pytest.raises(OSError, match="leave patches out, or take dtype='int8'"): encode_cached(backbone, pictures, patches=True, dtype="float16", cache=cache)
    with pytest.raises(OSError, match="100,000 texts.*GiB free"): encode_texts_cached(backbone, ["a"] * 100_000, cache=cache)
    assert names(cache) == [] and len(encode_cached(backbone, pictures, patches=True, dtype="int8", cache=cache)) == N


def test_what_is_larger_than_the_memory_is_a_hit_too(backbone, pictures, cache, monkeypatch):
    "Linux refuses to map such a file copy-on-write: it is read in place instead of being encoded again and again."
    load = np.load
    def refusing(path, mmap_mode=None, **options):
        if mmap_mode == "c": raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return load(path, mmap_mode=mmap_mode, **options)
    monkeypatch.setattr(np, "load", refusing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in ("float32", "int8"):
            assert encoded(backbone, pictures, cache, monkeypatch, patches=True, dtype=dtype)[1] == N
            found, n = encoded(backbone, pictures, cache, monkeypatch, patches=True, dtype=dtype)
            assert n == 0 and torch.allclose(found[[3, 1]].patches, backbone.encode_pictures(pictures)[[3, 1]].patches, atol=5e-3)
        assert torch.equal(encode_texts_cached(backbone, TEXTS, cache=cache), encode_texts_cached(backbone, TEXTS))
    monkeypatch.setattr(np, "load", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError): e._map(next(cache.rglob("global.npy")))


def test_int8_rows_in_every_way(backbone, pictures, cache):
    plain = backbone.encode_pictures(pictures)
    for where in (cache, cache, None):
        found = encode_cached(backbone, pictures, patches=True, dtype="int8", cache=where)
        assert type(found) is StoredFeatures and len(found) == N and found.global_.dtype == torch.float16 and found.quantised.dtype == torch.int8
        for index in (slice(2, 9, 3), torch.tensor([7, 0, 7]), torch.arange(N) % 3 == 0, [4, 1], 5, -1):
            rows, right = found[index], plain[index]
            assert rows.global_.dtype == rows.patches.dtype == torch.float32 and rows.patches.shape == right.patches.shape
            assert torch.allclose(rows.patches, right.patches, atol=5e-3) and torch.allclose(rows.global_, right.global_, atol=1e-3)
            assert torch.allclose(rows.patches.norm(dim=-1), torch.ones(()), atol=1e-5)
    assert not hasattr(found, "patches")                                    # all of them in float32 would not fit into memory


@pytest.mark.skipif(not PHOTOS.exists(), reason="needs photographs")
def test_int8_on_photographs(backbone):
    photos = backbone.encode_pictures(Pictures(sorted(PHOTOS.rglob("*.jpg"))[:16]))
    again = torch.nn.functional.normalize(f._to_int8(photos.patches).double(), dim=-1)
    distance = 1 - (again * torch.nn.functional.normalize(photos.patches.double(), dim=-1)).sum(-1)
    estimate = backbone.D * photos.patches.abs().amax(-1) ** 2 / (24 * 127 ** 2)
    assert 1e-6 < distance.mean() < 2e-4 and distance.max() < 2e-3 and .7 < distance.mean() / estimate.mean() < 1.4


class Sealed:
    "Pictures whose manifest names an archive instead of each picture."
    def __init__(self, pictures, stamp): self.pictures, self.stamp = pictures, stamp
    def __len__(self): return len(self.pictures)
    def __getitem__(self, i): return self.pictures[i]
    def manifest(self): return [["archive", self.stamp]]


def test_any_sequence_with_a_manifest(backbone, pictures, cache, monkeypatch):
    runs = [(pictures, 1, N), (pictures, 1, 0), (pictures, 2, N), (pictures.take(range(5)), 1, 5)]
    for of, stamp, n in runs: assert encoded(backbone, Sealed(of, stamp), cache, monkeypatch, patches=True)[1] == n
    assert len(names(cache)) == 3 and {json.loads(p.read_text(encoding="utf-8"))["n"] for p in cache.rglob("key.json")} == {N, 5}


def test_texts_in_parts_are_those_of_the_backbone(backbone, cache, monkeypatch):
    monkeypatch.setattr(f, "_PART", 7)
    texts = (TEXTS + ["a much longer text about " + " and ".join(TEXTS[:3])] + TEXTS[::-1]) * 2
    for where in (None, cache):
        found, seen = encoded_texts(backbone, texts, where, monkeypatch, dtype="float32", batch_size=4)
        assert max(seen) == 7 and sum(seen) == len(texts) and torch.allclose(found, backbone.encode_texts(texts), atol=1e-6)
    half, seen = encoded_texts(backbone, texts, cache, monkeypatch)
    assert seen and half.dtype == torch.float16 and (half.float() - found).abs().max() < 5e-4
    runs = [(texts, {}), (texts, dict(batch_size=9)), (tuple(texts), {}), (np.array(texts), {}), (texts, dict(dtype="float32"))]
    assert [encoded_texts(backbone, t, cache, monkeypatch, **o)[1] for t, o in runs] == [[]] * 5 and len(names(cache)) == 2
    for other in (texts[1:], texts[1:] + texts[:1], [texts[0] + texts[1], *texts[2:]], [t + " " for t in texts]): assert encoded_texts(backbone, other, cache, monkeypatch)[1]


def test_texts_of_another_model_or_code_are_a_miss(backbone, cache, monkeypatch):
    encode_texts_cached(backbone, TEXTS, cache=cache)
    for options in (dict(), dict(dtype="float16")): assert encoded_texts(backbone, TEXTS, cache, monkeypatch, **options)[1] == []
    assert encoded_texts(backbone.at_layer(0), TEXTS, cache, monkeypatch)[1] == []                      # patches do not concern texts
    assert encoded_texts(load_backbone("tiny-clip", "random", device="cpu"), TEXTS, cache, monkeypatch)[1]
    for where, name, value in ((f, "FORMAT", 99), (f, "_sources", lambda *modules: ["other"]), (backbone, "dtype", torch.bfloat16),
                               (backbone, "tokenizer", lambda texts, of=backbone.tokenizer: of(texts).flip(0))):
        with monkeypatch.context() as m:
            m.setattr(where, name, value)
            assert f.text_key(backbone, TEXTS, "float16") not in [json.loads(p.read_text(encoding="utf-8")) for p in cache.rglob("key.json")]


@pytest.mark.parametrize("texts, error, words", [("one text", TypeError, "list of strings"), (TEXTS + [" "], ValueError, "text 20 of 21 is empty"), ([1], TypeError, "text 0 is a int")])
def test_texts_that_are_none_stop_before_anything_is_written(backbone, cache, texts, error, words):
    with pytest.raises(error, match=words): encode_texts_cached(backbone, texts, cache=cache)
    assert not cache.exists()
