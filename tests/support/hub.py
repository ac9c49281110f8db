"""A local server that speaks the Hub's protocol, and tiny models and datasets to publish on it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.calibrated import copy_calibration

API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(tree|revision|paths-info)/([^/]+)/?(.*))?$")
RESOLVE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)$")
WRITE = re.compile(
    r"(?P<create>/api/repos/create)$|(?P<yaml>/api/validate-yaml)$|/stored/(?P<stored>\w+)$"
    r"|/(?P<lfs>.+\.git/info/lfs/objects/batch)$"
    r"|/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit)/main$"
)
TOKEN = "hf_of_the_tests_alone"  # what the stand-in lets write
LFS_SUFFIXES = {".safetensors", ".bin", ".parquet", ".arrow", ".gz"}
SENTIMENT = {"neg": ["awful", "boring", "dull", "sad"], "pos": ["clever", "fine", "fun", "great"]}
FILLER = ["a", "the", "film", "story", "plot", "was", "is", "very", "and", "so"]
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


class Request(NamedTuple):
    method: str
    path: str
    agent: str
    status: int  # 0 when the connection was dropped without an answer


class Repo:
    """A repository: for each commit, the entries of its files as the API describes them."""

    def __init__(self, repo_id: str, private: bool = False) -> None:
        self.id, self.main, self.folders = repo_id, "", dict[str, Path]()
        self.private = private
        self.commits: dict[str, dict[str, dict[str, Any]]] = {}

    def commit(self, folder: Path) -> str:
        entries = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name, data = path.relative_to(folder).as_posix(), path.read_bytes()
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entries[name] = {"type": "file", "path": name, "size": len(data), "oid": oid}
            if path.suffix in LFS_SUFFIXES:
                sha256 = hashlib.sha256(data).hexdigest()
                entries[name]["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
        # The sha follows the contents, so the same folder gives the same commit in every run.
        self.main = hashlib.sha1(json.dumps([self.id, entries]).encode()).hexdigest()
        self.commits[self.main], self.folders[self.main] = entries, folder
        return self.main

    def info(self, sha: str) -> dict[str, Any]:
        flags = {"private": self.private, "gated": False, "disabled": False, "tags": []}
        siblings = [{"rfilename": name} for name in self.commits[sha]]
        return {"id": self.id, "modelId": self.id, "sha": sha, **flags, "siblings": siblings}

    def tree(self, sha: str, under: str = "", recursive: bool = True) -> list[dict[str, Any]]:
        entries = dict(self.commits[sha])
        for folder in {str(p) for name in entries for p in list(Path(name).parents)[:-1]}:
            oid = hashlib.sha1(folder.encode()).hexdigest()
            entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": oid}
        start = f"{under}/" if under else ""
        inside = [path for path in sorted(entries) if path.startswith(start)]
        return [entries[path] for path in inside if recursive or "/" not in path[len(start) :]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Headers and body are two writes, each delayed without this.
    hub: Hub

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        # Called by send_response. Appending to a list is atomic, so no lock is needed.
        agent = self.headers.get("User-Agent", "")
        self.hub.requests.append(Request(self.command, self.path, agent, int(code)))

    def do_GET(self) -> None:
        # The body is always read, or it would be taken for the connection's next request.
        body = self._body()
        url = urlsplit(self.path)
        if self.hub.down == "close":
            self.log_request(0)
            self.close_connection = True
        elif self.hub.down == "silent":
            self.hub.woken.wait(30)
            self.close_connection = True
        elif self.hub.down and not (self.command == "HEAD" and url.path == "/"):
            status = 503 if self.hub.down is True else int(self.hub.down)
            # Clients ask five times more, for which they wait up to 8 s each unless they are told.
            self.answer(status, {"error": "as the test wants"}, {"Retry-After": "0"})
        elif found := WRITE.match(url.path):
            self.write(found, body)
        elif found := API.match(url.path):
            self.api(found, parse_qs(url.query), body.decode())
        elif found := RESOLVE.match(url.path):
            self.resolve(found)
        else:
            self.answer(404, {"error": "Not Found"})

    do_HEAD = do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def write(self, found: re.Match[str], body: bytes) -> None:
        """What a client calls to make a repository and to commit to it, large files first."""
        hub, sent = self.hub, found["what"]
        if found["stored"]:
            hub.stored[found["stored"]] = body
            return self.answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "", "Invalid username or password.")
        if found["create"]:
            asked = json.loads(body)
            key = (f"{asked.get('type', 'model')}s", f"{asked['organization']}/{asked['name']}")
            made = {"url": f"{hub.endpoint}/{key[0]}/{key[1]}"}
            if key in hub.repos:
                return self.answer(409, {"error": "You already created this repo", **made})
            is_private = asked.get("visibility") == "private"
            hub.repos[key], hub.made[key] = Repo(key[1], is_private), asked
            hub.repos[key].commit(Path(tempfile.mkdtemp(dir=hub.scratch.name)))
            return self.answer(200, made)
        if found["yaml"]:
            return self.answer(200, {"errors": [], "warnings": []})
        if found["lfs"]:
            objects = [
                {"oid": one["oid"], "size": one["size"],
                 "actions": {"upload": {"href": f"{hub.store}/stored/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]  # fmt: skip
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if sent == "preupload":
            files = [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if Path(one["path"]).suffix in LFS_SUFFIXES else "regular"}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            return self.answer(200, {"files": files})
        repo = hub.repos[found["kind"], found["repo"]]
        folder = Path(tempfile.mkdtemp(dir=hub.scratch.name))
        shutil.copytree(repo.folders[repo.main], folder, dirs_exist_ok=True)
        for line in map(json.loads, body.splitlines()):
            about = line["value"]
            if line["key"] == "file":
                (folder / about["path"]).write_bytes(base64.b64decode(about["content"]))
            elif line["key"] == "lfsFile":
                (folder / about["path"]).write_bytes(hub.stored[about["oid"]])
        sha = repo.commit(folder)
        place = f"{hub.endpoint}/{found['kind']}/{repo.id}/commit/{sha}"
        self.answer(200, {"commitUrl": place, "commitOid": sha, "pullRequestUrl": None})

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def refuse(self, status: int, code: str, message: str, sha: str = "") -> None:
        # With the commit, clients can remember that the file does not exist in it.
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(status, {"error": message}, headers | ({"X-Repo-Commit": sha} if sha else {}))

    def find(self, kind: str, repo_id: str, revision: str) -> tuple[Repo, str] | None:
        """The repository and the commit asked for, or None once the refusal is sent."""
        repo = self.hub.repos.get((kind, repo_id))
        if repo is None:
            # The Hub does not tell a missing repository from a private one, hence 401, not 404.
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
            return None
        sha = repo.main if revision == "main" else unquote(revision)
        if sha not in repo.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {sha}")
            return None
        return repo, sha

    def api(self, found: re.Match[str], query: dict[str, list[str]], body: str) -> None:
        kind, repo_id, what, revision, path = found.groups()
        if (hit := self.find(kind, repo_id, revision or "main")) is None:
            return
        repo, sha = hit
        if what == "tree":
            recursive = query.get("recursive", [""])[-1].lower() in ("true", "1")
            entries = repo.tree(sha, unquote(path), recursive)
            if path and not entries:
                return self.refuse(404, "EntryNotFound", f"{unquote(path)} does not exist", sha)
            self.answer(200, entries)
        elif what == "paths-info":
            asked = parse_qs(body).get("paths", [])
            self.answer(200, [entry for entry in repo.tree(sha) if entry["path"] in asked])
        else:
            self.answer(200, repo.info(sha))

    def resolve(self, found: re.Match[str]) -> None:
        if (hit := self.find("datasets" if found[1] else "models", found[2], found[3])) is None:
            return
        repo, sha, name = *hit, unquote(found[4])
        if (entry := repo.commits[sha].get(name)) is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", sha)
        size, lfs = entry["size"], entry.get("lfs")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if lfs:
            headers |= {"X-Linked-Etag": f'"{lfs["oid"]}"', "X-Linked-Size": str(size)}
            if self.server is not self.hub.servers[1]:
                # Large files are on another origin, so clients go through their redirect path.
                place = f"{found[1] or ''}{repo.id}/resolve/{sha}/{quote(name)}"
                return self.answer(302, b"", {**headers, "Location": f"{self.hub.store}/{place}"})
            headers["ETag"] = headers["X-Linked-Etag"]
        status, start, end = 200, 0, size
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(part[1]), min(int(part[2] or size) + 1, size)
            if start >= end:
                return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        content = (repo.folders[sha] / name).read_bytes()
        if self.hub.spoils == "flipped" and lfs:
            at = len(content) // 2
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        if self.hub.spoils == "half" and lfs:
            self.answer(status, b"", headers | {"Content-Length": str(end - start)})
            self.wfile.write(content[start : (start + end) // 2])
            self.close_connection = True
            return
        self.answer(status, content[start:end], headers)


class Hub:
    """Serves registered folders as repositories for as long as the context is open.

    `down` can be set at any time: True answers 503 to all, a number this status to all but the look
    whether it is there, "close" drops every connection, "silent" never answers. `spoils` is what is
    wrong with large files: "half" of one comes, or one bit is "flipped".
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.down: bool | int | str = False
        self.spoils = ""
        self.woken = threading.Event()  # of those who wait for an answer
        self.requests: list[Request] = []
        self.stored: dict[str, bytes] = {}  # large files, by their SHA-256
        self.made: dict[tuple[str, str], dict[str, Any]] = {}  # as their making was asked for
        self.scratch = tempfile.TemporaryDirectory()
        handler = type("Handler", (Handler,), {"hub": self})
        # Two ports make two origins: the endpoint, and the store of large files.
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.endpoint, self.store = (f"http://127.0.0.1:{s.server_port}" for s in self.servers)

    def __enter__(self) -> Hub:
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.woken.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self.scratch.cleanup()

    def add_model(self, repo_id: str, folder: str | Path) -> str:
        """Publish the folder as the newest commit, and return the commit's sha."""
        return self.repos.setdefault(("models", repo_id), Repo(repo_id)).commit(Path(folder))

    def add_dataset(self, repo_id: str, folder: str | Path) -> str:
        return self.repos.setdefault(("datasets", repo_id), Repo(repo_id)).commit(Path(folder))

    def env(self, cache_folder: str | Path) -> dict[str, str]:
        """Variables to lay over the environment of a client process."""
        copy_calibration(Path(cache_folder))
        home = str(Path(cache_folder).absolute())
        places = {"HF_HUB_CACHE": "hub", "HF_DATASETS_CACHE": "datasets", "HF_TOKEN_PATH": "none"}
        on = ["HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"]
        off = ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"]
        env = {"HF_ENDPOINT": self.endpoint, "HF_HOME": home, "NO_PROXY": "127.0.0.1"}
        env |= {name: f"{home}/{place}" for name, place in places.items()}
        env |= dict.fromkeys(on, "1") | dict.fromkeys(off, "0")
        return env | {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}

    def downloads(self) -> Counter[tuple[str, str]]:
        """How often the contents of each (repository, file) were sent, whole or in part."""
        sent = [r.path for r in self.requests if r.method == "GET" and r.status in (200, 206)]
        return Counter((m[2], unquote(m[4])) for path in sent if (m := RESOLVE.match(path)))


