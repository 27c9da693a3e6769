"""Nothing that a plan carries can end an argument, start a directive, or expand."""

from __future__ import annotations

import shutil
import subprocess
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrig.ansible.filter.systemd import FilterModule, systemd_quote
from specrig.host import cli
from specrig.host.start import read_once
from specrig.plan import plan_host
from specrig.runner import ROOT
from tests.unit.ansible.unit_file import lines, words
from tests.unit.plan.tiny import r1, tiny, tiny_lock

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NASTY = st.text(st.sampled_from("\\\"'%$ \n\t\r;#{}[]=nxs0é\x1b\x7f\u2028"), max_size=12)
HOSTILE = [
    "", " ", "a b", "a\nUser=root", "a\n[Service]\nExecStartPre=/bin/sh", "a\r\nb", "tail\\", "\\\n", "\\x41\\n", '"', "'", '" ; /bin/sh -c "x',
    ";", "#", "# comment", "%n %h %%", "$HOME ${PATH} $$", "$", "%", "{{ 7 * 7 }}", "{% raw %}", "a=b=c", "-v/:/host", "\t\x1b[31m\x7f",
    "naïve 中文 🙂 \u2028 \u0085", "x" * 3000, "@!+-:/bin/sh", '{"a": "b\\"c"}',
]  # fmt: skip
NAMES = ["a", "A.b_c-d", "org/model", "m/..", "0", "x" * 128, "a--privileged", "a/b//c"]


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT | NASTY, max_size=4))
def test_every_argument_comes_back(arguments: list[str]) -> None:
    line = " ".join(systemd_quote(argument) for argument in arguments)
    assert "\n" not in line and "\r" not in line
    assert words(line) == arguments


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_come_back(value: str) -> None:
    assert words(f"/bin/x {systemd_quote(value)} end") == ["/bin/x", value, "end"]


def test_plain_words_stay_readable() -> None:
    assert [systemd_quote(v) for v in ("--port=8000", "/models/a:ro", 8000)] == ["--port=8000", "/models/a:ro", "8000"]
    assert FilterModule().filters() == {"systemd_quote": systemd_quote}


def test_nul_is_in_no_command_line() -> None:
    with pytest.raises(ValueError, match="NUL"):
        systemd_quote("a\0b")


