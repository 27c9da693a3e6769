"""Values that try to be more than one word: for units, command lines, Caddyfiles. Shared by the plan's tests and those with the real parsers."""

from __future__ import annotations

HOSTILE = {
    "empty": "",
    "space": " ",
    "words": "a b",
    "newline": "a\nUser=root",
    "section": "a\n[Service]\nExecStartPre=/bin/sh",
    "carriage return": "a\r\nb",
    "backslash at the end": "tail\\",
    "line goes on": "\\\n",
    "escapes": "\\x41\\n\\",
    "double quote": '"',
    "single quote": "'",
    "command": '" ; /bin/sh -c "x',
    "semicolon": ";",
    "comment": "# comment",
    "specifiers": "%n %h %% %i %t",
    "variables": "$HOME ${PATH} $$ $",
    "substitution": "$(touch /tmp/x) `id`",
    "jinja": "{{ 7 * 7 }} {% raw %} {# x #}",
    "caddy placeholder": "{env.HOME} {$HOME} {http.request.header.Authorization}",
    "caddy block": "x {\n\trespond secret\n}",
    "caddy import": "import /etc/shadow",
    "option": "--privileged",
    "mount": "-v/:/host",
    "prefix": "@!+-:/bin/sh",
    "control": "\t\x1b[31m\x7f",
    "unicode": "naïve 中文 🙂 \u2028 \u0085 \u202e",
    "json": '{"a": "b\\"c"}',
    "path": "../../etc/passwd",
    "glob": "* ? [a-z] ~",
    "long": "x" * 65536,
}
NUL = "a\0b"
