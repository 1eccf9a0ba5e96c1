"""Models from the Hugging Face hub: the files that serving needs, in the hub's own cache."""

from pathlib import Path

from cygnet.base.errors import ModelLoadError
from cygnet.model.tokenizer_hf import TOKENIZER_FILES

_WANTED = [*TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"]
_UNWANTED = ["*/*", "consolidated*.safetensors", "adapter_*"]
"""Folders and files in which some models repeat their weights in another layout."""


def download_snapshot(repo_id: str) -> Path:
    """The folder of `repo_id`'s newest snapshot, fetched where it is not in the cache; bars show the progress.

    Without network, or with `HF_HUB_OFFLINE`, a cached snapshot is used. Raises `ModelLoadError` that says why there
    is none and what to do.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except errors.GatedRepoError:
        raise ModelLoadError(
            f"model {repo_id!r} is gated: accept its licence at https://huggingface.co/{repo_id}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"model {repo_id!r} is not on the Hugging Face hub, nor is there a folder of that name; "
            "if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelLoadError(_unreachable(repo_id, error)) from None
    except Exception as error:  # the hub's HTTP client has changed with its major versions, and so have its errors
        if not isinstance(error, _transport_errors()):
            raise
        raise ModelLoadError(_unreachable(repo_id, error)) from None


def _unreachable(repo_id: str, error: Exception) -> str:
    from huggingface_hub import constants

    remedy = (
        f"fetch it where there is network (`hf download {repo_id}`), then give the folder, or copy it into "
        f"{constants.HF_HUB_CACHE}; or use a built-in model"
    )
    if constants.HF_HUB_OFFLINE:
        return f"model {repo_id!r} is not in the cache, and HF_HUB_OFFLINE is set; unset it, or {remedy}"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"can't store model {repo_id!r} in {constants.HF_HUB_CACHE}: {error}; make room there or set HF_HOME"
    reason = str(error).strip().splitlines()
    return (
        f"can't fetch model {repo_id!r} from the Hugging Face hub, and it is not in the cache "
        f"({type(error).__name__}: {reason[0] if reason else 'no details'}); {remedy}"
    )


def _transport_errors() -> tuple[type[Exception], ...]:
    kinds: list[type[Exception]] = []
    for module, name in (("httpx", "TransportError"), ("requests", "RequestException")):
        try:
            kinds.append(getattr(__import__(module), name))
        except ImportError:
            continue
    return tuple(kinds)
