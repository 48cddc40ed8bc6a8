"""Focus, then complete: zero-shot composed image retrieval.

`from foco import FoCoComposer`, and so on for the names below; `foco.evaluate` and `foco.train` are modules. Nothing is
imported before it is asked for, so that `import foco` takes no time. `nbdev_export` writes the version, people the rest.
"""
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = { # name: the module that it comes from
    "Backbone": "backbones", "FoCo": "complete", "FoCoComposer": "complete", "HubError": "hub", "ImageFeatures": "backbones",
    "Result": "evaluate", "encode_benchmark": "evaluate", "load_backbone": "backbones", "open_benchmark": "evaluate",
}
_MODULES = ("backbones", "complete", "evaluate", "hub", "train")

if _TYPE_CHECKING: # for editors and type checkers
    from .backbones import Backbone, ImageFeatures, load_backbone
    from .complete import FoCo, FoCoComposer
    from .evaluate import Result, encode_benchmark, open_benchmark
    from .hub import HubError

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    "Import what is asked for."
    if name in _MODULES: return _import_module(f"{__name__}.{name}")
    if name not in _HOMES: raise AttributeError(f"foco has no {name!r}; it offers {', '.join([*_HOMES, *_MODULES])}, and its other modules by import foco.NAME")
    value = globals()[name] = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]: return sorted([*globals(), *_HOMES, *_MODULES])