@pytest.fixture(scope="module")
def action() -> Any:
    """The action plugin as Ansible makes it, without a connection."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins.loader import filter_loader
    from ansible.template import Templar

    from specrig.ansible.action.managed_files import ActionModule

    filter_loader.add_directory(str(ROOT / "src/specrig/ansible/filter"))
    loader = DataLoader()
    task = types.SimpleNamespace(async_val=0, environment=[])
    return ActionModule(
        task=task,
        connection=None,
        play_context=None,
        loader=loader,
        templar=Templar(loader=loader),
        shared_loader_obj=None,
    )


def unit(action: Any, service: dict[str, Any], gpu_access: str = "runtime") -> str:
    scope = {"service": service, "gpu_access": gpu_access}
    text = action._render("etc/systemd/system/specrig-service.service.j2", {"vars": scope}, {})
    assert isinstance(text, str)
    return text


def planned(declaration: dict[str, Any] | None = None) -> dict[str, Any]:
    service: dict[str, Any] = plan_host("alpha", declaration or tiny(), tiny_lock()).as_json()["services"][0]
    return service


def directives(text: str) -> list[tuple[str, str]]:
    return [(section, name) for section, name, _ in lines(text)]


def start(text: str) -> list[str]:
    """The container's command, which the service's main process runs."""
    command = main_process(text)
    return command[command.index("--") + 1 :]


def main_process(text: str) -> list[str]:
    [value] = [value for _, name, value in lines(text) if name == "ExecStart"]
    return words(value)


def test_the_ordinary_unit(action: Any) -> None:
    service = planned()
    command = start(unit(action, service))
    assert command[:2] == ["/usr/bin/docker", "run"]
    after_image = [service["key_env"], *service["entrypoint"], *service["argv"]]
    assert command[command.index(service["image"]) + 1 :] == after_image
    assert {f"{k}={v}" for k, v in service["env"].items()} <= {b for a, b in pairwise(command) if a == "--env"}


@pytest.mark.parametrize("engine", ["llama_cpp", "ollama"])
def test_the_main_process_reads_from_its_unit_what_the_plan_says_of_the_probe(action: Any, engine: str) -> None:
    [service] = plan_host("host", {"rig_profile": f"rtx4090_r1_14b_{engine}"}).as_json()["services"]
    settings = cli._settings(cli.parser().parse_args(main_process(unit(action, service))[1:]))
    assert list(settings.progress) == service["progress"] and settings.metrics_path == service["metrics_path"]
    found = {
        "interval_s": settings.probe_interval,
        "timeout_s": settings.probe_timeout,
        "failures": settings.probe_failures,
        "patience_s": settings.patience,
    }
    assert found == service["probe"]


def test_an_engine_without_a_key_of_its_own_and_with_a_file(action: Any) -> None:
    file = {"path": "/etc/specrig/services/tiny/a b.yml", "path_in_container": "/config/engine.yml", "content": "x"}
    command = start(unit(action, {**planned(), "key_env": "", "files": [file]}))
    assert command[command.index(planned()["image"]) + 1] == "-"
    assert f"{file['path']}:{file['path_in_container']}:ro" in [b for a, b in pairwise(command) if a == "--volume"]


@pytest.mark.parametrize(
    ("names", "seen"), [("ONE", "k y,-"), ("ONE,TWO", "k y,k y"), ("-", "-,-"), ("ONE;touch x", None), ("", None)]
)
def test_the_key_reaches_the_engine_in_its_variable(tmp_path: Path, names: str, seen: str | None) -> None:
    wrapper = (ROOT / "templates/usr/local/lib/specrig/with-api-key").read_text()
    (tmp_path / "key").write_text("k y\n")
    (tmp_path / "w").write_text(wrapper.replace("/run/secrets/api-key", str(tmp_path / "key")))
    shown = ["sh", "-c", 'echo "${ONE:--},${TWO:--}|$*"', "engine", "a b", "*"]
    command, env = ["sh", str(tmp_path / "w"), names, *shown], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert not (tmp_path / "x").exists()
    assert (done.stdout == f"{seen}|a b *\n") if seen else done.stdout.startswith("-,-|") or done.returncode != 0


@pytest.mark.parametrize(
    ("own", "seen"), [(None, "/usr/local/lib/specrig"), ("/opt/a:/b", "/opt/a:/b:/usr/local/lib/specrig")]
)
def test_the_guard_is_found_after_all_of_the_images_own(own: str | None, seen: str) -> None:
    wrapper = ROOT / "templates/usr/local/lib/specrig/with-api-key"
    env = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": own} if own else {})
    command = ["sh", str(wrapper), "-", "sh", "-c", "echo $PYTHONPATH"]
    assert subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.strip() == seen


def test_the_guard_is_mounted_and_named(action: Any) -> None:
    command = start(unit(action, planned()))
    assert ("--middleware", "specrig_guard.Guard") in pairwise(command)
    assert "/usr/local/lib/specrig/specrig_guard.py:/usr/local/lib/specrig/specrig_guard.py:ro" in command


def test_what_it_mounts_of_ours_restarts_it_when_it_changes(action: Any) -> None:
    """A mounted file is the one that was there at the start: a corrected guard would guard nothing."""
    own = "/etc/specrig/services/tiny/engine.yml"
    service = {**planned(), "files": [{"path": own, "path_in_container": "/config/engine.yml", "content": "x"}]}
    command = start(unit(action, service))
    mounts = [after.split(":")[0] for word, after in pairwise(command) if word == "--volume"]
    ours = {path for path in mounts if path.startswith(("/etc/", "/usr/"))}
    read = read_once(service["unit"], [own])
    assert ours == set(read) - {f"/etc/systemd/system/{service['unit']}"}


def test_a_compile_cache_that_was_deleted_is_made_again_for_the_engine(action: Any) -> None:
    text = unit(action, planned())
    made = {name: value for _, name, value in lines(text) if name.startswith("CacheDirectory")}
    [home] = [after for word, after in pairwise(start(text)) if word == "--volume" and after.endswith(":/home/engine")]
    assert home == f"/var/cache/{made['CacheDirectory']}:/home/engine" and made["CacheDirectoryMode"] == "0770"


def test_words_of_refusal_reach_the_main_process(action: Any) -> None:
    said = ["error: invalid argument: ", 'a "b" %n $x']
    command = main_process(unit(action, {**planned(), "refused_words": said}))
    assert [after for word, after in pairwise(command[: command.index("--")]) if word == "--refused"] == said


def test_cards_are_named_to_docker_in_its_own_quotes(action: Any) -> None:
    service = planned(r1(host={"rig_gpus": [{"name": "rtx_4090", "count": 2}]}, tensor_parallel=2))
    command = start(unit(action, service))
    assert command[command.index("--gpus") + 1] == '"device=0,1"'
    command = start(unit(action, {**service, "gpus": ["GPU-a", 1]}, "cdi"))
    named = [after for word, after in pairwise(command) if word == "--device"]
    assert named == ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=1"] and "--gpus" not in command


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_becomes_a_directive(action: Any, value: str) -> None:
    service = planned()
    usual = directives(unit(action, service))
    hostile = {
        **service,
        "argv": [*service["argv"], value, "--seed", value],
        "env": {**service["env"], "A": value},
        "image": value,
        "models": [{**service["models"][0], "path": f"/srv/{value}"}],
        "ports": [{**service["ports"][0], "bind": value}],
    }
    text = unit(action, hostile)
    assert directives(text) == usual
    command = start(text)
    assert command[-len(hostile["argv"]) :] == hostile["argv"]
    assert command[command.index("--entrypoint") + 2] == value
    assert f"A={value}" in command and f"/srv/{value}:/models/target:ro" in command
    assert command[command.index("--publish") + 1] == f"{f'[{value}]' if ':' in value else value}:8000:8000"


@pytest.mark.parametrize("name", NAMES)
def test_names_that_the_plan_allows_are_harmless(action: Any, name: str) -> None:
    plan = plan_host("alpha", tiny(served_name=name), tiny_lock())
    assert plan.ok
    service = plan.as_json()["services"][0]
    text = unit(action, service)
    assert directives(text) == directives(unit(action, planned()))
    ready = main_process(text)
    assert ready[ready.index("--model") + 1] == name
    for _, key, value in lines(text):
        assert key.startswith("Exec") or "%" not in value.replace("%%", ""), "a specifier"


@pytest.mark.parametrize("name", ["", "a b", "a\nUser=root", "%n", "$HOME", "-x", "é", 'a"', "x" * 129])
def test_names_that_it_would_not_escape_are_refused(name: str) -> None:
    for declaration in (tiny(served_name=name), {"rig_profile": "cpu_demo", "rig_services": [{"name": name}]}):
        assert not plan_host("alpha", declaration, tiny_lock()).ok


def test_an_ipv6_address_is_bracketed(action: Any) -> None:
    text = unit(action, planned(tiny(bind="::1")))
    command = start(text)
    assert command[command.index("--publish") + 1] == "[::1]:8000:8000"
    ready = main_process(text)
    assert ready[ready.index("--url") + 1] == "http://[::1]:8000"


@pytest.mark.parametrize("zone", ["eth0", "x\nUser=root", "a b"])
def test_an_address_with_a_zone_is_refused(zone: str) -> None:
    plan = plan_host("alpha", tiny(bind=f"::1%{zone}"), tiny_lock())
    assert [found.code for found in plan.refusals] == ["BIND_INVALID"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_accepts_the_unit(action: Any, tmp_path: Path) -> None:
    text = unit(action, {**planned(), "argv": HOSTILE})
    for program in ("/usr/bin/docker", "/usr/local/lib/specrig/specrig-host"):  # verify wants them to be there
        text = text.replace(f"={program} ", "=/bin/true ").replace(f"=-{program} ", "=-/bin/true ")
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "specrig-tiny.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "specrig-tiny.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_alternates_conflict_and_one_of_them_waits_for_the_other_to_stop(action: Any) -> None:
    one = {**planned(), "unit": "specrig-a.service", "conflicts": ["specrig-b.service"]}
    other = {**planned(), "unit": "specrig-b.service", "conflicts": ["specrig-a.service"]}
    texts = [unit(action, one), unit(action, other)]
    assert [value for text in texts for _, name, value in lines(text) if name == "Conflicts"] == [
        "specrig-b.service",
        "specrig-a.service",
    ]
    waits = [[value for _, name, value in lines(text) if name == "After"][1:] for text in texts]
    assert waits == [[], ["specrig-a.service"]]  # not both: that would be a cycle
