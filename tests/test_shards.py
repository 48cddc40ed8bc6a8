"""Shards: what img2dataset writes, read by number from every kind of process, whatever happened to the files."""
import io, json, multiprocessing, os, pickle, signal, subprocess, sys, tarfile, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import foco.data.shards as shards_module
from foco.data.features import encode_cached
from foco.data.pairs import data_source
from foco.data.pictures import read_picture
from foco.data.shards import Shards, epoch_order, index_shards, main, open_pairs, shard_pairs
from foco.decomposers.rules import Rules
from foco.decomposers.store import Store, decompose_captions, main as decompose, read_captions

PHOTOS = Path(__file__).resolve().parents[2]/"shared"/"photos"/"flickr8k_aspect200"
SAID = ["a man in a straw hat reads a newspaper", "a red car and a small fish on the grass", "a dog runs along the beach at sunset", "two cups on a wooden table"]


def picture(n, kind="JPEG"):
    noise = np.random.default_rng(n).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    into = io.BytesIO(); Image.fromarray(noise).resize((48, 36)).save(into, kind); return into.getvalue()


def write(path, members):
    "A tar file of (name, bytes), as img2dataset's writer makes it."
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name); info.size = len(content); info.mtime = 1.5e9
            tar.addfile(info, io.BytesIO(content))


def sample(key, content, said, suffix="jpg"):
    about = {"url": "https://example.org/x", "caption": said, "key": key, "status": "success", "error_message": None, "width": 48, "height": 36}
    return [(f"{key}.{suffix}", content), (f"{key}.txt", said.encode()), (f"{key}.json", json.dumps(about, indent=4).encode())]


def folder_of(path, n_shards=3, n=8):
    path.mkdir()
    for s in range(n_shards): write(path/f"{s:05d}.tar", [m for i in range(n) for m in sample(f"{s:05d}{i:04d}", picture(100 * s + i), SAID[i % 4] + f" number {s}")])
    return path


@pytest.fixture
def cc(tmp_path): return folder_of(tmp_path/"cc")


@pytest.fixture(scope="module")
def rules(): return Rules()


def split(cc, out, rules): decompose_captions(read_captions(cc), out, rules); return out


def pixels(pictures): return [np.asarray(p).tobytes() for p in pictures]


# ---- photos

@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    "Real photos in four shards, every fifth as PNG."
    if not (PHOTOS/"captions.jsonl").is_file(): pytest.skip("the photos are not here")
    records = [json.loads(line) for line in (PHOTOS/"captions.jsonl").read_text(encoding="utf-8").splitlines()][:120]
    root, wanted = tmp_path_factory.mktemp("photos"), {}
    for s in range(4):
        members = []
        for i, record in enumerate(records[30 * s:30 * s + 30]):
            key, file = f"{s:05d}{i:04d}", PHOTOS/record["image"]
            content, suffix = file.read_bytes(), "jpg"
            if i % 5 == 0: into = io.BytesIO(); Image.open(file).save(into, "PNG"); content, suffix = into.getvalue(), "png"
            members += sample(key, content, record["captions"][0], suffix)
            wanted[key] = (np.asarray(read_picture(file)).tobytes(), record["captions"][0])
        write(root/f"{s:05d}.tar", members)
    index_shards(root)
    return root, wanted


def test_photos_come_back(photos):
    root, wanted = photos
    pictures = Shards(root)
    assert list(pictures.keys) == list(wanted) and pictures.captions.to_pylist() == [said for _, said in wanted.values()]
    assert pixels(pictures) == [p for p, _ in wanted.values()] and pictures.sizes.tolist() == [30] * 4


