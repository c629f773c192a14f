"""From a model's `config.json` to the layout of its cache.

`fields` reads a config and remembers what was read; `families` holds what only a model's name tells; `layers`
finds what each layer is; `attention` and `states` say what such a layer keeps; `grouping` and `equalize`
make groups of it; `config` puts them together.
"""

from kvjax.models.config import ModelCache as ModelCache
from kvjax.models.config import model_cache as model_cache
