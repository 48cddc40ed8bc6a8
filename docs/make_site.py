"""Make the documentation site: the notebooks as they were committed, the API, the data cards, and a search over all of it.

    pip install -e '.[docs]'
    python docs/make_site.py                     then open _site/index.html, or
    python -m http.server -d _site           to see excerpts among the results of a search

Nothing is executed and nothing is fetched. The sources are staged into _proc/site, laid out as the site is; `_site` is
replaced only if Sphinx had no complaint and every link within the site leads somewhere.
"""
import argparse, json, os, posixpath, re, shutil, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ROOMS = {"data": "Data sets", "decomposers": "Decomposers", "galleries": "Galleries", "methods": "Other methods", "paper": "Tables and figures", "toyworld": "ToyWorld", "training": "Training"}
DIRECTIVE = re.compile(r"\s*#\s*\|\s*(\w+):?\s*(\S*)")
EXPORTS = {"export", "exports", "exporti"}
KNOWN = EXPORTS | {"default_exp", "hide", "eval", "notest", "slow"}


# ---- what there is

def notebooks(): return [p for p in sorted((ROOT/"nbs").rglob("*.ipynb")) if not any(part[0] in "._" for part in p.relative_to(ROOT).parts)]
def cards(): return sorted((ROOT/"data_cards").glob("*.md"))
def load(path): return json.loads(path.read_text(encoding="utf-8"))
def name(path): return path.relative_to(ROOT).as_posix()
def source(cell): return "".join(cell["source"])
def directives(cell): return dict(m.groups() for l in source(cell).splitlines() if (m := DIRECTIVE.match(l)))


def module_of(nb):
    "The module that a notebook exports, or None."
    found = [directives(c) for c in nb["cells"] if c["cell_type"] == "code"]
    return next(("foco." + d["default_exp"] for d in found if "default_exp" in d), None) if any(EXPORTS & set(d) for d in found) else None


# ---- from the repository to the site: nbs/ is the top, and nbs/index.ipynb, of which README.md is made, the front page

def page_of(path):
    "Where a file or folder of the repository stands in the site; both are named from their roots."
    if path in ("README.md", "nbs"): return "index.ipynb"
    if path == "data_cards" or (path.startswith("nbs/") and (ROOT/path).is_dir()): path += "/index.md"
    return path.removeprefix("nbs/")


def move_links(markdown, where):
    "Rewrite the relative links of a text that stands at `where`, outside code; returns it, and the files that it links to."
    targets = []
    def move(m):
        if re.match(r"[\w+.-]+:|#", m[2]): return m[0]
        path, *anchor = m[2].split("#")
        targets.append(posixpath.normpath(posixpath.join(posixpath.dirname(where), path)))
        moved = posixpath.relpath(page_of(targets[-1]), posixpath.dirname(page_of(where)) or ".")
        return f"{m[1]}{'#'.join([moved, *anchor])})"
    parts = re.split(r"(^```.*?^```$|(?<!\[)`[^`\n]+`)", markdown, flags=re.M | re.S)
    return "".join(p if i % 2 else re.sub(r"(\]\()([^)\s]+)\)", move, p) for i, p in enumerate(parts)), targets


def stage_notebook(nb, where):
    "A notebook as the site shows it: no hidden cells, no directives, links moved, its module named; and the files that it links to."
    cells, targets, module = [], [], module_of(nb)
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            text, found = move_links(source(cell), where)
            targets += found
            if module and not cells: text += f"\n\nThis notebook is {{py:mod}}`{module}`."
        elif cell["cell_type"] == "code":
            said = set(directives(cell))
            if said - KNOWN: raise ValueError(f"{where}: the site does not know {sorted(said - KNOWN)}; expected directives of {sorted(KNOWN)}. Say in docs/make_site.py what they do")
            text = "" if "hide" in said else "\n".join(l for l in source(cell).splitlines() if not DIRECTIVE.match(l)).strip("\n")
        if text: cells.append(cell | {"source": text, "metadata": {}})
    return nb | {"cells": cells, "metadata": nb["metadata"] | {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}}, targets


def stage_card(text, where):
    "A data card with its front matter at the end, where it can be read; and the files that it links to."
    _, front, body = text.split("---\n", 2)
    body, targets = move_links(body.strip(), where)
    return f"{body}\n\n## As data\n\nThe front matter, which `load_card` reads:\n\n```yaml\n{front.strip()}\n```\n", targets


def toctree(names, *options): return "\n".join(["```{toctree}", ":titlesonly:", ":hidden:", *options, "", *names, "```"])


def summary_of(nb):
    "The title of a notebook and the line below it."
    first = source(nb["cells"][0])
    return re.match(r"# (.+)", first)[1], (re.search(r"^> (.+)", first, re.M) or ["", ""])[1]


def api_page(module, page):
    page = page.removesuffix(".ipynb")
    return f"{module}\n{'=' * len(module)}\n\nMade from the notebook :doc:`nbs/{page} </{page}>`.\n\n.. automodule:: {module}\n"