def test_photos_become_pairs_and_train(photos, tmp_path, rules, tiny):
    from foco.train import train
    from foco.training.config import make_config
    from foco.training.features import cache_features
    root, wanted = photos
    assert decompose(["--captions", str(root/".foco-index"), "--out", str(tmp_path/"pairs")]) == 0
    with warnings.catch_warnings(): warnings.simplefilter("ignore"); pairs = open_pairs(str(root), None, decompositions=tmp_path/"pairs")
    assert 96 <= len(pairs) <= 120 and all(d.caption == wanted[k][1] for k, d in zip(pairs.keys, pairs.decompositions))
    config = make_config(n_images=len(pairs), batch_size=8, steps=2)
    training = cache_features(tiny, pairs, config.center, config.k_max, config.counterfactuals_of(pairs))
    model, _ = train(tiny, training, config, tmp_path/"run", resume=False)
    assert len(training) == len(pairs) and all(torch.isfinite(p).all() for p in model.parameters())


# ---- other processes

class Read(torch.utils.data.Dataset):
    def __init__(self, pictures): self.pictures = pictures
    def __len__(self): return len(self.pictures)
    def __getitem__(self, n): return torch.from_numpy(np.array(self.pictures[n]))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers(cc, start):
    index_shards(cc)
    pictures = Shards(cc).take([20, 3, 11, 0])
    here = pixels(pictures)     # files are open before the workers start
    there = torch.utils.data.DataLoader(Read(pictures), batch_size=None, num_workers=2 if start == "fork" else 1, multiprocessing_context=start)
    assert [p.numpy().tobytes() for p in there] == here and len(here) == 4


def test_threads(cc):
    index_shards(cc)
    pictures = Shards(cc)
    order = np.random.default_rng(0).integers(0, len(pictures), 600).tolist()
    once = pixels(pictures); shards_module._opened.cache_clear()
    with ThreadPoolExecutor(16) as pool: assert pixels(pool.map(pictures.__getitem__, order)) == [once[n] for n in order]


def test_few_files_stay_open(tmp_path):
    cc = folder_of(tmp_path/"many", 90, 1)
    index_shards(cc)
    pictures = Shards(cc)
    shards_module._opened.cache_clear(); before = len(os.listdir("/proc/self/fd"))
    assert len(pixels(pictures)) == 90 and 32 < len(os.listdir("/proc/self/fd")) - before <= 64
    shards_module._opened.cache_clear(); assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_sent_is_small(tmp_path):
    "Keys, captions and places are read from the index at the other end."
    index_shards(folder_of(tmp_path/"cc", 2, 300))
    pictures = Shards(tmp_path/"cc")
    assert len(pickle.dumps(pictures)) < 8 * len(pictures) and pictures.captions.nbytes > 30 * len(pictures)


def test_features_are_cached(cc, tiny, tmp_path):
    index_shards(cc)
    pictures = Shards(cc)
    first = encode_cached(tiny, pictures, cache=tmp_path/"cache", progress=False)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path/"cache").rglob("*.npy")}
    again = encode_cached(tiny, Shards(cc), cache=tmp_path/"cache", progress=False)
    assert made and {p: p.stat().st_mtime_ns for p in (tmp_path/"cache").rglob("*.npy")} == made and torch.equal(torch.as_tensor(first.global_), torch.as_tensor(again.global_))
    encode_cached(tiny, pictures.take(range(5)), cache=tmp_path/"cache", progress=False)
    assert len(list((tmp_path/"cache").rglob("*.npy"))) == 2 * len(made)


# ---- an index that is stopped, and files that change

KILL = """
import os, signal, sys
import foco.data.shards as shards
real = shards._write_whole
def write(path, content):
    if path.name == "00002.tar.parquet": (path.parent/("." + path.name + ".draft")).write_bytes(content[:50]); os.kill(os.getpid(), signal.SIGKILL)
    real(path, content)
shards._write_whole = write
shards.main([sys.argv[1], "--workers", "1"])
"""


def test_a_killed_index_goes_on(tmp_path):
    cc = folder_of(tmp_path/"cc", 5)
    assert subprocess.run([sys.executable, "-c", KILL, str(cc)], capture_output=True).returncode == -signal.SIGKILL
    parts = {p.name: p.stat().st_mtime_ns for p in (cc/".foco-index").glob("0*.parquet")}
    assert sorted(parts) == ["00000.tar.parquet", "00001.tar.parquet"]
    with pytest.raises(FileNotFoundError, match="3 of 5 shards in .* are not in the index .*: 00002.tar, 00003.tar, 00004.tar. Run foco_index_shards"): Shards(cc)
    told = index_shards(cc)
    assert (told.made, told.samples, told.bad) == (24, 40, 0) and len(Shards(cc)) == 40
    assert {n: (cc/".foco-index"/n).stat().st_mtime_ns for n in parts} == parts


