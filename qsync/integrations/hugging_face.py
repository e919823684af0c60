"""Build a Hugging Face model from its configuration, with random weights and no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, QSyncError, shortened

PREFIX = "hf:"
# The first of these tasks that a model type supports is used if its configuration names no class.
CAUSAL, MASKED, IMAGE = "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"


def read_config(path: Path) -> tuple[Any, type[Any], str | None]:
    """Read a `config.json`; return the configuration, its model class and its task.

    The task is None unless the class models language or classifies images. Raises FormatError for a file that
    transformers cannot build a model from.

    >>> config, kind, task = read_config(Path("config.json"))
    >>> model = kind(config)
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError:
        raise QSyncError("hf: needs the package transformers; pip install transformers") from None
    if not path.is_file():
        raise FormatError(f"{shortened(str(path))} does not exist; give the path of a config.json")
    try:
        config: Any = transformers.AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
        tasks = {
            getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type): task
            for task in (IMAGE, MASKED, CAUSAL)
        }
        named = [*(config.architectures or ()), *(name for name in reversed(tasks) if name)][0]
        config.use_cache = False
        return config, getattr(transformers, named), tasks.get(named)
    except (AttributeError, ValueError, OSError, KeyError, TypeError, IndexError) as error:
        raise FormatError(
            f"{shortened(str(path))} is not the config.json of a model that transformers can build "
            f"({shortened(error, quote=False)}); name its class in architectures"
        ) from error