def tiny_bert(folder: str | Path) -> None:
    """A random BERT laid out like the published ones: pretraining heads and no classifier."""
    from transformers import BertConfig, BertForPreTraining, BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *FILLER, *SENTIMENT["neg"], *SENTIMENT["pos"]]
    _save(BertForPreTraining, BertConfig, folder, vocab_size=len(words), max_position_embeddings=64)
    vocab = {word: index for index, word in enumerate(words)}
    BertTokenizer(vocab=vocab, model_max_length=64).save_pretrained(folder)


def tiny_vit(folder: str | Path) -> None:
    """A random ViT encoder without a classifier, with the preprocessor file of the originals."""
    from transformers import ViTConfig, ViTModel

    _save(ViTModel, ViTConfig, folder, image_size=32, patch_size=8)
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 2}
    values = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    text = json.dumps({"image_processor_type": "ViTImageProcessor", **steps, **values})
    Path(folder, "preprocessor_config.json").write_text(text)


def _save(model: Any, config: Any, folder: str | Path, **sizes: int) -> None:
    import torch

    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(config(intermediate_size=64, **sizes)).save_pretrained(folder)


def text_dataset(folder: str | Path, n_train: int, n_test: int, card: bool = True) -> None:
    """Sentences of a few words, where the words give the label away."""
    from datasets import Value

    def example(rng: random.Random, label: str) -> str:
        words = rng.choices(FILLER, k=5) + rng.choices(SENTIMENT[label], k=2)
        return " ".join(rng.sample(words, len(words)))

    _publish(folder, {"text": Value("string")}, example, [*SENTIMENT], (n_train, n_test), card)