def test_processes_make_the_same_index(cc, tmp_path):
    one, two = index_shards(cc, tmp_path/"one"), index_shards(cc, tmp_path/"two", workers=2)
    assert one._replace(seconds=0) == two._replace(seconds=0) and not (cc/".foco-index").exists()
    assert pixels(Shards(cc, tmp_path/"one")) == pixels(Shards(cc, tmp_path/"two"))
    for part in (tmp_path/"one").glob("*.parquet"): assert part.read_bytes() == (tmp_path/"two"/part.name).read_bytes()


def die(shard, index): os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_told(cc, monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(shards_module.multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(shards_module, "index_shard", die)
    with pytest.raises(RuntimeError, match="was killed .*fewer --workers"): index_shards(cc, workers=2)


def test_a_changed_shard_is_read_again(cc):
    index_shards(cc)
    write(cc/"00001.tar", sample("000010000", picture(7), "a new caption"))
    with pytest.raises(FileNotFoundError, match="1 of 3 shards in .* have changed since: 00001.tar"): Shards(cc)
    told = index_shards(cc)
    assert (told.made, told.samples) == (1, 17) and Shards(cc).captions[8].as_py() == "a new caption"


def test_a_shard_that_changes_later(cc):
    index_shards(cc)
    pictures, path, before = Shards(cc), cc/"00001.tar", (cc/"00001.tar").stat()
    content = bytearray(path.read_bytes()); place = int(pictures._offset[9]) + 200; content[place] ^= 255
    path.write_bytes(content); os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))     # same size, same time
    with pytest.raises(OSError, match="00001.tar, sample 000010001: this is not the picture that was indexed"): pictures[9]
    assert np.asarray(pictures[10]).shape == (36, 48, 3)
    path.touch(); shards_module._opened.cache_clear()
    with pytest.raises(OSError, match="00001.tar, sample 000010002: the file has changed since"): pictures[10]
    assert pictures.manifest()[1] == ["00001.tar", before.st_size, path.stat().st_mtime_ns] != ["00001.tar", before.st_size, before.st_mtime_ns]
    path.unlink()
    with pytest.raises(OSError, match="00001.tar, sample 000010002: .*No such file"): pictures[10]
    assert np.asarray(pictures[0]).shape == (36, 48, 3)


def test_a_damaged_part_is_named(cc):
    index_shards(cc)
    part = cc/".foco-index"/"00001.tar.parquet"
    content = bytearray(part.read_bytes()); content[4:200] = bytes(196); part.write_bytes(content)     # the footer is whole
    with pytest.raises(ValueError, match="(?s)00001.tar.parquet cannot be read .*foco_index_shards makes it again"): Shards(cc)
    part.unlink(); index_shards(cc); assert len(Shards(cc)) == 24


@pytest.mark.parametrize("end", [0, 300, 512, 700, 4000, -10_000])
def test_a_truncated_shard_is_named(cc, end):
    whole = (cc/"00001.tar").read_bytes(); (cc/"00001.tar").write_bytes(whole[:end])
    with pytest.raises(ValueError, match=r"1 of 3 shards in .* cannot be read \(00001.tar: .*get them again or move them away"): index_shards(cc, workers=1)
    assert sorted(p.name for p in (cc/".foco-index").glob("*.parquet")) == ["00000.tar.parquet", "00002.tar.parquet"]
    (cc/"00001.tar").write_bytes(whole); assert index_shards(cc).made == 8
    (cc/"00001.tar").write_bytes(whole[:end]); (cc/"00001.tar").unlink(); assert index_shards(cc).samples == 16


def test_a_shard_that_is_being_written(cc, monkeypatch):
    real = shards_module._look
    def slow(*a): (cc/"00001.tar").touch(); return real(*a)
    monkeypatch.setattr(shards_module, "_look", slow)
    with pytest.raises(ValueError, match="00001.tar: it changed while it was read"): index_shards(cc)


