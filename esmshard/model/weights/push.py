"""Uploads a model directory to a repository of the Hugging Face hub."""

import shlex
from pathlib import Path

from esmshard.errors import InputError, UsageError
from esmshard.files import is_hub_name, read_json, size_text
from esmshard.model.families.family_registry import RELEASED
from esmshard.model.weights import adapted_weights, open_weights, recorded
from esmshard.progress import say


def push(model: str, name: str, *, private: bool = False, overwrite: bool = False) -> str:
    """Upload the files of a model directory as one commit, and return the address of the repository.

    Args:
        model: a run that has a model, a directory that `consolidate` wrote, or an adapter's.
        name: OWNER/NAME on the hub.
        private: make a new repository private.
        overwrite: add a commit to a repository that exists.

    Raises:
        UsageError: `name` is not OWNER/NAME, or the repository exists already.
        InputError: the directory is no complete model, its weights are not the recorded ones, its base lies on this
            machine only, or the hub refuses.
    """
    if not is_hub_name(name):
        raise UsageError(f"{name}: OWNER/NAME is expected, such as me/{name.strip('/').rpartition('/')[2] or 'model'}")
    files = _files(model)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{name}: offline mode is on (HF_HUB_OFFLINE); unset it, or push where there is a network")
    size = sum(file.stat().st_size for file in files)
    say(f"{name}: uploading {size_text(size)} to {constants.ENDPOINT}: {', '.join(file.name for file in files)}")
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private or None, exist_ok=overwrite))
        api.upload_folder(
            repo_id=name,
            folder_path=files[0].parent,
            allow_patterns=[file.name for file in files],
            commit_message=f"Model of {Path(model).name}",
        )
    except HfHubHTTPError as error:
        raise _refusal(name, error) from None
    except Exception as error:  # requests, httpx and hf_xet have no common exception type.
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{name}: {constants.ENDPOINT} could not be reached or broke off ({said}); try again"
        ) from None
    return address


def _files(model: str) -> list[Path]:
    """Return the files of a model directory, after a check that others can read the model."""
    path = open_weights.place(model)
    if not path.is_dir():
        raise InputError(f"{model}: is not the directory of a model; give a run, or what `esmshard consolidate` wrote")
    if adapted_weights.is_adapter(path):
        base = str(read_json(path / adapted_weights.CONFIG).get("base_model_name_or_path"))
        if not is_hub_name(base) and base not in RELEASED:
            command = shlex.join(["esmshard", "consolidate", "RUN", "-o", str(path), "--adapter", "--base"])
            raise InputError(
                f"{path}: is an adapter of {base}, which others do not have; push the whole model, or name a base on "
                f"the hub with `{command} OWNER/NAME --overwrite`"
            )
    found = open_weights.read(str(path))
    if wrong := recorded.altered(found.files):
        raise InputError(wrong)
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not any(file.name == "README.md" for file in files):
        say(f"{path}: has no README.md, so the repository will have no model card")
    return files


def _refusal(name: str, error: Exception) -> InputError:
    """Return the sentence for an answer of the hub that is an error."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 409:
        return UsageError(f"{name}: exists already on {constants.ENDPOINT}; choose another name or pass --overwrite")
    if status in (401, 403):
        return InputError(
            f"{name}: {constants.ENDPOINT} does not let you write there; set HF_TOKEN to a token with the right to "
            "write, or log in with `hf auth login`"
        )
    said = next(iter(str(error).strip().splitlines()), "no reason given")
    return InputError(f"{name}: {constants.ENDPOINT} refused ({said}); try again, or upload the directory by hand")
