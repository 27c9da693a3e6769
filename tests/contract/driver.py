"""Runs inside the parser environment: one engine version's own code, many cases. JSON lines in, JSON lines out.

    python -m tests.contract.driver TREE VERSION api_server|serve|sglang ENGINE < cases      a case: {"argv": [...], "stage": "parse"}

The package's `__init__` is not run (in early versions it imports the whole engine); every other module is the
version's own, except the stand-ins. Stage `parse` repeats what the image's entry point does before it starts a
server: parse, then `validate_parsed_serve_args`. Stage `flags` lists the parser's options.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract import stand_ins

CLI_ARGS = (  # where `make_arg_parser` lived, newest first
    "entrypoints.common.cli_args",
    "entrypoints.launchers.cli_args",
    "entrypoints.openai.cli_args",
)


SPECULATIVE = (
    "method",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "use_heterogeneous_vocab",
    "parallel_drafting",
)


package = ["vllm"]  # the engine's package; main sets it


def exports(init: Path) -> dict[str, str]:
    """Public name -> module, read from the package's `__init__` without running it."""
    found = {}
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (f"{init.parent.name}." if node.level else "") + (node.module or "")
            found.update({alias.asname or alias.name: module for alias in node.names})
    return found


def enter(tree: Path, version: str) -> None:
    """Make the engine importable: the version's own modules from TREE, stand-ins for what is not there."""
    # transformers looks for torch once and remembers; it must not find the stand-in.
    importlib.import_module("transformers.utils.import_utils").is_torch_available()
    settings: Any = importlib.import_module("transformers.configuration_utils")
    stand_ins.install(package[0])
    # ... except to read a configuration's "float16" as `torch.float16`.
    settings.is_torch_available = lambda: True
    sys.path.append(str(tree))  # the engine looks up its own metadata
    made: Any = types.ModuleType(package[0])
    made.__path__ = [str(tree / package[0])]
    made.__file__ = str(tree / package[0] / "__init__.py")
    made.__version__ = version
    homes = exports(Path(made.__file__))

    def public(name: str) -> Any:
        if name not in homes:
            raise AttributeError(name)
        return getattr(importlib.import_module(homes[name]), name)

    made.__getattr__ = public
    sys.modules[package[0]] = made


def cli_args(tree: Path) -> Any:
    """The module that defines this version's server options."""
    for name in CLI_ARGS:
        if (tree / package[0] / (name.replace(".", "/") + ".py")).exists():
            return importlib.import_module(f"{package[0]}.{name}")
    raise FileNotFoundError(f"none of {CLI_ARGS} in {tree}")


def make_parser(module: Any, serve: bool) -> Callable[[list[str]], Any]:
    """A function argv -> namespace that does what the image's entry point does with its arguments."""
    flexible = module.FlexibleArgumentParser
    if serve:  # vllm/entrypoints/cli/main.py and serve.py
        main = flexible(description="vLLM CLI")
        commands = main.add_subparsers(required=False, dest="subparser")
        module.make_arg_parser(commands.add_parser("serve", usage="vllm serve [model_tag] [options]"))
    else:  # vllm/entrypoints/openai/api_server.py
        main = module.make_arg_parser(flexible(description="vLLM OpenAI-Compatible RESTful API server."))

    def run(argv: list[str]) -> Any:
        words = ["serve", *argv] if serve else list(argv)
        sys.argv = ["vllm", *words]
        args = main.parse_args()
        module.validate_parsed_serve_args(args)
        if serve and getattr(args, "model_tag", None) is not None:
            args.model = args.model_tag
        return args

    return run


def sglang_parser() -> tuple[Callable[[], argparse.ArgumentParser], Callable[[list[str]], Any]]:
    """SGLang's parser, and a function argv -> namespace that parses as sglang.launch_server does."""
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs

    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser(prog="sglang serve")
        arguments.add_cli_args(made)
        return made

    return parser, lambda argv: parser().parse_args(argv)


def plain(value: Any) -> Any:
    """A JSON form of a namespace value; None for what has none."""
    try:
        return json.loads(json.dumps(value, default=lambda o: getattr(o, "value", str(o))))
    except (TypeError, ValueError):
        return str(value)


