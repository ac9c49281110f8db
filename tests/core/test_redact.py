"""Arguments as records contain them: no secret inside mappings, lists, JSON or pairs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.command_line import parse
from harness.core.records.redact import redacted_argument, redacted_command, settings_of

SECRET = "s3cr3t-Wert"  # of no service whose tokens are known by their form


@dataclasses.dataclass
class Login:
    api_key: str = SECRET
    retries: int = 3


@pytest.mark.parametrize(("value", "shown"), [
    ({"hub_token": SECRET, "even_batches": True}, {"hub_token": "***", "even_batches": True}),
    ({"a": [{"my_secret": {"of": [SECRET, 7]}}, "b"]},
     {"a": [{"my_secret": {"of": ["***", "***"]}}, "b"]}),
    ({"password": 12345678, "max_tokens": 64, "key_dim": 8, "api_key": None},
     {"password": "***", "max_tokens": 64, "key_dim": 8, "api_key": None}),
    ((f"token={SECRET}", 1), ("token=***", 1)),
    (f"lr=3,token={SECRET},max_tokens=64", "lr=3,token=***,max_tokens=64"),
    (f"api_key = '{SECRET} 2'; use_auth_token=true", "api_key = '***'; use_auth_token=true"),
    (f'[1, {{"x": {{"secret": "{SECRET}"}}}}]', '[1, {"x": {"secret": "***"}}]'),
    (f"{{'token': '{SECRET}', 'a': 1}}", "{'token': '***', 'a': 1}"),
    (json.dumps({"inner": json.dumps({"token": SECRET})}), '{"inner": "{\\"token\\": \\"***\\"}"}'),
    ('{"b":1,  "a": 2}', '{"b":1,  "a": 2}'),
    (f"https://host/x?api_key={SECRET}&b=1", "https://host/x?***"),
    (f"python train.py --hub-token {SECRET} --lr 1", "python train.py --hub-token *** --lr 1"),
    (Path("a/b"), "a/b"),
    (Login(), {"api_key": "***", "retries": 3}),
    (len, "len"),
    ("keys: input_ids", "keys: ***"),
    ("https://user:p@ss@host/data", "https://***@host/data"),
    ("see https://host/x.csv?X-Amz-Signature=ab&token=cd", "see https://host/x.csv?***"),
    ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
    ("wandb_pwd=abc", "wandb_pwd=***"),
    ({"passphrase": "abc", "author": "A. Turing"}, {"passphrase": "***", "author": "A. Turing"}),
    ("mine/monkey.py:Local", "mine/monkey.py:Local"),
    ({"Authorization": f"Basic {SECRET}"}, {"Authorization": "***"}),
    (f"Proxy-Authorization: Basic {SECRET}", "Proxy-Authorization: Basic ***"),
    ('{"keyframe":"a","monkey":3}', '{"keyframe":"a","monkey":3}'),
    ("hockey=abc, keywords: a b, turkey: c", "hockey=abc, keywords: a b, turkey: c"),
    ({name: SECRET for name in ("apiKey", "apikey", "sshkey", "KEY", "keyId", "signing.key")},
     dict.fromkeys(("apiKey", "apikey", "sshkey", "KEY", "keyId", "signing.key"), "***")),
    ({"max_tokens": "64", "use_auth_token": "True", "token": "64", "key2": 64, "secret": ""},
     {"max_tokens": "64", "use_auth_token": "True", "token": "***", "key2": "***", "secret": ""}),
    ("max_tokens='64' token='64'", "max_tokens='64' token='***'"),
    (f"tokens: note: token={SECRET}", "tokens: *** token=***"),
    (f"note: token={SECRET}", "note: token=***"),
    ({*"hgfedcba"}, [*"abcdefgh"]),
    (frozenset({8, 1}), [1, 8]),
    ({"weights": np.array([[1.0, 2.0]]), "scalar": np.float64(3)},
     {"weights": [[1.0, 2.0]], "scalar": 3.0}),
])  # fmt: skip
def test_an_argument_is_recorded_without_the_secrets_inside_it(value: Any, shown: Any) -> None:
    assert redacted_argument(value) == shown


def test_settings_are_recorded_without_secrets_inside_flags() -> None:
    secret = {
        "lr_scheduler_kwargs": json.dumps({"hub_token": SECRET, "num_cycles": 2}),
        "optim_args": f"eps=1,token={SECRET}",
    }
    words = [word for name, value in secret.items() for word in (f"--{name}", value)]
    settings = parse("vit", ["--tiny", *words, "--report_to", "none", f"token={SECRET}"], {})
    recorded = settings_of(settings)["trainer"]
    assert recorded["lr_scheduler_kwargs"] == '{"hub_token": "***", "num_cycles": 2}'
    assert recorded["optim_args"] == "eps=1,token=***"
    assert SECRET not in json.dumps(recorded)


def test_a_secret_may_begin_with_a_hyphen() -> None:
    shown = redacted_command(["x.py", "--hub_token", "-abc123", "--wandb_pwd", "abc", "-v", "2"])
    assert shown == "x.py --hub_token '***' --wandb_pwd '***' -v 2"


def test_a_command_is_recorded_without_secrets_inside_its_words() -> None:
    of_json = json.dumps({"hub_token": f"{SECRET}=", "keys": [SECRET]})
    words = ["train.py", "--accelerator_config", of_json, f"--fsdp_config={of_json}",
             "--optim_args", f"lr=3,token={SECRET}", "--api_keys", SECRET, SECRET,
             f"--command=x.py --token {SECRET}"]  # fmt: skip
    shown = redacted_command([*words, "--hosts", "a", "sweep.yaml"])
    assert SECRET not in shown
    assert shown.startswith('train.py --accelerator_config \'{"hub_token": "***", "keys": [')
    assert shown.endswith("--api_keys '***' '***' '--command=x.py --token ***' "
                          "--hosts '***' sweep.yaml")  # fmt: skip


@pytest.mark.parametrize(("word", "shown"), [
    ("https://user:pa=ss@host/x", "https://***@host/x"),
    ("https://b.s3.amazonaws.com/z.csv?X-Amz-Algorithm=AWS4&X-Amz-Signature=deadbeefcafe0123",
     "https://b.s3.amazonaws.com/z.csv?***"),
])  # fmt: skip
def test_a_word_that_is_a_url_is_recorded_without_its_secrets(word: str, shown: str) -> None:
    for before in ([], ["--dataset"], ["--set", "lr=1"]):
        assert redacted_command(["x.py", *before, word]) == shlex.join(["x.py", *before, shown])
    assert redacted_command(["x.py", f"--dataset={word}"]) == shlex.join(
        ["x.py", f"--dataset={shown}"]
    )


def test_what_is_no_secret_stays_in_a_command() -> None:
    words = ["bert.py", "--average_tokens_across_devices", "false", "--set", "max_tokens=3",
             "hockey=abc", "--max_tokens", "64", "--keyframe", "a", "--token_dim=-1"]  # fmt: skip
    assert redacted_command(words) == shlex.join(words)
    hidden = ["--token", "3", "--api_key=3", "--account", "3", "--run_name=true", "apikey=abc"]
    assert redacted_command(hidden) == shlex.join(
        ["--token", "***", "--api_key=***", "--account", "***", "--run_name=***", "apikey=***"]
    )


@pytest.mark.parametrize("text", ["key" * 700, "past_key_values." * 200, "a.b-" * 400 + "key"])
def test_a_long_text_takes_little_time(text: str) -> None:
    """Each name was tried from each of its characters: 48 s for 2,000 characters of "key"."""
    before = time.process_time()
    for shown in (text, f"--{text}", f"{text} = "):
        assert redacted_argument(shown) == shown
    assert time.process_time() - before < 2