def stage():
    "Every source of the site: {where in the site: text or bytes}."
    pages, links, rooms, modules = {}, [], {}, {}
    for path in notebooks():
        nb, page = load(path), page_of(name(path))
        pages[page], found = stage_notebook(nb, name(path))
        links += [(name(path), t) for t in found]
        rooms.setdefault(posixpath.dirname(page), []).append(path.stem)
        if module := module_of(nb): modules[module] = page
    for path in cards():
        pages[name(path)], found = stage_card(path.read_text(encoding="utf-8"), name(path))
        links += [(name(path), t) for t in found]
    top = [n for n in rooms.pop("") if n != "index"]
    trees = {"Notebooks": top, "Rooms": [f"{r}/index" for r in rooms], "Reference": ["api/index", "data_cards/index"]}
    said = {page: summary_of(nb) for page, nb in pages.items() if page.endswith(".ipynb")}
    pages["index.ipynb"]["cells"].append({"cell_type": "markdown", "id": "toctrees", "metadata": {}, "source": "\n\n".join(toctree(names, f":caption: {c}") for c, names in trees.items())})
    for room, names in rooms.items(): pages[f"{room}/index.md"] = "\n".join([f"# {ROOMS.get(room, room)}", "", *("- [{1}]({0}.ipynb): {2}".format(n, *said[f"{room}/{n}.ipynb"]) for n in names), "", toctree(names), ""])
    pages["data_cards/index.md"] = "\n".join(["# Data cards", "", "Where each data set comes from, how it must lie, and what is known to be wrong with it.", "", *(f"- [](./{p.name})" for p in cards()), "", toctree([p.stem for p in cards()]), ""])
    pages["api/index.md"] = "\n".join(["# API", "", "```{eval-rst}", ".. automodule:: foco", "   :no-members:", "```", "", *(f"- [{m}]({m}.rst): {said[modules[m]][1]}" for m in sorted(modules)), "", toctree(sorted(modules)), ""])
    for module, page in modules.items(): pages[f"api/{module}.rst"] = api_page(module, page)
    pages = {where: json.dumps(page) if isinstance(page, dict) else page for where, page in pages.items()}
    pages |= {t: (ROOT/t).read_bytes() for _, t in links if page_of(t) == t and t not in pages and (ROOT/t).is_file()} # pictures, the licence
    if nowhere := [f"{where} links to {t}" for where, t in links if page_of(t) not in pages]: raise ValueError("links that lead nowhere: " + "; ".join(nowhere))
    return pages


# ---- the links of a built site

class Page(HTMLParser):
    "What an HTML page links to, what it loads, and where it can be linked to."
    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids = [], [], {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        if tag == "a" and attrs.get("href"): self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("href"): self.loads.append(attrs["href"])
        elif attrs.get("src"): self.loads.append(attrs["src"])


def check_links(site):
    "Complaints about the HTML pages of a site, and counts: links within it lead to a file and an anchor, and nothing is loaded from elsewhere."
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html")) if "_static" not in p.parts}
    complaints, counts = [], {"pages": len(pages), "links within the site": 0, "of them to an anchor": 0, "files loaded": 0, "links to elsewhere": 0}
    for path, page in pages.items():
        for url, loaded in [(u, False) for u in page.links] + [(u, True) for u in page.loads]:
            parts, where = urlsplit(url), path.relative_to(site).as_posix()
            if parts.scheme == "data": continue
            if parts.scheme or parts.netloc:
                counts["links to elsewhere"] += not loaded
                if loaded: complaints.append(f"{where} loads {url}: the site must work without network")
                continue
            counts["files loaded" if loaded else "links within the site"] += 1
            target = Path(os.path.normpath(path.parent/unquote(parts.path))) if parts.path else path
            if target.is_dir(): target = target/"index.html"
            if not target.is_relative_to(site) or not target.is_file(): complaints.append(f"{where} links to {url}: no such file")
            elif parts.fragment and target in pages:
                counts["of them to an anchor"] += 1
                if unquote(parts.fragment) not in pages[target].ids: complaints.append(f"{where} links to {url}: no such anchor")
    return complaints, counts


# ---- the command

def run_sphinx(pages, work):
    "Write the sources into `work`, build work/html from nothing, since what has not changed isn't complained about again; returns the exit status."
    from sphinx.cmd.build import build_main
    shutil.rmtree(work, ignore_errors=True)
    for where, page in pages.items():
        path = work/"src"/where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page.encode() if isinstance(page, str) else page)
    # myst-nb leaves pictures in jupyter_execute/ beside the folder that it builds into: within `work`, too
    return build_main(["-b", "html", "-c", str(DOCS), "-d", str(work/"doctrees"), "-q", "-W", "--keep-going", str(work/"src"), str(work/"html")])


def build(out, work=ROOT/"_proc"/"site"):
    "Stage, build, check, publish; returns the exit status."
    if out.exists() and any(out.iterdir()) and not (out/"objects.inv").is_file(): raise SystemExit(f"--out {out} holds something other than a site: name a folder that may be replaced")
    if status := run_sphinx(stage(), work): return status
    complaints, counts = check_links(work/"html")
    print(*complaints, ", ".join(f"{n} {what}" for what, n in counts.items()), sep="\n")
    if complaints: return 1
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(work/"html", out)
    print(f"made {out/'index.html'}")
    return 0


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("_site"), help="replaced by the new site (default: %(default)s)")
    return build(parser.parse_args(args).out)


if __name__ == "__main__": sys.exit(main())
