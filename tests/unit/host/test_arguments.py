"""An image's own parser is asked before anything is stopped. `docker run` is played by a script that runs the snippet here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import arguments, proven
from specrig.host.errors import HostError

from .docker import Docker
from .test_pull import Recorder

IMAGE = "registry.test/engine:1"
DOCKER = """#!{python}
import os, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as out: print(*[w for w in sys.argv[1:] if "\\n" not in w], file=out)
if "-c" not in sys.argv: sys.exit(0 if sys.argv[-1] == "--help" and "--bogus" not in sys.argv else 1)
after = sys.argv.index("-c")
os.environ["PYTHONPATH"] = str(here / "package")
os.execv(sys.executable, [sys.executable, *sys.argv[after:]])
"""
CLI_ARGS = """
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser): pass
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--speculative-config")
    return parser
def validate_parsed_serve_args(args):
    if args.max_num_seqs == 13: raise ValueError("13 is no number of sequences")
"""
CONFIG = """
import dataclasses
class DeviceConfig: pass
@dataclasses.dataclass
class SpeculativeConfig:
    method: str = ""
    num_speculative_tokens: int = 0
"""


class Rig:
    """An engine package of the newest layout, and a service that has been proven with other words."""

    def __init__(self, folder: Path, docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.docker = folder, docker
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setattr(proven, "ROOT", folder / "services")
        (folder / "docker").write_text(DOCKER.replace("{python}", sys.executable))
        (folder / "docker").chmod(0o755)
        self.install("vllm/entrypoints/launchers/cli_args.py", CLI_ARGS)
        self.install("vllm/config.py", CONFIG)
        docker.images[IMAGE] = {"Id": "sha256:1"}

    def install(self, path: str, text: str) -> None:
        file = self.folder / "package" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def service(self, *argv: str, **more: Any) -> dict[str, Any]:
        return {
            "name": "chat", "engine": "vllm", "image": IMAGE, "entrypoint": ["vllm", "serve"], "argv": ["/models/target", *argv],
            "env": {}, **more,
        }  # fmt: skip

    def proven(self, service: dict[str, Any]) -> None:
        proven.Home("chat").keep({Path("/unit"): b"1"}, {"service": service, "image": IMAGE})

    def ask(self, *argv: str, check: bool = False, **more: Any) -> dict[str, Any]:
        job = {"services": [self.service(*argv, **more)]}
        return arguments.arguments(json.dumps(job), Recorder(), check)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Docker(tmp_path, monkeypatch) as docker:
        one = Rig(tmp_path, docker, monkeypatch)
        one.proven(one.service("--max-num-seqs", "4"))
        yield one


def test_what_the_parser_takes_is_asked_once(rig: Rig) -> None:
    assert rig.ask("--max-num-seqs", "8", check=True)["changed"] is True and rig.calls == []
    assert "takes its arguments" in rig.ask("--max-num-seqs", "8")["told"][0]
    assert rig.ask("--max-num-seqs", "8")["changed"] is False and len(rig.calls) == 1
    rig.docker.images[IMAGE] = {"Id": "sha256:2"}  # the same name, another image
    assert rig.ask("--max-num-seqs", "8")["changed"] is True


def test_it_is_asked_without_network_cards_or_rights(rig: Rig) -> None:
    rig.ask("--max-num-seqs", "8", env={"VLLM_USE_V1": "0"})
    for words in (
        "--network none",
        "--pull never",
        "--cap-drop ALL",
        "--read-only",
        "--env CUDA_VISIBLE_DEVICES= ",
        "--env VLLM_USE_V1=0",
    ):
        assert words in rig.calls[0]
    assert "--gpus" not in rig.calls[0] and "--volume" not in rig.calls[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-sequences", "8"], "unrecognized arguments: --max-sequences 8"),
        (["--max-num-seqs", "many"], "invalid int value"),
        (["--max-num-seqs", "13"], "13 is no number of sequences"),
        (
            ["--speculative-config", '{"method":"ngram","num_speculative_tokenz":3}'],
            "does not know num_speculative_tokenz",
        ),
    ],
)
def test_what_it_refuses_is_refused(rig: Rig, argv: list[str], said: str) -> None:
    with pytest.raises(HostError, match="ARGUMENTS_REFUSED") as caught:
        rig.ask(*argv)
    assert said in caught.value.cause and "nothing was changed" in caught.value.fix
    with pytest.raises(HostError):
        rig.ask(*argv)  # a refusal is not remembered as an answer


def test_a_first_start_and_proven_words_are_not_asked(rig: Rig) -> None:
    assert rig.ask("--max-num-seqs", "4")["changed"] is False
    assert rig.ask("--wrong", name="other")["changed"] is False
    assert rig.calls == []


def test_a_parser_that_cannot_be_built_is_a_note(rig: Rig) -> None:
    rig.install("vllm/entrypoints/launchers/cli_args.py", "raise ImportError('libcuda.so.1 is missing')")
    answer = rig.ask("--max-num-seqs", "8")
    assert "exit status 3" in answer["warnings"][0] and "libcuda.so.1 is missing" in answer["warnings"][0]
    assert rig.ask("--max-num-seqs", "8")["changed"] is False


def test_older_homes_of_the_parser_are_found(rig: Rig) -> None:
    old = rig.folder / "package/vllm/entrypoints"
    (old / "launchers").rename(old / "openai")
    server = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert "takes its arguments" in rig.ask("--max-num-seqs", "8", entrypoint=server)["told"][0]


def test_an_engine_that_is_no_python_is_asked_by_its_help(rig: Rig) -> None:
    llama: dict[str, Any] = {"engine": "llama_cpp", "entrypoint": ["/app/llama-server"]}
    assert "takes its arguments" in rig.ask("--parallel", "2", **llama)["told"][0]
    with pytest.raises(HostError) as seen:
        rig.ask("--bogus", "2", **llama)
    assert seen.value.code == "ARGUMENTS_REFUSED"


def test_an_engine_without_a_parser_is_told(rig: Rig) -> None:
    assert "ollama has no parser" in rig.ask("--x", engine="ollama")["told"][0]
    assert rig.calls == []


@pytest.mark.parametrize("text", ["", "{}", '{"services": [1]}', '{"services": [{}]}'])
def test_a_broken_job(rig: Rig, text: str) -> None:
    with pytest.raises(HostError, match="ARGUMENTS_JOB"):
        arguments.arguments(text, Recorder())


@pytest.mark.parametrize("name", arguments.SNIPPETS)
def test_snippets_are_python_of_every_version(name: str) -> None:
    compile(arguments.SNIPPETS[name], name, "exec")


def test_a_parser_that_gives_no_answer_leaves_no_container(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "TIMEOUT_S", 2)
    slow = DOCKER.replace('if "-c" not in', 'if sys.argv[1] == "run": import time; time.sleep(30)\nif "-c" not in')
    (rig.folder / "docker").write_text(slow.replace("{python}", sys.executable))
    with pytest.raises(HostError, match="HOST_TOOL"):
        rig.ask("--max-num-seqs", "8")
    words = rig.calls[0].split()
    assert rig.calls[1:] == [f"rm --force {words[words.index('--name') + 1]}"]
