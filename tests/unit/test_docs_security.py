"""docs/security.md: what it says of the code is so."""

from __future__ import annotations

import ast
import io
import json
import re
import stat
import sys
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.serve_command import server_command
from keepstep.config.load import load, validate
from keepstep.errors import ConfigError
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from tests.unit.documents import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()
SOURCES = [path for room in ("keepstep", "tasks", "flows") for path in sorted((ROOT / room).rglob("*.py"))]

ACTIONS = {
    "put_object": "s3:PutObject", "create_multipart_upload": "s3:PutObject", "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject", "get_object": "s3:GetObject", "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject", "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_parts": "s3:ListMultipartUploadParts", "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
}  # fmt: skip
"""Of a request, the right that AWS asks for (its Service Authorization Reference)."""


Call = tuple[str, str, dict[str, str]]


@cache
def calls() -> list[Call]:
    """(file, dotted name of what is called, keyword arguments as written) of every call in the source."""
    nodes = [(path.name, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    return [(name, ast.unparse(node.func), keywords(node)) for name, node in nodes if isinstance(node, ast.Call)]


def keywords(call: ast.Call) -> dict[str, str]:
    return {one.arg: ast.unparse(one.value) for one in call.keywords if one.arg}


def test_everything_is_loaded_weights_only_and_nothing_is_unpickled():
    """A checkpoint is a stranger's file: no call loads one that could run code."""
    loads = [(file, given) for file, name, given in calls() if name == "torch.load"]
    assert len(loads) >= 3 and all(given["weights_only"] == "True" for _, given in loads), loads
    unsafe = {"allow_pickle": "True", "shell": "True", "trust_remote_code": "True"}
    names = r"(c?pickle|_pickle|dill|cloudpickle|marshal|shelve)\.\w+|eval|exec|os\.system|yaml\.(load|unsafe_load)"
    found = [
        (file, name) for file, name, given in calls() if re.fullmatch(names, name) or unsafe.items() & given.items()
    ]
    assert found == []


def test_code_of_a_model_is_asked_for_nowhere_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder's module leaves a mark if it is imported: no answer at a terminal is a no."""
    assert [file for file, _, given in calls() if given.get("trust_remote_code", "False") != "False"] == []
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ValueError, match="custom code"):
        AutoConfig.from_pretrained(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_policy_has_the_rights_of_the_requests_that_are_made_and_no_other():
    source = (ROOT / "keepstep" / "storage" / "s3.py").read_text()
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    named = {text for text in strings if isinstance(text, str) and re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", text)}
    requests = {name for name in named if name.partition("_")[0] in {action.partition("_")[0] for action in ACTIONS}}
    assert requests == ACTIONS.keys(), "a request that the page does not know"
    policy = json.loads(re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)[0])
    of_bucket, of_objects = policy["Statement"]
    assert {action for action in ACTIONS.values() if action.startswith("s3:ListBucket")} == set(of_bucket["Action"])
    assert set(ACTIONS.values()) == {*of_bucket["Action"], *of_objects["Action"]}
    assert of_objects["Resource"].startswith(f"{of_bucket['Resource']}/")


def test_embedded_servers_listen_on_the_loopback_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = servers._seaweed_command("weed", tmp_path / "data", {"s3.port": 1})
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false"} <= set(store)
    started: list[list[str]] = []

    def start(_platform: Path, _role: str, _holder: ProcessRef, command: Any, *_rest: Any) -> tuple[str, list[Any]]:
        line, url = command()
        started.append(line)
        return url, []

    monkeypatch.setattr(servers, "_start_or_reuse", start)
    servers.prefect_server(tmp_path, ProcessRef.current("flow"))
    (line,) = started
    assert line[line.index("--host") + 1] == "127.0.0.1"


def test_inner_ports_of_the_embedded_store_ask_for_nothing(tmp_path: Path):
    """What the page warns of: without credentials its S3 port refuses, and its filer takes a file."""
    holder = ProcessRef.current("flow")
    store = servers.object_store(tmp_path / ".keepstep", holder)
    try:
        filer = next(port for ref in store.processes for port in _filer_ports(ref.pid))
        with _put(f"http://127.0.0.1:{filer}/buckets/{servers.BUCKET}/x") as answer:
            assert answer.status == 201
        with pytest.raises(urllib.error.HTTPError, match="403"):
            _put(f"{store.url}/{servers.BUCKET}/x")
    finally:
        servers.release(tmp_path / ".keepstep", holder)


def _filer_ports(pid: int) -> list[str]:
    return re.findall(r"-filer\.port=(\d+)", Path(f"/proc/{pid}/cmdline").read_text())


def _put(url: str) -> Any:
    """The answer, with no credentials and past any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, data=b"anybody's", method="PUT"), timeout=60)


def test_local_ray_has_no_dashboard():
    started = [given for _, name, given in calls() if name == "ray.init"]
    assert [given["include_dashboard"] for given in started if given["address"] == "'local'"] == ["False"]


def test_a_served_model_has_the_address_and_key_that_one_gives(tmp_path: Path):
    given = ["--host", "127.0.0.1", "--api-key", "KEY"]
    assert server_command(tmp_path, {}, given, "cuda")[-4:] == given
    assert not {"--host", "--api-key"} & set(server_command(tmp_path, {}, [], "cuda"))


def test_credentials_of_the_embedded_store_are_the_owners_alone(tmp_path: Path):
    made = servers._store_environment(tmp_path)
    path = tmp_path / "s3" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert servers._store_environment(tmp_path) == made and len(made["AWS_SECRET_ACCESS_KEY"]) >= 40
    assert servers._store_environment(tmp_path / "another")["AWS_SECRET_ACCESS_KEY"] != made["AWS_SECRET_ACCESS_KEY"]


def test_an_address_with_a_password_is_refused_without_repeating_it():
    with pytest.raises(ConfigError) as raised:
        validate(load("quickstart", ["s3.endpoint_url=http://me:hunter2@store", "s3.bucket=b", "s3.embedded=false"]))
    assert "carries credentials" in str(raised.value) and "hunter2" not in str(raised.value)


def test_no_setting_is_named_as_a_secret_is():
    from keepstep.config.load import settings

    assert [key for key in settings() if re.search(r"secret|password|token$|access_key|api_key", key)] == []