def caught(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one case as a process would end: exit code, what it said on stderr, and what came of it."""
    out, err = io.StringIO(), io.StringIO()
    code, values, error = 0, {}, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            values = action()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException as problem:
            code, error = 1, f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
    return {"ok": code == 0, "exit_code": code, "error": error, "stderr": err.getvalue()[-4000:], "values": values}


def flags(parser: Any) -> dict[str, Any]:
    """Every option of the parser: flag -> {choices, default, takes}."""
    table = {}
    for action in parser._actions:
        for flag in action.option_strings:
            table[flag] = {
                "choices": plain(list(action.choices)) if action.choices else None,
                "default": plain(action.default),
                "takes": 0 if action.nargs == 0 else action.nargs or 1,
            }
    return table


def engine(args: Any, tree: Path) -> dict[str, Any]:
    """What the engine makes of the parsed arguments before it touches a device: its own checks of the whole set."""
    registry: Any = importlib.import_module(f"{package[0]}.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # a new process would not have the stand-ins
    made = (
        importlib.import_module(f"{package[0]}.engine.arg_utils")
        .AsyncEngineArgs.from_cli_args(args)
        .create_engine_config()
    )
    speculative, scheduler = made.speculative_config, made.scheduler_config
    values = {
        "quantization": made.model_config.quantization,
        "dtype": str(made.model_config.dtype),
        "max_model_len": made.model_config.max_model_len,
        "tensor_parallel_size": made.parallel_config.tensor_parallel_size,
        "enforce_eager": made.model_config.enforce_eager,
        "chunked_prefill": first(scheduler, "enable_chunked_prefill", "chunked_prefill_enabled"),
        "async_scheduling": first(scheduler, "async_scheduling"),
        "engine_v1": os.environ.get("VLLM_USE_V1"),  # set by the versions that have both engines
        "runner_v2": first(made, "use_v2_model_runner"),
        "speculative": None,
    }
    if speculative is not None:
        values["speculative"] = {name: first(speculative, name) for name in SPECULATIVE}
        draft = getattr(speculative, "draft_parallel_config", None)
        values["speculative"]["draft_tensor_parallel_size"] = first(draft, "tensor_parallel_size")
        start(made, values, tree)
    return values


def start(made: Any, values: dict[str, Any], tree: Path) -> None:
    """The checks that a version makes only when its worker or drafter starts, where they read nothing but numbers."""
    speculative, one = made.speculative_config, types.SimpleNamespace
    if (tree / package[0] / "spec_decode/spec_decode_worker.py").exists() and values["engine_v1"] != "1":
        worker = importlib.import_module(f"{package[0]}.spec_decode.spec_decode_worker").SpecDecodeWorker
        sizes = inspect.getattr_static(worker, "_vocab_size")
        draft, target = speculative.draft_model_config or made.model_config, made.model_config
        sizes = getattr(sizes, "fget", None) or sizes.func
        widths = [one(vocab_size=model.get_vocab_size()) for model in (draft, target)]
        sizes(one(proposer_worker=widths[0], scorer_worker=widths[1]))
        return
    drafts = (tree / package[0] / "v1/spec_decode/draft_model.py").exists() and speculative.method == "draft_model"
    if drafts and not values["runner_v2"]:  # runner V2 has a drafter of its own, without this check
        drafter = importlib.import_module(f"{package[0]}.v1.spec_decode.draft_model").DraftModelProposer
        drafter._raise_if_draft_tp_mismatch(one(speculative_config=speculative, vllm_config=made))


def first(thing: Any, *names: str) -> Any:
    """The first of these attributes that there is, in a JSON form."""
    return next((plain(getattr(thing, name)) for name in names if hasattr(thing, name)), None)


def apart(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`caught` in a forked child, so that one case leaves nothing behind for the next but what it imported."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        known = set(sys.modules)
        answer = [caught(action), [m for m in sys.modules if m not in known and m.startswith(f"{package[0]}.")]]
        with os.fdopen(send, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, encoding="utf-8") as pipe:
        result, imported = json.loads(pipe.read())
    os.waitpid(child, 0)
    for name in imported:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return result  # type: ignore[no-any-return]


def main(tree: Path, version: str, entry: str) -> None:
    """Answer each line of stdin with one line on stdout; the engine's own prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    enter(tree, version)
    parser: Callable[[], Any]
    if entry == "sglang":
        parser, parse = sglang_parser()
        empty = vars(parse(["--model-path", ""])).copy()
    else:
        module = cli_args(tree)
        parser, parse = (
            lambda: module.make_arg_parser(module.FlexibleArgumentParser()),
            make_parser(module, entry == "serve"),
        )
        empty = vars(parse([])).copy()

    def case(argv: list[str]) -> dict[str, Any]:
        space = vars(parse(argv))
        return {
            k: plain(v)
            for k, v in sorted(space.items())
            if k in ("model", "model_path") or plain(v) != plain(empty.get(k))
        }

    for line in sys.stdin:
        request = json.loads(line)
        if request["stage"] == "flags":
            result = caught(lambda: flags(parser()))
        elif request["stage"] == "engine":
            importlib.import_module(f"{package[0]}.model_executor.models.qwen2")  # once, not in every child
            os.environ.update(request["env"])
            stand_ins.cards[:] = [tuple(card) for card in request["cards"]]
            result = apart(functools.partial(lambda argv: engine(parse(argv), tree), request["argv"]))
            for name in request["env"]:
                del os.environ[name]
        else:
            result = caught(functools.partial(case, request["argv"]))
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    package[:] = sys.argv[4:]
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
