"""The module's core on a real directory; through a real ansible-playbook: tests/contract/test_ansible.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.ansible.modules import managed_files as module
from specrig.ansible.modules.managed_files import overlay, splice


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def run(check: bool = False, **payload: Any) -> dict[str, Any]:
        return module.apply(json.loads(json.dumps(payload, default=str)), check, True, tmp_path / "record/managed.json")

    return run


def left_over(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if ".specrig-" in p.name]


def test_writes_once_with_mode_and_diff(put: Any, tmp_path: Path) -> None:
    file = {"dest": tmp_path / "etc/app/a.conf", "content": "é\n", "mode": "0640"}
    first = put(files=[file])
    assert first["changed"] and first["changed_files"] == [str(file["dest"])]
    assert first["diff"] == [
        {"before_header": str(file["dest"]), "after_header": str(file["dest"]), "before": "", "after": "é\n"}
    ]
    assert (tmp_path / "etc/app/a.conf").read_text() == "é\n"
    assert (tmp_path / "etc/app/a.conf").stat().st_mode & 0o7777 == 0o640
    assert put(files=[file]) == {"changed": False, "changed_files": [], "backups": {}, "diff": []}
    assert left_over(tmp_path) == []


def test_a_wrong_mode_is_corrected_and_shown(put: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.conf"
    path.write_text("x")
    path.chmod(0o666)
    result = put(files=[{"dest": path, "content": "x"}])
    assert path.stat().st_mode & 0o777 == 0o644
    assert "mode 0666" in result["diff"][0]["before"] and "mode 0644" in result["diff"][0]["after"]


def test_check_mode_changes_nothing_and_says_the_same(put: Any, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    payload = {
        "files": [{"dest": tmp_path / "d/a", "content": "x", "validate": ["/nowhere/validator", "%s"]}],
        "directories": [{"path": tmp_path / "d", "mode": "0700"}],
        "absent": [tmp_path / "old"],
    }
    result = put(check=True, **payload)
    assert result["changed_files"] == [str(tmp_path / n) for n in ("d", "d/a", "old")]
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_one_refused_file_keeps_all_of_them(put: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old a")
    (tmp_path / "b").write_text("old b")
    files = [
        {"dest": tmp_path / "a", "content": "new a"},
        {
            "dest": tmp_path / "b",
            "content": "bad",
            "validate": ["sh", "-c", "echo line 3 is wrong; ! grep bad $0", "%s"],
        },
    ]
    with pytest.raises(module.Refused, match=r"(?s)b: sh refuses.*line 3 is wrong"):
        put(files=files)
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("old a", "old b")
    assert left_over(tmp_path) == []


def test_the_validator_sees_the_files_own_name(put: Any, tmp_path: Path) -> None:
    validate = ["sh", "-c", 'test "$(basename "$0")" = x.service', "%s"]
    put(files=[{"dest": tmp_path / "x.service", "content": "[Unit]\n", "validate": validate}])
    assert (tmp_path / "x.service").exists()


def test_a_persons_file_is_backed_up_and_ours_is_not(put: Any, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text("theirs")
    path.chmod(0o600)
    first = put(files=[{"dest": path, "content": "ours 1", "backup": True}])
    backup = Path(first["backups"][str(path)])
    assert backup.read_text() == "theirs" and backup.stat().st_mode & 0o777 == 0o600
    assert backup.name.startswith("daemon.json.2") and backup.name.endswith(".specrig~")
    assert put(files=[{"dest": path, "content": "ours 2", "backup": True}])["backups"] == {}
    path.write_text("edited by hand")
    assert len(put(files=[{"dest": path, "content": "ours 3", "backup": True}])["backups"]) == 1


def test_a_secret_is_in_no_output_and_not_recorded(put: Any, tmp_path: Path) -> None:
    file = {"dest": tmp_path / "key", "content": "s3cret", "secret": True}
    assert "s3cret" not in json.dumps(put(files=[file]))
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    changed = put(files=[{**file, "content": "other"}])
    assert "s3cret" not in json.dumps(changed) and "other" not in json.dumps(changed) and changed["diff"] == []
    assert not (tmp_path / "record/managed.json").exists()
    with pytest.raises(module.Refused) as caught:
        put(files=[{**file, "content": "s3cret 2", "validate": ["sh", "-c", "cat $0; false", "%s"]}])
    assert "s3cret" not in str(caught.value)


def test_if_missing_never_replaces(put: Any, tmp_path: Path) -> None:
    file = {"dest": tmp_path / "key", "content": "one", "secret": True, "if_missing": True}
    assert put(files=[file])["changed"]
    assert not put(files=[{**file, "content": "two"}])["changed"]
    (tmp_path / "key").chmod(0o644)
    assert put(files=[{**file, "content": "three"}])["changed"]
    assert (tmp_path / "key").read_text() == "one" and (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_merge_keeps_other_keys_and_refuses_what_is_not_json(put: Any, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"data-root": "/big",  "log-driver": "json-file"}')
    file = {"dest": path, "content": '{"log-driver": "local"}', "merge": True, "backup": True}
    assert put(files=[file])["backups"]
    assert json.loads(path.read_text()) == {"data-root": "/big", "log-driver": "local"}
    assert not put(files=[file])["changed"]
    path.write_text("{broken")
    with pytest.raises(module.Refused, match="not valid JSON"):
        put(files=[file])
    assert path.read_text() == "{broken"


def test_keys_that_belong_together_are_set_only_where_none_of_them_is(put: Any, tmp_path: Path) -> None:
    path = tmp_path / "etc/daemon.json"
    path.parent.mkdir(exist_ok=True)
    log = {"log-driver": "local", "log-opts": {"max-size": "10m"}}
    for text, wanted, expected in (
        ('{"a": 1}', "{}", {"a": 1, **log}),
        ('{"log-opts": {"tag": "x"}}', "{}", {"log-opts": {"tag": "x"}}),
        ("{}", '{"log-driver": "journald"}', {"log-driver": "journald"}),
        ("", '{"b": 2}', {"b": 2, **log}),
    ):
        path.write_text(text)
        file = {"dest": path, "content": wanted, "merge": True, "unless_set": log}
        put(files=[file])
        assert json.loads(path.read_text()) == expected
        assert not put(files=[file])["changed"]


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        (
            '{\n\t"max-concurrent-downloads" : 1.0e1,\n\t"labels": [ "caf\\u00e9" ]\n}\n',
            {"features": {"cdi": True}},
            '{\n\t"max-concurrent-downloads" : 1.0e1,\n\t"labels": [ "caf\\u00e9" ],\n\t"features": {\n\t  "cdi": true\n\t}\n}\n',
        ),
        ('{"a":{"b":1.50}, "c":2}', {"a": {"d": 3}, "c": 4}, '{"a":{"b":1.50, "d": 3}, "c":4}'),
        ('{\n  "features": {}\n}', {"features": {"cdi": True}}, '{\n  "features": {"cdi": true}\n}'),
        ("{}", {"a": 1}, '{\n  "a": 1\n}'),
    ],
)
def test_what_is_not_ours_stays_byte_for_byte(
    put: Any, tmp_path: Path, before: str, wanted: dict[str, Any], after: str
) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(before)
    put(files=[{"dest": path, "content": json.dumps(wanted), "merge": True}])
    assert path.read_text() == after


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(
    there=st.dictionaries(st.text(), _VALUES), wanted=st.dictionaries(st.text(), _VALUES), indent=st.none() | st.just(3)
)
def test_a_spliced_document_says_what_a_merged_one_says(
    there: dict[str, Any], wanted: dict[str, Any], indent: int | None
) -> None:
    text = json.dumps(there, indent=indent)
    assert json.loads(splice(text, 0, wanted)) == overlay(there, wanted)


def test_merge_reaches_into_objects_and_leaves_a_persons_own_keys_there(put: Any, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    theirs = {"features": {"buildkit": True}, "runtimes": {"crun": {"path": "/usr/bin/crun"}}, "dns": ["192.0.2.1"]}
    path.write_text(json.dumps(theirs))
    for content in ({"features": {"cdi": True}}, {"runtimes": {"nvidia": {"path": "n"}}}, {"dns": ["192.0.2.2"]}):
        assert put(files=[{"dest": path, "content": json.dumps(content), "merge": True}])["changed"]
        assert not put(files=[{"dest": path, "content": json.dumps(content), "merge": True}])["changed"]
    assert json.loads(path.read_text()) == {
        "features": {"buildkit": True, "cdi": True},
        "runtimes": {"crun": {"path": "/usr/bin/crun"}, "nvidia": {"path": "n"}},
        "dns": ["192.0.2.2"],
    }


def test_a_link_is_replaced_and_its_target_left(put: Any, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to("target")
    put(files=[{"dest": tmp_path / "link", "content": "ours"}])
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "mine"


def test_absent_takes_files_and_the_directory_they_emptied(put: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_text("x")
    assert put(absent=[tmp_path / "d", tmp_path / "d/a", tmp_path / "none"])["changed_files"] == [
        str(tmp_path / "d"),
        str(tmp_path / "d/a"),
    ]
    assert not (tmp_path / "d").exists()
    (tmp_path / "d").mkdir()
    (tmp_path / "d/theirs").write_text("x")
    with pytest.raises(module.Refused, match="not empty"):
        put(absent=[tmp_path / "d"])
    assert (tmp_path / "d/theirs").exists()


@pytest.mark.parametrize("path", ["relative", "/", "/etc", "/etc/../x/y", "/etc//x", "/etc/x/", ""])
def test_dangerous_paths_are_refused(put: Any, path: str) -> None:
    for payload in ({"files": [{"dest": path, "content": ""}]}, {"absent": [path]}, {"directories": [{"path": path}]}):
        with pytest.raises(module.Refused, match="normal absolute path"):
            put(check=True, **payload)


@pytest.mark.parametrize(
    ("key", "value"), [("mode", "0888"), ("mode", "rw"), ("mode", 99999), ("owner", "no-such-user")]
)
def test_bad_attributes_are_refused(put: Any, tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(module.Refused):
        put(files=[{"dest": tmp_path / "a", "content": "", key: value}])


def test_a_name_given_twice_is_refused(put: Any, tmp_path: Path) -> None:
    with pytest.raises(module.Refused, match="twice"):
        put(files=[{"dest": tmp_path / "a", "content": ""}], absent=[tmp_path / "a"])
