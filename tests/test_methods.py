"""The trained methods of pseudo-words: they learn, repeat themselves, take any text, run on any tower."""
import pytest, torch
import torch.nn.functional as F

from foco.backbones import load_backbone
from foco.methods.lincir import LinCIR
from foco.methods.method import batch_rows, captioned
from foco.methods.pdv import PDV
from foco.methods.pic2word import Pic2Word
from foco.methods.searle import SEARLE, SEARLEOTI
from foco.toyworld.source import training_pairs

SMALL = {"n_inverted": 32, "n_concepts": 16, "n_phrases": 2, "steps": 10, "lr": .05}
METHODS = {"Pic2Word": (Pic2Word, {}), "LinCIR": (LinCIR, {"noise": .5}), "SEARLE": (SEARLE, SMALL)}
BELOW = {"Pic2Word": .3, "LinCIR": .55, "SEARLE": 3.}        # loss after 40 steps; first: about 4, 1.0, 6
FOUND = {"Pic2Word": .8, "LinCIR": .3, "SEARLE": .7}         # of 32 pictures, nearest to what is made of them; by chance .03


@pytest.fixture(scope="module")
def data(tiny): return captioned(tiny, training_pairs(64))


def train(method, data, steps=40, lr=2e-3, batch=32):
    method.prepare(data, torch.Generator().manual_seed(0))
    optimizer, losses = torch.optim.AdamW(method.parameters(), lr=lr), []
    for step in range(steps):
        rows = batch_rows(len(data), batch, step, seed=0)
        torch.manual_seed(step)
        loss, log = method.loss(data, rows, next(data.stream([rows])), torch.Generator().manual_seed(step))
        assert all(isinstance(v, float) for v in log.values())
        optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
    return losses


def made(name, backbone, **settings):
    cls, own = METHODS[name]
    torch.manual_seed(0)
    return cls(backbone, **own, **settings)


@pytest.fixture(scope="module", params=METHODS)
def trained(request, tiny, data):
    method = made(request.param, tiny)
    return request.param, method, train(method, data)


def test_overfits_a_small_set(trained, data):
    name, method, losses = trained
    assert losses[-1] < BELOW[name] < losses[0]
    images = next(data.stream([torch.arange(32)]))
    if name == "SEARLE": made_of, wanted = method.phi(method.inverted), F.normalize(method.found, dim=1)            # words guessed, words found
    else: made_of, wanted = method.eval().describe(images), images.global_
    assert (made_of @ wanted.T).argmax(1).eq(torch.arange(32)).float().mean() > FOUND[name]


def test_composes_unit_rows_from_picture_and_text(trained, data):
    _, method, _ = trained
    images = next(data.stream([torch.arange(3)]))
    q = method.eval().compose(images, ["on the sand"] * 3)
    torch.testing.assert_close(q.norm(dim=1), torch.ones(3))
    assert (q[0] - q[1]).abs().max() > .01 and (q - method.compose(images, ["in the snow"] * 3)).abs().max() > .01
    torch.testing.assert_close(method.compose(images[[1]], ["on the sand"]), q[[1]], atol=1e-5, rtol=0)         # batch-mates do not matter
    assert not q.requires_grad and not method.describe(images).requires_grad
    p = PDV(method).compose(images, ["on the sand"] * 3)
    torch.testing.assert_close(p.norm(dim=1), torch.ones(3)); assert (p - q).abs().max() > .01


@pytest.mark.parametrize("text", ["costs $5", "2 * 2", "<|endoftext|> red", "{word} {text}", "▢", ""])
def test_users_write_what_they_like(trained, data, text):
    _, method, _ = trained
    images, alone = next(data.stream([torch.arange(2)])), method.eval().prompt(text)
    assert [isinstance(part, int) for part in alone].count(True) == 1 and (not text or text in alone)
    q = method.compose(images, [text, "on the sand"])
    assert q.isfinite().all() and (q[1] - method.compose(images[[1]], ["on the sand"])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_one_seed_gives_the_same_weights_and_files_hold_them(name, tiny, data):
    a, b = made(name, tiny, dropout=.1), made(name, tiny, dropout=.1)
    assert train(a, data, 2) == train(b, data, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    other = made(name, tiny, dropout=.1); other.load_state_dict(a.state_dict())                   # inference needs nothing else
    images = next(data.stream([torch.arange(2)]))
    assert torch.equal(other.eval().compose(images, ["on the sand"] * 2), a.eval().compose(images, ["on the sand"] * 2))


def test_inversion_at_query_time_needs_its_buffers_alone(tiny, data):
    oti = SEARLEOTI(tiny, **SMALL); oti.prepare(data, torch.Generator().manual_seed(0))
    other = SEARLEOTI(tiny, **SMALL); other.load_state_dict(oti.state_dict())
    images = next(data.stream([torch.arange(2)]))
    q = oti.compose(images, ["on the sand", "costs $5"])
    torch.testing.assert_close(other.compose(images, ["on the sand", "costs $5"]), q, atol=1e-5, rtol=0)
    torch.testing.assert_close(oti.compose(images[[1]], ["costs $5"]), q[[1]], atol=1e-4, rtol=0)
    torch.testing.assert_close(PDV(oti, beta=1.).compose(images, ["on the sand", "costs $5"]), q, atol=1e-4, rtol=0)


def test_another_tower_runs_through():
    backbone = load_backbone("ViT-B-32", "random")
    data = captioned(backbone, training_pairs(6))
    small = {"n_inverted": 4, "n_concepts": 2, "n_phrases": 1, "steps": 1}
    for cls, own in ((Pic2Word, {}), (LinCIR, {}), (SEARLE, small)):
        method = cls(backbone, **own)
        assert len(train(method, data, steps=1, batch=4)) == 1
        assert method.eval().compose(next(data.stream([torch.arange(2)])), ["costs $5", "on the sand"]).isfinite().all()
