"Methods that attend: Context-I2W, PrediCIR, MoA, HIT. Heavier than what their notebooks check."
from types import SimpleNamespace

import pytest
import torch

from foco.backbones import ImageFeatures, load_backbone
from foco.decomposers import rules
from foco.methods.context_i2w import ContextI2W, cut_out, find_phrases
from foco.methods.hit import HIT
from foco.methods.method import batch_rows, captioned
from foco.methods.moa import MoA
from foco.methods.predicir import PrediCIR
from foco.toyworld.source import training_pairs

SMALL = {ContextI2W: {"hidden": 128}, PrediCIR: {"hidden": 128}, MoA: {"hidden": 128, "objects": 4}, HIT: {"hidden": 128, "levels": "4,1"}}
METHODS = pytest.mark.parametrize("cls", SMALL, ids=lambda c: c.name)
WITH_SENTENCE = (ContextI2W, MoA, HIT)


@pytest.fixture(scope="module")
def few(tiny): return captioned(tiny, training_pairs(24))


def train(cls, backbone, data, steps, batch=16, lr=2e-3, seed=0, **settings):
    torch.manual_seed(seed)
    method = cls(backbone, **{"dropout": 0., **SMALL[cls], **settings}).train()
    method.prepare(data, torch.Generator().manual_seed(seed))
    optimizer, losses = torch.optim.AdamW(method.parameters(), lr), []
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        rows = batch_rows(len(data), batch, step, seed)
        loss, log = method.loss(data, rows, data.images[rows].to(torch.float32), torch.Generator().manual_seed(step))
        assert all(isinstance(v, float) for v in log.values())
        optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
    return method.eval(), losses


@METHODS
def test_overfits_a_tiny_set(cls, tiny, few):
    "Read alone, the words of 24 pictures find their own picture among them."
    method, losses = train(cls, tiny, few, 40, batch=24, lr=4e-3, **({"sentence": "photo"} if cls in WITH_SENTENCE else {}))
    images = few.images[:].to(torch.float32)
    said = method.describe(images)
    found = (said @ images.global_.T).argmax(1) == torch.arange(len(few))
    assert found.float().mean() > .6, (found.float().mean(), losses[::10])
    assert sum(losses[-5:]) < .5 * sum(losses[:5])


@METHODS
def test_one_seed_one_method(cls, tiny, few):
    a, b, c = (train(cls, tiny, few, 3, seed=s, dropout=.1)[0].state_dict() for s in (0, 0, 1))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


@METHODS
def test_weights_are_all_it_takes(cls, tiny, few):
    "A method that reads another's weights composes as it does, without being prepared; batches do not matter."
    method, _ = train(cls, tiny, few, 3)
    other = cls(tiny, dropout=0., **SMALL[cls]).eval()
    other.load_state_dict(method.state_dict())
    images, texts = few.images[:6].to(torch.float32), ["on the sand", "a red star", "", "the fish is gone", "costs $5 * {text} {word}", "on the sand"]
    q = method.compose(images, texts)
    torch.testing.assert_close(other.compose(images, texts), q)
    torch.testing.assert_close(torch.cat([method.compose(images[i], [texts[i]]) for i in range(6)]), q, atol=1e-5, rtol=0)
    torch.testing.assert_close(q.norm(dim=1), torch.ones(6))
    assert not any(k.startswith("backbone") for k in method.state_dict())


@METHODS
def test_depends_on_picture_text_and_patches(cls, tiny, few):
    method, _ = train(cls, tiny, few, 5, lr=5e-3)
    images = few.images[:2].to(torch.float32)
    a, b, c = method.compose(images[[0, 1, 0]], ["on the sand", "on the sand", "the fish is gone"])
    assert a @ b < .9999 and a @ c < .9999
    other = ImageFeatures(images.global_[:1], images.patches[1:])
    assert not torch.allclose(method.compose(other, ["on the sand"])[0], a, atol=1e-5)
    texts = tiny.encode_texts(["on the sand", "the fish is gone"])
    all_ = few.images[:].to(torch.float32)
    with torch.no_grad(): v, w = (method.words(all_, t.expand(len(few), -1)) for t in texts)
    assert not torch.allclose(v, w, atol=1e-6)                  # not the sentence alone: the words of some pictures, too


