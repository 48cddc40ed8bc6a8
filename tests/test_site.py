"""The documentation site: everything is in it, nothing hidden is, and a link that leads nowhere stops it.

The site itself is built only where the extra `docs` is installed, which `dev` leaves out: building takes minutes.
"""
import json, re, runpy, subprocess, sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT/"docs"))
import make_site as site

NEEDED = ["sphinx", "myst_nb", "furo", "sphinx-mathjax-offline"]
MISSING = [m for m in NEEDED if find_spec(m) is None]
with_sphinx = pytest.mark.skipif(bool(MISSING), reason=f"the site needs {', '.join(MISSING)}: pip install 'foco[docs]'")


def markdown(text): return dict(cell_type="markdown", id="m", metadata={}, source=text)
def code(text, *outputs): return dict(cell_type="code", id="c", metadata={}, execution_count=None, source=text, outputs=list(outputs))
def book(*cells): return dict(cells=list(cells), metadata={}, nbformat=4, nbformat_minor=5)


# ---- what is in it

@pytest.fixture(scope="module")
def pages(): return site.stage()


def test_every_notebook_module_and_card_has_a_page(pages):
    books = {p.relative_to(ROOT/"nbs").as_posix() for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    modules = {"api/" + ".".join(p.relative_to(ROOT).with_suffix("").parts) + ".rst" for p in (ROOT/"foco").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")}
    cards = {f"data_cards/{p.name}" for p in (ROOT/"data_cards").glob("*.md")}
    assert len(books) > 60 and len(modules) > 60 and len(cards) > 7
    assert {p for p in pages if p.endswith(".ipynb")} == books
    assert {p for p in pages if p.startswith("api/")} == modules | {"api/index.md"}
    assert {p for p in pages if p.startswith("data_cards/")} == cards | {"data_cards/index.md"}


def test_notebook_and_api_name_each_other(pages):
    assert "This notebook is {py:mod}`foco.data.pairs`." in json.loads(pages["data/00_pairs.ipynb"])["cells"][0]["source"]
    assert ":doc:`nbs/data/00_pairs </data/00_pairs>`" in pages["api/foco.data.pairs.rst"] and ".. automodule:: foco.data.pairs" in pages["api/foco.data.pairs.rst"]
    assert "This notebook is" not in pages["index.ipynb"]
    assert "- [foco.data.pairs](foco.data.pairs.rst): " in pages["api/index.md"] and "- [Pairs](00_pairs.ipynb): " in pages["data/index.md"]


def test_what_is_hidden_stays_hidden(pages):
    shown = [c["source"] for p, text in pages.items() if p.endswith(".ipynb") for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert len(shown) > 800 and not [s for s in shown if re.search(r"^\s*#\s*\|", s, re.M) or not s.strip()]
    hidden = [site.source(c) for p in site.notebooks() for c in site.load(p)["cells"] if c["cell_type"] == "code" and site.source(c).startswith("#| hide")]
    assert len(hidden) > 300 and not {re.sub(r"^#\|.*\n", "", h).strip() for h in hidden} & {s.strip() for s in shown}


def test_a_notebook_is_staged():
    nb = book(markdown("# T\n> [a](../a.ipynb#b) `[c](c)`"), code("#| default_exp x.y"), code("#| hide\nsecret"), code("#|export\n#| eval: false\n1 # | 2", "an output"))
    staged, targets = site.stage_notebook(nb, "nbs/data/n.ipynb")
    assert [c["source"] for c in staged["cells"]] == ["# T\n> [a](../a.ipynb#b) `[c](c)`\n\nThis notebook is {py:mod}`foco.x.y`.", "1 # | 2"] and staged["cells"][1]["outputs"] == ["an output"]
    assert targets == ["nbs/a.ipynb"] and len(nb["cells"]) == 4
    with pytest.raises(ValueError, match=r"n.ipynb: the site does not know \['hide_input'\]"): site.stage_notebook(book(code("#| hide_input\n1")), "n.ipynb")


@pytest.mark.parametrize("where,link,page", [
    ("nbs/index.ipynb", "data/00_pairs.ipynb", "data/00_pairs.ipynb"), ("nbs/index.ipynb", "methods", "methods/index.md"), ("nbs/index.ipynb", "../data_cards/cc3m.md", "data_cards/cc3m.md"),
    ("nbs/index.ipynb", "../LICENSE", "LICENSE"), ("nbs/index.ipynb", "../data_cards", "data_cards/index.md"), ("nbs/paper/a.ipynb", "../../README.md", "../index.ipynb"), ("nbs/paper/a.ipynb", "b.ipynb#c", "b.ipynb#c"),
    ("nbs/paper/a.ipynb", "../data", "../data/index.md"), ("data_cards/a.md", "../nbs/data/10_check.ipynb", "../data/10_check.ipynb"), ("nbs/a.ipynb", "https://a.org/b", "https://a.org/b"), ("nbs/a.ipynb", "#c", "#c")])
def test_links_move_with_the_pages(where, link, page): assert site.move_links(f"[x]({link})\n```\n[y](z)\n```", where)[0] == f"[x]({page})\n```\n[y](z)\n```"


def test_a_link_to_no_file_stops_it(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path/"nbs").mkdir()
    (tmp_path/"a.txt").write_text("a")
    def write(text): (tmp_path/"nbs"/"index.ipynb").write_text(json.dumps(book(markdown(text))), encoding="utf-8")
    write("# T\n[a](../a.txt)")
    assert site.stage()["a.txt"] == b"a"
    write("# T\n[a](../a.txt) [b](b.ipynb)")
    with pytest.raises(ValueError, match="lead nowhere: nbs/index.ipynb links to nbs/b.ipynb$"): site.stage()


# ---- the check of built pages

def test_links_of_built_pages_are_checked(tmp_path):
    (tmp_path/"sub").mkdir()
    (tmp_path/"a.css").write_text("")
    (tmp_path/"sub"/"index.html").write_text("<h1 id=top-ä>x</h1>")
    page = tmp_path/"index.html"
    page.write_text("<link href='a.css?v=1'><p id=here><a href='#here'></a><a href='sub/#top-%C3%A4'></a><a href='https://a.org'></a><img src='data:image/png;base64,AA'>", encoding="utf-8")
    assert site.check_links(tmp_path) == ([], {"pages": 2, "links within the site": 2, "of them to an anchor": 2, "files loaded": 1, "links to elsewhere": 1})
    page.write_text("<a href='#gone'></a><a href='b.html'></a><a href='../c.html'></a><img src='d.png'><script src='https://a.org/e.js'></script>")
    complaints, _ = site.check_links(tmp_path)
    assert [c.removeprefix("index.html ") for c in complaints] == ["links to #gone: no such anchor", "links to b.html: no such file", "links to ../c.html: no such file", "links to d.png: no such file", "loads https://a.org/e.js: the site must work without network"]


def test_no_other_folder_is_replaced(tmp_path):
    (tmp_path/"mine.txt").write_text("")
    with pytest.raises(SystemExit, match="holds something other than a site"): site.build(tmp_path)
    assert (tmp_path/"mine.txt").exists()


# ---- settings, and what is made of docstrings and comments

@pytest.fixture(scope="module")
def conf():
    before = list(sys.path)
    yield runpy.run_path(str(ROOT/"docs"/"conf.py"))
    sys.path[:] = before


def test_settings(conf):
    assert conf["nb_execution_mode"] == "off" and conf["nitpicky"] and "sphinx.ext.intersphinx" not in conf["extensions"]
    listed = re.search(r"^docs = \[(.*?)^\]", (ROOT/"pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)[1]
    assert all(f'"{p.replace("_", "-")}' in listed for p in NEEDED) and {"myst_nb", "sphinx-mathjax-offline"} <= set(conf["extensions"]) and conf["html_theme"] == "furo"
    assert "_site/" in (ROOT/".gitignore").read_text(encoding="utf-8").split()


def one(x, y): # (B, D) -> (B,)
    "Docstring."

def several(x: int, y_z: int = 0, # first `line`
            *rest) -> str: # second
    "Docstring."

def inside(x):
    # not about parameters
    return x

class Made:
    def __init__(self, n: int): # a number
        self.n = n # not this

@dataclass
class Base:
    a: int = 0 # of the base

@dataclass
class Fields(Base):
    b: int = 0 # of its own
    c: int = 0
    def f(self): pass # not this


def test_comments_beside_parameters(conf):
    of = conf["comments_of"]
    assert of(one) == [([], "(B, D) -> (B,)")] and of(inside) == [] and of(Made) == [([], "a number")] and of(property(one)) == of(one)
    assert of(several) == [(["x", "y_z"], "first `line`"), (["rest"], "second")]
    assert of(Fields) == [(["a"], "of the base"), (["b"], "of its own")] and of(len) == of(str) == []


def test_members_that_are_shown(conf):
    def shown(obj, skip=False): return not conf["choose"](None, "class", "n", obj, skip, None)
    def ours(): pass
    ours.__module__ = "foco.x"
    assert shown(ours) and shown(property(ours)) and shown(cached_property(ours)) and shown(classmethod(ours)) and not shown(ours, skip=True)
    assert not shown(one) and not shown(cached_property(one)) and not shown(3)
    assert conf["say_less"](None, "class", "n", Thread, None, "(a)", "") == ("", "") and conf["say_less"](None, "function", "n", one, None, "(a)", "") is None


def test_docstrings_are_plain_text(conf):
    assert conf["to_rst"]("*a* |b| c_ `d_e`s") == r"\*a\* \|b\| c\_ \ ``d_e``\ s"


# ---- the whole site

def run_sphinx(pages, work): return subprocess.run([sys.executable, "-c", f"import sys; sys.path.append('docs'); import make_site as m, json; sys.exit(m.run_sphinx(json.loads(sys.stdin.read()), m.Path({str(work)!r})))"], cwd=ROOT, input=json.dumps(pages), capture_output=True, text=True)


@with_sphinx
def test_a_reference_to_nothing_stops_it(tmp_path):
    done = run_sphinx({"index.md": "# T\n[a](#a) {py:mod}`foco.nothing` {doc}`b`"}, tmp_path)
    assert done.returncode and all(f in done.stderr for f in ("'a'", "foco.nothing", "unknown document: 'b'"))


@with_sphinx
def test_the_site(tmp_path):
    done = subprocess.run([sys.executable, "docs/make_site.py", "--out", str(tmp_path/"site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    front, api = ((tmp_path/"site"/p).read_text(encoding="utf-8") for p in ("index.html", "api/foco.complete.html"))
    assert "Composed image retrieval" in front and 'id="foco.complete.FoCo"' in api and 'href="../03_complete.html"' in api
    assert (tmp_path/"site"/"_static"/"mathjax"/"tex-chtml.js").is_file() and "cdn." not in front and (tmp_path/"site"/"searchindex.js").is_file()