def image_dataset(folder: str | Path, n_train: int, n_test: int, card: bool = True) -> None:
    """Noisy images in one colour, which is the label."""
    from datasets import Image
    from PIL.Image import frombytes

    def example(rng: random.Random, label: str) -> Any:
        pixels = (value + rng.randint(-40, 40) for _ in range(32 * 32) for value in COLOURS[label])
        return frombytes("RGB", (32, 32), bytes(pixels))

    _publish(folder, {"image": Image()}, example, [*COLOURS], (n_train, n_test), card)


def _publish(
    folder: str | Path, column: Any, example: Any, labels: list[str], counts: Any, card: bool
) -> None:
    """Write a parquet file for each split and, if wanted, the dataset card."""
    import yaml
    from datasets import ClassLabel, Dataset, DatasetInfo, Features, SplitDict, SplitInfo

    features, splits = (Features({**column, "label": ClassLabel(names=labels)}), SplitDict())
    for seed, (split, count) in enumerate(zip(("train", "test"), counts, strict=True)):
        rng, names = (random.Random(seed), [labels[i % len(labels)] for i in range(count)])
        rows = {"label": names, **{key: [example(rng, name) for name in names] for key in column}}
        file = Path(folder, "data", f"{split}-00000-of-00001.parquet")
        file.parent.mkdir(parents=True, exist_ok=True)
        size = Dataset.from_dict(rows, features=features).to_parquet(file)
        splits[split] = SplitInfo(split, num_bytes=size, num_examples=count)
    if card:
        info = DatasetInfo(features=features, splits=splits)._to_yaml_dict()
        files = [{"split": split, "path": f"data/{split}-*"} for split in splits]
        data = {"dataset_info": info, "configs": [{"config_name": "default", "data_files": files}]}
        text = yaml.safe_dump(data, sort_keys=False)
        Path(folder, "README.md").write_text(f"---\n{text}---\n")