def test_gates_start_where_they_should(tiny, few):
    torch.manual_seed(0)
    images, texts = few.images[:2].to(torch.float32), few.texts[:2]
    other = ImageFeatures(images.global_, images.patches.flip(0))
    with torch.no_grad():
        closed = ContextI2W(tiny).eval()
        assert closed.gate == 0 and torch.equal(closed.words(images, texts), closed.words(other, texts))
        half = PrediCIR(tiny).eval()
        assert torch.all(half.mix(images.global_, images.patches, texts)[1] == .5)
        alike = HIT(tiny, levels="4,1").eval()
        for _, weights in alike.chosen(images, texts): torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[1]))


@pytest.mark.parametrize("cls", WITH_SENTENCE, ids=lambda c: c.name)
def test_sentences(cls, tiny, few):
    g = lambda: torch.Generator().manual_seed(0)
    for sentence in ("caption", "photo"):
        method = cls(tiny, sentence=sentence); method.prepare(few, g())
        prompts = method.sentences(torch.arange(3), g())
        assert sorted(prompts.fill[prompts.fill >= 0].tolist()) == sorted([*range(method.n_words)] * 3)
    assert len(set(map(tuple, method.sentences(torch.arange(3), g()).ids.tolist()))) == 1      # a photo of ▢, for every picture
    method.settings["sentence"], draw = "either", torch.Generator().manual_seed(0)
    assert len({tuple(map(tuple, method.sentences(torch.arange(3), draw).ids.tolist())) for _ in range(12)}) == 2


def test_chunks_come_from_the_parser(monkeypatch):
    "Chunks without a content word, and those that are the whole caption, are no candidates."
    def chunk(text, said): return SimpleNamespace(text=said, start_char=text.index(said), end_char=text.index(said) + len(said))
    def pipe(texts, batch_size): return [SimpleNamespace(text=t, noun_chunks=[chunk(t, c) for c in CHUNKS[t]]) for t in texts]
    monkeypatch.setattr(rules, "load_parser", lambda: SimpleNamespace(pipe=pipe))
    CHUNKS = {"it is a red star on the grass": ["it", "a red star", "the grass"], "run": [], "a red star": ["a red star"]}
    assert find_phrases(list(CHUNKS), [["red"], [], []], "chunks") == [[(6, 16), (20, 29)], [(0, 3)], [(2, 5), (6, 10)]]


def test_a_gap_beyond_the_context(tiny):
    prompts = cut_out(tiny, ["red " * 38 + "star on grass"], [(152, 156)], 3)
    assert (prompts.fill >= 0).sum() == 3 and prompts.fill[0, 1] == 0


def test_filter_follows_the_text(tiny, few):
    method, _ = train(MoA, tiny, few, 10, lr=5e-3, objects=8, kept=1)
    images = few.images[:].to(torch.float32)
    with torch.no_grad(): a, b = (method.words(images, tiny.encode_texts([t]).expand(len(images), -1))[:, 1] for t in ("the fish is gone", "on the sand"))
    assert (a - b).abs().amax(1).gt(1e-6).any()


@pytest.fixture(scope="module")
def large(on_cpu): return load_backbone("ViT-B-32", "random")


@METHODS
def test_another_backbone(cls, large):
    h = large
    x = torch.nn.functional.normalize(torch.randn(3, h.P + 1, h.D, generator=torch.Generator().manual_seed(0)), dim=-1)
    method = cls(h).eval()
    images = ImageFeatures(x[:, 0], x[:, 1:])
    q = method.compose(images, ["on the sand", "a red star", ""])
    torch.testing.assert_close(q.norm(dim=1), torch.ones(3))
    words = method.words(images, x[:, 1])
    assert words.shape == (3, method.n_words, 512)
    words.sum().backward()
    assert next(method.parameters()).grad is not None
