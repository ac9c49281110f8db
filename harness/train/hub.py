"""What can go wrong between here and the Hub, each as one line with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import errors

from harness.settings import UserError

OFFLINE_FIX = (
    "use --tiny, a local folder, or, with a filled cache, HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1"
)

# Of whichever HTTP library the installed Hub client stands on.
HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
NETWORK = (HTTP_ERROR, ConnectionError, errors.OfflineModeIsEnabled)


@contextmanager
def explain(kind: str, name: str) -> Iterator[None]:
    """Turn the many exceptions of a load into UserError; what is no user's mistake passes."""
    try:
        yield
    except UserError:
        raise
    except DatasetNotFoundError as error:
        raise UserError(_missing(kind, name, str(error))) from None
    except ImportError as error:
        missing = getattr(error, "name", None) or " ".join(str(error).split())[:200]
        raise UserError(f"--{kind} {name} needs a package that is missing: {missing}") from None
    except DatasetGenerationError as error:
        text = " ".join(str(_causes(error)[-1]).split())[:300]
        raise UserError(f"--{kind} {name} cannot be read: {text}") from None
    except (OSError, ValueError, RuntimeError, IndexError, HTTP_ERROR) as error:
        raise _sorted_out(kind, name, error) from error


def _sorted_out(kind: str, name: str, error: Exception) -> Exception:
    """The libraries say most things with OSError and ValueError: tell them apart by their text."""
    text = " ".join(str(error).split())
    lower = text.lower()
    causes = _causes(error)
    if any(isinstance(c, errors.GatedRepoError) for c in causes):
        return UserError(f"--{kind} {name} is gated: ask for access on its page and set HF_TOKEN")
    if any(isinstance(c, errors.RepositoryNotFoundError) for c in causes):
        return UserError(_missing(kind, name, text))
    if any(isinstance(c, NETWORK) for c in causes):
        return UserError(_no_network(kind, name))
    if "couldn't connect" in lower or "offline" in lower or "connection" in lower:
        return UserError(_no_network(kind, name))
    if "trust_remote_code" in lower or "remote code" in lower:
        return UserError(
            f"--{kind} {name} brings code of its own: read it, then add --trust_remote_code"
        )
    if "is not a local folder" in lower or "not a valid model identifier" in lower:
        return UserError(_missing(kind, name, text))
    if "corresponds to no data" in lower:
        return UserError(f"--{kind} {name} is empty: {text[:300]}")
    if "scripts are no longer supported" in lower:
        return UserError(f"--{kind} {name} is a loading script; convert it to parquet or csv first")
    if "config name is missing" in lower or "builderconfig" in lower:
        return UserError(f"--{kind} {name}: {text[:300]}; name one with --dataset_config")
    if Path(name).exists():
        return UserError(f"--{kind} {name} cannot be read: {text[:300]}")
    return UserError(f"--{kind} {name} cannot be loaded: {text[:300]}")


def _causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _no_network(kind: str, name: str) -> str:
    return f"--{kind} {name}: no network, and not in the cache: {OFFLINE_FIX}"


def _missing(kind: str, name: str, text: str) -> str:
    if "offline" in text.lower() or "couldn't reach" in text.lower():
        return _no_network(kind, name)
    where = "neither a local folder nor on the Hub"
    return f"--{kind} {name} is {where} (if it is private, set HF_TOKEN): check the name"
