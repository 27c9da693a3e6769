"""The lock is what the hub said, checked: against the hub double, and against a server that says no."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specrig.console import CannotRun
from specrig.lab.hub import Hub
from specrig.plan.planner import HUB_ENDPOINT
from specrig.staging import lock

REPO = "org/model"
COMMIT, OLDER = "b" * 40, "a" * 40
CONFIG = {
    "architectures": ["X"],
    "vocab_size": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "quantization_config": {"quant_method": "awq", "bits": 4},
    "transformers_version": "4.0",
}
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [{"id": 7, "content": "<end>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for commit in (OLDER, COMMIT):
        folder = tmp_path / REPO / commit
        (folder / "onnx").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (folder / "model.safetensors").write_bytes(b"w" * 1_500_000)
        for left_out in ("pytorch_model.bin", "model.pt", "README.md", "onnx/model.safetensors", ".gitattributes"):
            (folder / left_out).write_text("not for an engine")
    server = Hub(tmp_path)
    server.start()
    yield server
    server.stop()


def tree(hub: Hub, commit: str = COMMIT) -> Path:
    return hub.root / REPO / commit


def test_a_branch_becomes_the_commit_with_exactly_the_needed_files(hub: Hub) -> None:
    entry = lock.lock_model(REPO, "main", hub.url)
    assert entry["revision"] == COMMIT
    assert [file["path"] for file in entry["files"]] == ["config.json", "model.safetensors", "tokenizer.json"]
    for file in entry["files"]:
        content = (tree(hub) / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest()), file["path"]
    assert "org/model/model.safetensors" not in hub.stats, "weights are not fetched to be locked"


def test_a_commit_that_is_asked_for_is_the_one(hub: Hub) -> None:
    assert lock.lock_model(REPO, OLDER, hub.url)["revision"] == OLDER


def test_facts_of_the_config(hub: Hub) -> None:
    config = lock.lock_model(REPO, None, hub.url)["config"]
    assert config["quantization"] == "awq" and config["head_dim"] == 16 and config["vocab_size"] == 8
    assert "transformers_version" not in config
    assert lock.config_facts({**CONFIG, "head_dim": 128, "quantization_config": None}) == {
        **{name: CONFIG[name] for name in ("architectures", "vocab_size", "hidden_size", "num_attention_heads")},
        "num_hidden_layers": 2,
        "head_dim": 128,
        "quantization": None,
    }


def test_the_size_counts_added_tokens(hub: Hub) -> None:
    assert lock.lock_model(REPO, None, hub.url)["tokenizer"]["size"] == 8


def test_a_tokenizer_in_large_file_storage_is_known_too(hub: Hub) -> None:
    vocab = {f"token-{'x' * 50}-{number}": number for number in range(20_000)}
    text = json.dumps({**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": vocab}})
    (tree(hub) / "tokenizer.json").write_text(text)
    assert len(text) > 1_000_000
    entry = lock.lock_model(REPO, None, hub.url)
    assert entry["tokenizer"]["size"] == 20_000
    assert entry["files"][-1]["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_large_file_that_is_not_what_the_hub_lists_is_refused(hub: Hub) -> None:
    (tree(hub) / "tokenizer.json").write_text(json.dumps(TOKENIZER) + " " * 1_000_000)
    hub.faults = [{"path": "*/tokenizer.json", "kind": "wrong", "times": 1, "after": None}]
    with pytest.raises(CannotRun, match=r"tokenizer\.json") as caught:
        lock.lock_model(REPO, None, hub.url)
    assert caught.value.code == "HUB_DAMAGED"


def test_no_config_is_no_model(hub: Hub) -> None:
    (tree(hub) / "config.json").unlink()
    with pytest.raises(CannotRun, match=r"no config\.json") as caught:
        lock.lock_model(REPO, None, hub.url)
    assert caught.value.code == "HUB_NO_MODEL"


@pytest.mark.parametrize("config", [{"text_config": CONFIG}, {"model_type": "mamba"}, []])
def test_a_config_that_the_plan_can_not_read_is_told(hub: Hub, config: Any) -> None:
    (tree(hub) / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotRun, match="org/model") as caught:
        lock.lock_model(REPO, None, hub.url)
    assert caught.value.code == "HUB_NO_MODEL"


def variant(**model: Any) -> dict[str, Any]:
    return {**TOKENIZER, "model": {**TOKENIZER["model"], **model}}


@pytest.mark.parametrize(
    "same",
    [
        variant(merges=[["a", "b"]]),
        variant(vocab={"ab": 2, "b": 1, "a": 0}),
        {
            **TOKENIZER,
            "padding": {"length": 9},
            "truncation": {"max_length": 1},
            "post_processor": None,
            "version": "2",
        },
    ],
    ids=["merges as pairs", "another order", "padding and truncation"],
)
def test_equal_by_content(same: dict[str, Any]) -> None:
    assert lock.tokenizer_facts(same) == lock.tokenizer_facts(TOKENIZER)


@pytest.mark.parametrize(
    "other",
    [
        variant(merges=[]),
        variant(vocab={"a": 1, "b": 0, "ab": 2}),
        variant(type="WordPiece"),
        {**TOKENIZER, "added_tokens": [{"id": 7, "content": "<stop>"}]},
        {**TOKENIZER, "normalizer": {"type": "NFC"}},
        {**TOKENIZER, "pre_tokenizer": {"type": "Whitespace"}},
    ],
    ids=["merges", "ids", "kind", "added token", "normalizer", "pre-tokenizer"],
)
def test_unequal_by_content(other: dict[str, Any]) -> None:
    assert lock.tokenizer_facts(other)["fingerprint"] != lock.tokenizer_facts(TOKENIZER)["fingerprint"]


def test_a_unigram_vocabulary_is_a_list() -> None:
    one = lock.tokenizer_facts({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}})
    two = lock.tokenizer_facts({"model": {"type": "Unigram", "vocab": [["a", -1.5], ["<unk>", 0.0]]}})
    assert one["size"] == 2 and one["fingerprint"] != two["fingerprint"]


class Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        # The path says what to answer; the token that came is answered in the header of a 200.
        status = int(self.path.rsplit("/", 1)[-1])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(self.headers.get("Authorization", "none").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def refuser() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refuses)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "fix"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "check the name"), (503, "later")]
)
def test_a_hub_that_says_no(refuser: str, status: int, fix: str) -> None:
    with pytest.raises(CannotRun, match=str(status)) as caught:
        lock.fetch(f"{refuser}/{status}", "hf_secret")
    assert caught.value.code == "HUB_REFUSED" and fix in caught.value.fix
    assert "hf_secret" not in str(caught.value)


def test_the_token_travels_only_when_there_is_one(refuser: str) -> None:
    assert lock.fetch(f"{refuser}/200", "hf_secret") == b"Bearer hf_secret"
    assert lock.fetch(f"{refuser}/200", None) == b"none"


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(CannotRun, match="404") as caught:
        lock.lock_model("org/none", None, hub.url)
    assert caught.value.code == "HUB_REFUSED" and "check the name" in caught.value.fix


def test_an_unreachable_hub() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(CannotRun, match="cannot be reached") as caught:
        lock.lock_model(REPO, None, url)
    assert caught.value.code == "HUB_UNREACHABLE" and "HF_ENDPOINT" in caught.value.fix


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_a_hub_that_breaks_off(hub: Hub, kind: str) -> None:
    hub.faults = [{"path": "*/config.json", "kind": kind, "times": 1, "after": None}]
    with pytest.raises(CannotRun) as caught:
        lock.lock_model(REPO, None, hub.url)
    assert caught.value.code == "HUB_UNREACHABLE"


def test_an_answer_that_is_no_json(refuser: str) -> None:
    with pytest.raises(CannotRun, match="JSON") as caught:
        lock.fetch_json(f"{refuser}/200", None)
    assert caught.value.code == "HUB_DAMAGED" and "HF_ENDPOINT" in caught.value.fix


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://hub", "hub.example"])
def test_only_http_is_asked(endpoint: str) -> None:
    with pytest.raises(CannotRun) as caught:
        lock.lock_model(REPO, None, endpoint)
    assert caught.value.code == "HUB_ENDPOINT"


def test_which_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert lock.endpoint() == HUB_ENDPOINT
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    assert lock.endpoint() == "http://mirror" and lock.endpoint("http://given/") == "http://given"


def publish(hub: Hub, **files: bytes | str) -> Path:
    """A third revision with only these files (underscores are dots) besides config and tokenizer."""
    folder = hub.root / REPO / ("c" * 40)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def paths(entry: dict[str, Any]) -> list[str]:
    return [file["path"] for file in entry["files"]]


def test_licence_and_total_are_written_down(hub: Hub) -> None:
    (tree(hub) / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    entry = lock.lock_model(REPO, COMMIT, hub.url)
    assert entry["licence"] == "apache-2.0"
    assert entry["size"] == sum((tree(hub) / path).stat().st_size for path in paths(entry))
    assert lock.lock_model(REPO, OLDER, hub.url)["licence"] is None


@pytest.mark.parametrize(
    ("about", "licence"),
    [
        ({"cardData": {"license": "other", "license_name": "qwen-research"}}, "qwen-research"),
        ({"tags": ["region:us", "license:mit"]}, "mit"),
        ({"cardData": None, "tags": None}, None),
    ],
)
def test_where_the_licence_stands(about: dict[str, Any], licence: str | None) -> None:
    assert lock.licence_of(about) == licence


def test_only_the_indexs_shards_are_needed(hub: Hub) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    folder = publish(hub, **{lock.INDEX: index, "m-1.safetensors": "1", "m-2.safetensors": "2"})
    (folder / "consolidated.safetensors").write_text("the same weights again")
    (folder / "empty.json").touch()
    assert paths(lock.lock_model(REPO, "c" * 40, hub.url)) == [
        "config.json",
        "m-1.safetensors",
        "m-2.safetensors",
        lock.INDEX,
    ]
    (folder / "m-2.safetensors").unlink()
    with pytest.raises(CannotRun, match=r"m-2\.safetensors") as caught:
        lock.lock_model(REPO, "c" * 40, hub.url)
    assert caught.value.code == "HUB_NO_MODEL"


def test_pickled_weights_are_refused_unless_allowed_by_name(hub: Hub) -> None:
    publish(hub, **{"pytorch_model.bin": "pickle", "training_args.bin": "pickle", "modeling.py": "import os"})
    with pytest.raises(CannotRun, match=r"pytorch_model\.bin, training_args\.bin") as caught:
        lock.lock_model(REPO, "c" * 40, hub.url)
    assert caught.value.code == "HUB_UNSAFE" and "--allow-unsafe" in caught.value.fix
    entry = lock.lock_model(REPO, "c" * 40, hub.url, None, ["pytorch_model.bin"])
    assert paths(entry) == ["config.json", "pytorch_model.bin"] and entry["unsafe"] == ["pytorch_model.bin"]
    with pytest.raises(CannotRun, match="has no file"):
        lock.lock_model(REPO, "c" * 40, hub.url, None, ["x.bin"])


def test_no_weights_at_all(hub: Hub) -> None:
    publish(hub, **{"modeling.py": "import os"})
    with pytest.raises(CannotRun, match="no weights"):
        lock.lock_model(REPO, "c" * 40, hub.url)


def test_a_small_file_that_is_not_what_the_hub_lists_is_refused(hub: Hub) -> None:
    hub.faults = [{"path": "*/config.json", "kind": "wrong", "times": 1, "after": None}]
    with pytest.raises(CannotRun, match=r"config\.json") as caught:
        lock.lock_model(REPO, None, hub.url)
    assert caught.value.code == "HUB_DAMAGED"


def test_a_gated_model_is_locked_with_the_token_and_the_token_is_written_nowhere(hub: Hub) -> None:
    hub.token = "hf_secretsecret"
    with pytest.raises(CannotRun, match="401") as caught:
        lock.lock_model(REPO, None, hub.url)
    assert "HF_TOKEN" in caught.value.fix
    assert "hf_secret" not in json.dumps(lock.lock_model(REPO, None, hub.url, "hf_secretsecret"))


def test_the_token_does_not_follow_a_redirect_to_another_host(hub: Hub) -> None:
    other = Hub(hub.root)
    other.start()
    try:
        for to, told in ((other.url, []), (hub.url, ["org/model/config.json"] * 2)):
            other.with_token.clear()
            hub.with_token.clear()
            hub.faults = [{"path": "*/config.json", "kind": "redirect", "to": to, "times": 1, "after": None}]
            lock.lock_model(REPO, None, hub.url, "hf_secretsecret")
            assert other.with_token == []
            assert [key for key in hub.with_token if "config" in key] == (told or ["org/model/config.json"])
    finally:
        other.stop()


def test_a_list_in_pages(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"http://h/a": (b"[1]", '<http://h/b>; rel="next"'), "http://h/b": (b"[2]", "")}
    monkeypatch.setattr(lock, "_open", lambda url, _: pages[url])
    assert lock.fetch_list("http://h/a", None) == [1, 2]


def test_changes_are_told_in_words() -> None:
    before = {
        "revision": OLDER,
        "licence": "mit",
        "files": [
            {"path": "a", "size": 1, "sha256": "1"},
            {"path": "b", "size": 1, "sha256": "1"},
        ],
    }
    after = {
        "revision": COMMIT,
        "licence": "other",
        "files": [{"path": "a", "size": 2, "sha256": "2"}, {"path": "c", "size": 3, "sha256": "3"}],
    }
    assert lock.changes(before, before) == []
    assert lock.changes(before, after) == [
        "commit aaaaaaaaaaaa -> bbbbbbbbbbbb",
        "licence mit -> other",
        "c is new (3 bytes)",
        "b is gone",
        "a has other bytes (1 -> 2)",
    ]


def test_what_changes_ids_or_the_prompt_is_in_the_lock() -> None:
    plain = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": 1, "content": "<x>"}]}
    strips = plain | {"added_tokens": [{"id": 1, "content": "<x>", "lstrip": True}]}
    ignores = plain | {"model": plain["model"] | {"ignore_merges": True}}  # type: ignore[operator]
    assert len({lock.tokenizer_facts(t)["fingerprint"] for t in (plain, strips, ignores)}) == 3
    assert lock.chat_template({"tokenizer_config.json": b'{"chat_template": "a"}'}) == "a"
    assert lock.chat_template({"tokenizer_config.json": b'{"chat_template": "a"}', "chat_template.jinja": b"b"}) == "b"
    assert lock.chat_template({}) is None


def gguf_file(heads: int = 2) -> bytes:
    """A GGUF file of more than a megabyte whose header ends beyond the first one: its vocabulary is long."""
    from specrig.lab import gguf

    config = {
        "num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": heads,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1.0, "vocab_size": 120_000, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    rows = gguf.metadata("m", config, {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "{{ x }}")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + len(rows).to_bytes(8, "little")
    return head + b"".join(gguf.entry(*row) for row in rows) + bytes(10_000)


def test_one_gguf_file_of_many_is_locked_by_its_name(hub: Hub) -> None:
    (tree(hub) / "config.json").unlink()
    for name in ("m-Q4.gguf", "m-Q8.gguf"):
        (tree(hub) / name).write_bytes(gguf_file())
    entry = lock.lock_model(REPO, None, hub.url, only=["m-Q4.gguf"])
    content = (tree(hub) / "m-Q4.gguf").read_bytes()
    assert entry["files"] == [
        {"path": "m-Q4.gguf", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert entry["config"]["vocab_size"] == 120_000 and entry["config"]["quantization"] == "gguf"
    assert entry["config"]["head_dim"] == 4 and entry["tokenizer"]["size"] == 1
    assert entry["size"] == len(content)


def test_all_parts_of_a_split_file_are_locked(hub: Hub) -> None:
    names = [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        (tree(hub) / name).write_bytes(gguf_file())
    entry = lock.lock_model(REPO, None, hub.url, only=[names[0]])
    assert [file["path"] for file in entry["files"]] == names
    (tree(hub) / names[2]).unlink()
    with pytest.raises(CannotRun, match="00003-of-00003"):
        lock.lock_model(REPO, None, hub.url, only=[names[0]])


def test_a_gguf_file_that_is_not_there_names_those_that_are(hub: Hub) -> None:
    (tree(hub) / "m-Q4.gguf").write_bytes(gguf_file())
    with pytest.raises(CannotRun, match=r"m-Q4\.gguf") as seen:
        lock.lock_model(REPO, None, hub.url, only=["m-Q5.gguf"])
    assert seen.value.code == "HUB_NO_MODEL"


def test_a_file_that_only_is_called_gguf_is_told(hub: Hub) -> None:
    (tree(hub) / "m.gguf").write_bytes(b"not a model" * 200_000)
    with pytest.raises(CannotRun, match="no GGUF file"):
        lock.lock_model(REPO, None, hub.url, only=["m.gguf"])