# ---- bad samples

def spoil(cc):
    good = picture(1)
    write(cc/"00003.tar", [("000030000.jpg", b""), ("000030000.txt", b"a"), ("000030001.jpg", b"<html>404"), ("000030001.txt", b"a"), ("000030002.jpg", good[:-200]), ("000030002.txt", b"a"),
                           ("000030003.jpg", good), ("000030004.txt", b"a"), ("x/000030005.JPG", good), ("x/000030005.json", b'{"caption": "two dogs on a green meadow"}'), ("000030006.jpg", good),
                           ("000030006.txt", b"\xff"), ("000030007.jpg", good), ("000030007.txt", b"first"), ("000030007.jpg", good), ("000030007.txt", b"second"), ("._000030007.jpg", b"junk")])


def test_every_problem_is_counted(cc, capsys):
    spoil(cc)
    with pytest.raises(ValueError, match="more than 5% of the samples are bad"): index_shards(cc)
    told = index_shards(cc, worst=.3)
    assert dict(told.problems) == {"broken picture": 3, "no caption": 1, "no picture": 1, "broken caption": 1, "duplicate key": 1} and told.samples == 24 + 9
    pictures = Shards(cc)
    assert list(pictures.keys)[24:] == ["000030005", "000030007"] and pictures.captions.to_pylist()[24:] == ["two dogs on a green meadow", "first"]
    assert main([str(cc), "--workers", "1"]) == 1 and "such as 000030000 (broken picture: 0 bytes), 000030001 (broken picture: an HTML page, not a picture)" in capsys.readouterr().err
    assert main([str(cc), "--workers", "1", "--worst", "0.3"]) == 0 and "33 samples: 26 good, 7 bad (no picture 1, broken picture 3," in capsys.readouterr().out


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_no_picture_is_too_strange(junk, at):
    "Whatever bytes come, they are a problem of one sample, never an error of the run."
    for content in (junk, picture(0)[:at] + junk, picture(0, "PNG")[:at] + junk, b"GIF89a" + junk, b"RIFF\0\0\0\0WEBPVP8 " + junk, b"II*\0\x08\0\0\0" + junk):
        place, _, _, problem, _ = shards_module._look({"jpg": content, "txt": b"a"}.get, {"jpg": shards_module.Place(0, len(content)), "txt": shards_module.Place(0, 1)}, False)
        assert problem in ("", "broken picture") and place.size == len(content)


def test_duplicates_across_shards(cc, tmp_path, rules, capsys):
    "The first good one stays; the index makes the captions usable again."
    write(cc/"00003.tar", sample("000000003", picture(50), "a late copy") + sample("000030000", picture(51), "a yellow boat on the wide river") + sample("000030001", b"", "broken, repeated below"))
    write(cc/"00004.tar", sample("000030001", picture(52), "a black cat on a white sofa"))
    told = index_shards(cc, worst=.2)
    assert dict(told.problems) == {"duplicate key": 1, "broken picture": 1} and "000000003 (duplicate key)" in told.examples
    pictures = Shards(cc)
    assert list(pictures.keys)[-2:] == ["000030000", "000030001"] and len(pictures) == 26 and pictures.captions[25].as_py() == "a black cat on a white sofa"
    assert pictures.sizes.tolist() == [8, 8, 8, 1, 1]
    with pytest.raises(ValueError, match="'000000003' stands more than once.*foco_index_shards makes an index"): read_captions(cc)
    assert decompose(["--captions", str(cc/".foco-index"), "--out", str(tmp_path/"pairs")]) == 0
    with warnings.catch_warnings(): warnings.simplefilter("ignore"); pairs = shard_pairs(cc, tmp_path/"pairs")
    assert [d.caption for d in pairs.decompositions] == pairs.images.captions.to_pylist() and len(pairs) == 26


# ---- the join

