"""Settings of Sphinx for the site that docs/make_site.py makes; nothing here is generated, and nothing asks the network.

Three things Sphinx can't know by itself: docstrings here are plain text with `names` in backticks, parameters are
described by comments beside them, and a `name` in prose means the object of that name.
"""
import ast, inspect, io, re, sys, textwrap, tokenize
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT)) # the API of this checkout, not of an installed foco

project = html_title = "foco"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
nb_execution_mode = "off" # the committed outputs
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

nitpicky = True # a reference into foco that leads nowhere stops the build; other projects' names are not linked
nitpick_ignore_regex = [(r"py:.*", r"(?!foco\.).*")]

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "no-value": True}
autodoc_inherit_docstrings = False # of torch, for every forward
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False


# ---- docstrings: plain text, `names` in backticks

def to_rst(text):
    "Plain text with `code` in backticks, as reStructuredText."
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"\\ `{p}`\\ " if i % 2 else re.sub(r"([\\*_|`])", r"\\\1", p) for i, p in enumerate(parts))


def header_comments(node, text):
    "The comments in the header of a function, or beside the fields of a class: (names on that line, comment); no names: about all of it."
    is_class = isinstance(node, ast.ClassDef)
    named = [n.target for n in node.body if isinstance(n, ast.AnnAssign)] if is_class else [n for n in ast.walk(node.args) if isinstance(n, ast.arg) and n.arg not in ("self", "cls")]
    names = {}
    for n in named: names.setdefault(n.end_lineno, []).append(n.id if is_class else n.arg)
    last = max([node.lineno, *names] + ([node.returns.end_lineno] if not is_class and node.returns else []))
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    if not is_class and last == node.lineno: return [([], comments[last])] if last in comments else []
    return [(names.get(line, ["returns"]), comment) for line, comment in comments.items() if node.lineno <= line <= last and (line in names or not is_class)]


def comments_of(obj):
    "`header_comments` of a function, of a class's own constructor, or of the fields of a dataclass or named tuple and its bases."
    if inspect.isclass(obj):
        fields = is_dataclass(obj) or hasattr(obj, "_fields")
        if not fields: return comments_of(vars(obj)["__init__"]) if "__init__" in vars(obj) else []
        return [c for base in reversed(obj.__mro__) for c in read_comments(base)]
    return read_comments(inspect.unwrap(function_of(obj)))


def function_of(obj):
    "What is behind a property, a cached one, or a method of the class."
    return getattr(obj, "fget", None) or getattr(obj, "func", None) or getattr(obj, "__func__", obj)


def read_comments(obj):
    try: text = textwrap.dedent(inspect.getsource(obj))
    except (OSError, TypeError): return [] # made at run time, like the methods of a dataclass
    node = ast.parse(text).body[0]
    return header_comments(node, text) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []


def describe(app, what, name, obj, options, lines):
    "Make reStructuredText of a docstring, and add the comments of the header."
    if what == "data": lines.clear() # the docstring of its type
    lines[:] = [to_rst(l) for l in lines]
    if name == "foco": lines += ["", ", ".join(f":py:obj:`{n} <foco.{home}.{n}>`" for n, home in obj._HOMES.items())]
    if what not in ("class", "exception", "function", "method", "property"): return
    for names, text in comments_of(obj):
        if not names: lines += ["", ".. rst-class:: shapes", "", to_rst(text)]
        else: lines += ["", f"- **{', '.join(names)}**: {to_rst(text)}"]


def is_ours(obj): return (getattr(function_of(obj), "__module__", None) or "foco").startswith("foco")


def say_less(app, what, name, obj, options, signature, returns):
    "No signature for a class whose constructor is that of another project's class."
    if what in ("class", "exception") and not (is_ours(obj.__init__) or hasattr(obj, "_fields")): return "", returns


def choose(app, what, name, obj, skip, options):
    "Fields stand in the signature and among the comments: not a third time as attributes. Nor what another project puts into a class."
    shown = callable(obj) or isinstance(obj, (property, cached_property, classmethod, staticmethod))
    return True if what == "class" and not (shown and is_ours(obj)) else skip


# ---- prose: `name` leads to the object of that name, if there is only one

def link_names(app, doctree, docname):
    from docutils import nodes
    domain, builder = app.env.get_domain("py"), app.builder
    if not hasattr(app, "foco_names"):
        app.foco_names = {}
        for full, o in domain.objects.items():
            for short in {full, ".".join(full.split(".")[-2:])} if o.objtype in ("method", "property") else {full, full.split(".")[-1]}: app.foco_names.setdefault(short, []).append((full, o))
    for node in list(doctree.findall(nodes.literal)):
        text = node.astext().removesuffix("()")
        found = app.foco_names.get(text, [])
        if len(found) != 1 or not re.search(r"[A-Z_.]", text) or isinstance(node.parent, (nodes.reference, nodes.title)): continue
        full, o = found[0]
        link = nodes.reference("", "", refuri=f"{builder.get_relative_uri(docname, o.docname)}#{o.node_id}", internal=True, reftitle=full)
        node.replace_self(link)
        link += node


def setup(app):
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", say_less)
    app.connect("autodoc-skip-member", choose)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