def test_pairs(cc, tmp_path, rules, recwarn):
    index_shards(cc)
    pairs = shard_pairs(cc, split(cc, tmp_path/"pairs", rules))
    assert (len(pairs), pairs.name, pairs.split) == (24, "cc", "train") and not [w for w in recwarn if "left out" in str(w.message)]
    assert [d.caption for d in pairs.decompositions] == pairs.images.captions.to_pylist() and len(pairs.decompositions[2:5]) == 3
    by_key = Store(tmp_path/"pairs").decompositions()
    assert [by_key[k] for k in pairs.keys] == list(pairs.decompositions) and "no such key" not in by_key and pairs.keys[3] in by_key
    few = open_pairs(str(cc), 9, 5, tmp_path/"pairs")
    assert list(few.keys) == list(pairs.keys)[:9] and pixels(few.images) == pixels(pairs.images)[:9]


def test_missing_decompositions(cc, tmp_path, rules):
    spoil(cc); index_shards(cc, worst=1)
    some = read_captions(cc/".foco-index")
    decompose_captions(some._replace(keys=some.keys[:20], texts=some.texts[:20]), tmp_path/"some", rules)
    with pytest.raises(ValueError, match="cc: 13 of 33 samples are left out: 7 are bad .*, 6 have no decomposition in .*more than 20%"): shard_pairs(cc, tmp_path/"some")
    with pytest.warns(UserWarning, match="cc: 13 of 33 samples are left out: 7 are bad"): assert len(shard_pairs(cc, tmp_path/"some", worst=.5)) == 20
    assert len(shard_pairs(cc, tmp_path/"some", n=20)) == 20                    # a trial: the rest is not asked for
    with pytest.warns(UserWarning, match="21 pictures were asked for, 20 are used"): assert len(shard_pairs(cc, tmp_path/"some", n=21, worst=.5)) == 20
    with pytest.raises(ValueError, match="foco_decompose --captions .*foco-index --out PAIRS"): data_source(str(cc)).training_pairs(5)


def test_other_captions_are_refused(cc, tmp_path, rules):
    index_shards(cc); split(cc, tmp_path/"pairs", rules)
    write(cc/"00002.tar", [m for i in range(8) for m in sample(f"00002{i:04d}", picture(i), "a brown dog on green grass" if i == 4 else SAID[i % 4] + " number 2")]); index_shards(cc)
    with pytest.raises(ValueError, match="cc: picture 000020004 is captioned 'a brown dog on green grass', but the store has 'a man in a straw hat"): shard_pairs(cc, tmp_path/"pairs")


def test_no_record_is_made_before_it_is_asked_for(cc, tmp_path, rules, monkeypatch):
    import foco.decomposers.store as store
    index_shards(cc); split(cc, tmp_path/"pairs", rules)
    made, real = [], store.Decomposition
    monkeypatch.setattr(store, "Decomposition", lambda *a: made.append(a) or real(*a))
    pairs = shard_pairs(cc, tmp_path/"pairs")
    assert len(pairs) == 24 and not made
    assert pairs.decompositions[5].caption and len(made) == 1


# ---- the order

@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 2**31), st.integers(0, 50), st.integers(1, 14))
def test_order_is_a_permutation_by_groups(sizes, seed, epoch, group):
    order = epoch_order(sizes, seed, epoch, group)
    assert sorted(order.tolist()) == list(range(sum(sizes))) and np.array_equal(order, epoch_order(sizes, seed, epoch, group))
    shard = np.repeat(np.arange(len(sizes)), sizes)[order]
    seen = [set() for _ in sizes]
    for at, s in enumerate(shard): seen[s].add(at)
    spans = sorted((min(p), max(p)) for p in seen if p)
    active = max((sum(a <= at <= b for a, b in spans) for at in range(len(order))), default=0)
    assert active <= group      # never more shards in use than a group has


def test_one_group_is_a_full_shuffle():
    "Every place is equally likely for every sample."
    first = np.array([epoch_order([3, 3, 3], 1, e, 3) for e in range(3000)])
    counts = np.array([[np.sum(first[:, at] == n) for n in range(9)] for at in range(9)])
    assert np.abs(counts - 3000 / 9).max() < 5 * np.sqrt(3000 / 9)
